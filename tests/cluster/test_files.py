"""Cluster files: they reload equal, and every kind of break is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.changes import put

from pipefit.cluster import check_cluster, load_cluster, open_cluster, parse_spec, save_cluster_file
from pipefit.cluster.kinds import data_sheet_kind
from pipefit.errors import ClusterError, FormatError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.json"))


def test_kinds_of_the_examples_are_those_of_the_data_sheets() -> None:
    """Else a cluster file gives another plan than the short form of the same cluster."""
    for path in EXAMPLES:
        cluster = load_cluster(path)
        for name, kind in cluster.kinds.items():
            sheet, link = data_sheet_kind(name)
            assert replace(kind, provenance=sheet.provenance) == sheet
            inside = {host.link for host in cluster.hosts if host.kind == name}
            assert {cluster.links[key] for key in inside} == {link}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load_and_reload_equal(path: Path, tmp_path: Path) -> None:
    cluster = load_cluster(path)
    save_cluster_file(cluster, tmp_path / "again.json")
    assert load_cluster(tmp_path / "again.json") == cluster == open_cluster(str(path))


def broken(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    data = json.loads((Path(__file__).parents[2] / "examples/clusters/mixed-kinds.json").read_text())
    change(data)
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(data))
    return path


BREAKS = {
    "version": (put("version", value=2), ["version of the cluster format", "seen: 2"]),
    "no hosts": (put("hosts", value=[]), ["at least one host"]),
    "two hosts of one name": (put("hosts", 1, "name", value="a0"), ["same name", "hosts[1] (a0)"]),
    "unknown kind": (put("hosts", 0, "kind", value="H900"), ["not describe", "hosts[0] (a0).kind", "A100-40, V100"]),
    "no devices": (put("hosts", 2, "devices", value=0), ["at least one device", "hosts[2] (v0).devices"]),
    "missing link inside": (put("hosts", 3, "link", value="nvlink9"), ["between the devices", "nvlink3, nvlink2"]),
    "no rail": (put("rails", value=[]), ["no rail for a0, a1, v0, v1", "add a rail"]),
    "matrix shape": (
        put("rails", 0, "latency_s", 1, value=[0.0, 0.0]),
        ["wrong shape", "rails[0] (ethernet).latency_s", "4 rows of 4"],
    ),
    "missing link between hosts": (
        put("rails", 0, "bandwidth_bytes_per_s", 0, 2, value=0.0),
        ["missing or impossible: a0 -> v0", "bandwidth_bytes_per_s[0][2]", "above zero"],
    ),
    "negative latency": (
        put("rails", 0, "latency_s", 3, 1, value=-1e-6),
        ["v1 -> a1", "latency_s[3][1]", "not negative"],
    ),
    "negative memory": (put("kinds", "V100", "memory_bytes", value=-1), ["impossible", "kinds.V100.memory_bytes"]),
    "no peak": (put("kinds", "V100", "peak_flops_per_s", value={"float32": 1e12}), ["peak for bfloat16 is missing"]),
    "efficiency in percent": (put("kinds", "V100", "efficiency", value=50), ["share of the peak", "seen: 50"]),
    "attention in percent": (
        put("kinds", "V100", "attention_efficiency", value=30),
        ["attention efficiency is a share of the peak", "kinds.V100.attention_efficiency", "seen: 30"],
    ),
    "no bandwidth share": (
        put("kinds", "V100", "bandwidth_efficiency", value=0),
        ["bandwidth efficiency is a share of the memory bandwidth", "seen: 0"],
    ),
    "products that move less than once": (
        put("kinds", "V100", "product_traffic", value=0.5),
        ["moves its activations at least once", "kinds.V100.product_traffic", "seen: 0.5"],
    ),
    "link without bandwidth": (
        put("links", "nvlink2", "bandwidth_bytes_per_s", value=0),
        ["impossible", "links.nvlink2.bandwidth_bytes_per_s"],
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_every_break_is_named(name: str, tmp_path: Path) -> None:
    change, words = BREAKS[name]
    with pytest.raises(ClusterError) as error:
        load_cluster(broken(tmp_path, change))
    for word in (*words, "cluster.json"):
        assert word in str(error.value), str(error.value)


def test_many_missing_links_are_counted(tmp_path: Path) -> None:
    path = broken(tmp_path, put("rails", 0, "bandwidth_bytes_per_s", value=[[0.0] * 4] * 4))
    with pytest.raises(ClusterError, match="a0 -> a1, a0 -> v0, a0 -> v1, a1 -> a0 and 8 more"):
        load_cluster(path)


def test_a_field_that_is_not_known_is_a_format_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="Unknown field 'latency_us'"):
        load_cluster(broken(tmp_path, put("links", "nvlink2", "latency_us", value=5)))


def test_a_file_that_is_cut_short_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text(EXAMPLES[0].read_text()[:200])
    with pytest.raises(FormatError, match="may have been cut short"):
        load_cluster(path)


def test_saving_checks_first(tmp_path: Path) -> None:
    cluster = parse_spec("2xH100")
    bad = type(cluster)(**{name: getattr(cluster, name) for name in cluster.__dataclass_fields__} | {"hosts": ()})
    with pytest.raises(ClusterError, match="at least one host"):
        save_cluster_file(bad, tmp_path / "bad.json")
    assert not (tmp_path / "bad.json").exists()
    check_cluster(cluster)
