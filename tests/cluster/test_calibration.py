"""Clusters with the factors of a calibration: `8xH100@calibration.json`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.hash_requests import measured

from pipefit.cluster import open_cluster, save_cluster_file
from pipefit.cluster.calibration import (
    ClusterCalibration,
    DeviceFactors,
    add_calibration,
    calibrate_cluster,
    save_calibration,
)
from pipefit.errors import ClusterError, FormatError

FACTORS = ClusterCalibration(devices={"H100": DeviceFactors(compute=0.5, memory=0.25)}, links=2.0)


def test_a_cluster_is_opened_with_its_calibration(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save_calibration(FACTORS, path)
    text = "2x8xH100:400Gbit/s"
    plain, opened = open_cluster(text), open_cluster(f"{text}@{path}")
    before, after = plain.kinds["H100"], opened.kinds["H100"]
    assert after.efficiency == before.efficiency / 2
    assert after.attention_efficiency == pytest.approx((before.attention_efficiency or 0) / 2)
    assert after.memory_bandwidth_bytes_per_s == before.memory_bandwidth_bytes_per_s / 4
    assert (after.memory_bytes, after.peak_flops_per_s) == (before.memory_bytes, before.peak_flops_per_s)
    assert opened.rails[0].bandwidth_bytes_per_s[0][1] == 2 * plain.rails[0].bandwidth_bytes_per_s[0][1]
    assert opened.rails[0].latency_s == plain.rails[0].latency_s
    assert opened.links["inside"].bandwidth_bytes_per_s == 2 * plain.links["inside"].bandwidth_bytes_per_s
    assert opened.name == f"{plain.name}@mine.json"
    assert "corrected by the user's own runs" in after.provenance.where


def test_a_calibration_of_this_machine(tmp_path: Path) -> None:
    kind = next(iter(open_cluster("local:2").kinds.values())).name
    path = tmp_path / "mine.json"
    save_calibration(ClusterCalibration(devices={kind: DeviceFactors(compute=0.5)}), path)
    before, after = (open_cluster(text).kinds["cpu"] for text in ("local:2", f"local:2@{path}"))
    assert after.efficiency == before.efficiency / 2


def test_a_name_with_the_sign_is_still_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "me@lab"
    folder.mkdir()
    save_cluster_file(open_cluster("2xH100"), folder / "cluster.json")
    assert open_cluster(str(folder / "cluster.json")) == open_cluster("2xH100")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format": "pipefit-calibration"}', "devices"),
        ('{"devices": {"H100": {"compute": 0}}}', "positive number"),
        ('{"devices": {"H100": {}}, "links": -1}', "links"),
        ("no json", "mine.json"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=words):
        open_cluster(f"8xH100@{path}")
    with pytest.raises(FormatError, match="cannot be read"):
        open_cluster(f"8xH100@{tmp_path / 'none.json'}")


def test_clusters_that_take_no_calibration() -> None:
    with pytest.raises(ClusterError, match=r"no factors for a kind[\s\S]*seen: A100-80[\s\S]*allowed: H100"):
        calibrate_cluster(open_cluster("8xA100-80"), FACTORS, "here")
    with pytest.raises(ClusterError, match="measured cluster takes no calibration"):
        calibrate_cluster(measured(4), FACTORS, "here")
    with pytest.raises(FormatError, match="calibration already"):
        add_calibration("8xH100@a.json", Path("b.json"))
    with pytest.raises(FormatError, match="is a JSON file"):
        add_calibration("8xH100", Path("b.txt"))
    assert add_calibration("8xH100", Path("b.json")) == "8xH100@b.json"
