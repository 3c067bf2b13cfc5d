"""Lab files: what is read, and every mistake that is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.lab_toys import lab_path, toy_cluster, toy_lab

from pipefit.cluster import Host, open_cluster, save_cluster_file
from pipefit.errors import ClusterError, FormatError, LabError
from pipefit.lab import spec
from pipefit.lab.spec import HostPort, LabFile, RackUplink
from pipefit.lab.tables import DeviceTable


def rack(name: str, *hosts: str) -> RackUplink:
    return RackUplink(name=name, hosts=hosts, up_bytes_per_s=1e7, down_bytes_per_s=1e7)


def table(**fields: Any) -> dict[str, DeviceTable]:
    return {"slow": DeviceTable(flops_per_s=1e9, memory_bytes_per_s=1e9, **fields)}


def test_a_lab_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    lab = toy_lab(
        toy_cluster(3),
        seed=5,
        size_scale=10.0,
        ports={"n1": HostPort(send_bytes_per_s=1e7)},
        uplinks=(rack("r", "n0", "n1"),),
    )
    assert spec.load_lab(lab_path(tmp_path, lab)) == lab


def test_a_plain_cluster_file_is_a_lab_without_tables(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    save_cluster_file(toy_cluster(), path)
    assert spec.load_lab(path) == LabFile(cluster=toy_cluster())


def test_the_planner_does_not_take_a_lab_file_for_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="Unknown field 'cluster'"):
        open_cluster(str(lab_path(tmp_path, toy_lab())))


@pytest.mark.parametrize(
    ("lab", "what", "where"),
    [
        (toy_lab(version=2), "version of the lab format", ""),
        (toy_lab(size_scale=0.0), "scale must be a number above zero", "size_scale"),
        (toy_lab(packet_bytes=100), "packet size is impossible", "packet_bytes"),
        (toy_lab(devices={"fast": table()["slow"]}), "no such kind of device", "devices"),
        (toy_lab(ports={"n9": HostPort()}), "no such host", "ports"),
        (toy_lab(ports={"n0": HostPort(send_bytes_per_s=0.0)}), "rate must be above zero", "ports.n0.send_bytes_per_s"),
        (toy_lab(uplinks=(rack("r", "n7"),)), "no such host", "uplinks[0] (r).hosts"),
        (toy_lab(uplinks=(rack("r", "n0"), rack("s", "n0"))), "in only one rack", "uplinks[1] (s).hosts"),
        (
            toy_lab(toy_cluster(rate=lambda a, b: 5e9)),
            "above the range that the lab can emulate",
            "bandwidth_bytes_per_s[0][1], n0 -> n1",
        ),
        (toy_lab(size_scale=1e5), "below the range that the lab can emulate", "bandwidth_bytes_per_s[0][1], n0 -> n1"),
        (toy_lab(toy_cluster(2, 40)), "cannot emulate this many devices", "hosts"),
        (toy_lab(devices=table(jitter=3.0)), "share is impossible", "devices.slow.jitter"),
        (toy_lab(devices=table(knee_tokens=0.0)), "must be above zero", "devices.slow.knee_tokens"),
        (toy_lab(devices=table(action_s=-1.0)), "must not be negative", "devices.slow.action_s"),
        (toy_lab(devices=table(factor={"F": 1.0})), "for each of F, I and W", "devices.slow.factor"),
    ],
)
def test_what_no_machine_can_make_is_named(lab: LabFile, what: str, where: str, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=what) as caught:
        spec.load_lab(lab_path(tmp_path, lab))
    assert where in str(caught.value.where)


def test_the_message_about_a_rate_says_how_to_mend_it(tmp_path: Path) -> None:
    lab = toy_lab(toy_cluster(rate=lambda a, b: 3.125e9))
    with pytest.raises(LabError) as caught:
        spec.check_lab(replace(lab, size_scale=2.0))
    assert caught.value.seen == "3.12 GB/s / size_scale 2 = 1.56 GB/s"
    assert caught.value.allowed == "10.0 kB/s to 1.00 GB/s"
    assert str(caught.value.next_step).startswith("raise size_scale")
    spec.check_lab(replace(lab, size_scale=100.0))


def test_missing_links_and_hosts_of_the_cluster_are_named(tmp_path: Path) -> None:
    dead = toy_cluster(3, rate=lambda a, b: 0.0 if (a, b) == (2, 1) else 1e7)
    with pytest.raises(ClusterError, match="missing or impossible: n2 -> n1"):
        spec.check_lab(toy_lab(dead))
    with pytest.raises(ClusterError, match="there is no rail"):
        spec.check_lab(toy_lab(replace(toy_cluster(), rails=())))
    strange = replace(toy_cluster(), hosts=(Host(name="n0", kind="H100", devices=1, link=""),), rails=())
    with pytest.raises(ClusterError, match="a device kind that the file does not describe"):
        spec.check_lab(toy_lab(strange))


def test_one_rail_is_made(tmp_path: Path) -> None:
    cluster = toy_cluster()
    with pytest.raises(LabError, match="one network between the hosts"):
        spec.check_lab(toy_lab(replace(cluster, rails=cluster.rails * 2)))


def test_a_file_that_is_cut_short_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    path.write_text(json.dumps({"cluster": 1})[:8])
    with pytest.raises(FormatError, match="not valid JSON"):
        spec.load_lab(path)
    with pytest.raises(FormatError, match="cannot be read"):
        spec.load_lab(tmp_path / "none.json")
