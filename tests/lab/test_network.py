"""What is typed into ip and tc, as text; and that real streams then share what the file says they share."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.lab_toys import lab_path, needs_lab, toy_cluster, toy_lab

from pipefit.lab import check, lifecycle, network
from pipefit.lab.lifecycle import Lab
from pipefit.lab.spec import HostPort, LabFile, RackUplink
from pipefit.lab.streams import HostStreams, StreamPair, open_streams

FOUR = toy_cluster(4, 1, rate=lambda a, b: 4e6 + 1e6 * a + 5e5 * b)
RACKS = (
    RackUplink(name="left", hosts=("n0", "n1"), up_bytes_per_s=3e6, down_bytes_per_s=6e6),
    RackUplink(name="right", hosts=("n2",), up_bytes_per_s=8e6, down_bytes_per_s=4e6),
)


def test_ports_are_as_fast_as_their_fastest_link_unless_the_file_says_otherwise() -> None:
    rates = network.rates_of(toy_lab(FOUR, size_scale=2.0, ports={"n1": HostPort(receive_bytes_per_s=2e6)}))
    assert rates.pair[0] == (0.0, 1e6, 2.5e6, 2.75e6), "halved, and no faster than the receiving port"
    assert rates.send == (2.75e6, 3.25e6, 3.75e6, 4e6)
    assert rates.receive == (3.5e6, 1e6, 4e6, 3.75e6)


def test_ports_that_are_not_shared_carry_all_links_at_once() -> None:
    cluster = replace(FOUR, rails=(replace(FOUR.rails[0], shared_ports=False),))
    assert network.rates_of(toy_lab(cluster)).send[0] == 4.5e6 + 5e6 + 5.5e6


def test_classes_raise_rates_by_headers_and_guarantee_an_even_part_of_the_port() -> None:
    lab = toy_lab(FOUR, packet_bytes=1500)
    lines = network.host_shaping(lab, 0)
    assert lines[0] == "qdisc add dev eth0 root handle 1: htb"
    classes = {
        place: (int(rate), int(ceiling))
        for line in lines
        for place, rate, ceiling in re.findall(r"classid (\S+) htb rate (\d+)bit .* ceil (\d+)bit", line)
    }
    raised = 1514 / 1448 * 8
    assert classes["1:1"] == (round(5.5e6 * raised), round(5.5e6 * raised))
    assert [classes[f"1:1{i}"][1] for i in range(3)] == [round(rate * raised) for rate in (4.5e6, 5e6, 5.5e6)]
    assert sum(classes[f"1:1{i}"][0] for i in range(3)) <= classes["1:1"][0] + 3
    assert [line for line in lines if "10.77.2.0/24" in line] == [
        "filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip dst 10.77.2.0/24 flowid 1:11"
    ]


def test_devices_of_a_host_are_told_apart_on_the_loopback_interface() -> None:
    lines = network.host_shaping(toy_lab(toy_cluster(2, 3)), 1)
    assert [line.split("match ip ")[1] for line in lines if "dev lo" in line and "match" in line] == [
        f"dst 10.77.1.{device}/32 flowid 1:{0x0F + device:x}" for device in (1, 2, 3)
    ]


def test_what_is_not_made_is_said() -> None:
    cluster = replace(toy_cluster(), rails=(replace(toy_cluster().rails[0], latency_s=((0, 0.02), (0.01, 0))),))
    fast = replace(cluster.links["inside"], bandwidth_bytes_per_s=1e11)
    lab = toy_lab(replace(cluster, links={"inside": fast}))
    notes = network.unmade_facts(lab.cluster, network.rates_of(lab))
    assert notes[0].startswith("latencies of up to 20 ms")
    assert notes[1:] == [f"links inside {name}: as fast as the loopback interface" for name in ("n0", "n1")]
    assert network.unmade_facts(toy_cluster(), network.rates_of(toy_lab())) == []


def test_rounds_hold_every_pair_once_and_no_port_or_uplink_twice() -> None:
    lab = toy_lab(FOUR, uplinks=RACKS)
    plan = check.pair_rounds(lab)
    assert sorted(pair for pairs in plan for pair in pairs) == [(a, b) for a in range(4) for b in range(4) if a != b]
    for pairs in plan:
        assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)
        assert sum(a in (0, 1) and b in (2, 3) for a, b in pairs) <= 1, "one at a time through the left rack's uplink"
    assert len(check.pair_rounds(toy_lab(FOUR))) == 3
    inside = check.pair_rounds(toy_lab(toy_cluster(5, 2)))[4:]
    assert inside == [[(0, 0), (1, 1)], [(2, 2), (3, 3)], [(4, 4)]], "100 MB/s each"


def test_a_pair_across_racks_achieves_what_its_uplinks_carry() -> None:
    wanted = check.requested_rates(toy_lab(FOUR, uplinks=RACKS))
    assert (wanted[0, 1], wanted[0, 2], wanted[0, 3]) == (4.5e6, 3e6, 3e6)
    assert (wanted[3, 2], wanted[3, 0], wanted[2, 3]) == (4e6, 6e6, 7.5e6)


@contextmanager
def hosts_of(folder: Path, lab: LabFile) -> Iterator[HostStreams]:
    made = Lab.open_lab(lab_path(folder, lab))
    with lifecycle.hold_lab(made), open_streams(made) as hosts:
        yield hosts


def together(hosts: HostStreams, pairs: list[StreamPair], allowed: float) -> float:
    """The share of what is allowed that these streams carry together, at the best of eight times: other work on the
    machine only ever takes away."""
    most = 0.0
    for _ in range(8):
        most = max(most, sum(hosts.measure_rates(pairs, 1.2).values()) / allowed)
        if most > 0.9:
            break
    return most


@needs_lab
def test_streams_share_ports_of_senders_and_receivers(tmp_path: Path) -> None:
    """Each pair alone has 4 MB/s; host 0 sends 6 in all, and host 3 receives 3."""
    ports = {"n0": HostPort(send_bytes_per_s=6e6), "n3": HostPort(receive_bytes_per_s=3e6)}
    lab = toy_lab(toy_cluster(4, 1, rate=lambda a, b: 4e6), ports=ports)
    with hosts_of(tmp_path, lab) as hosts:
        assert 0.5 < together(hosts, [(0, 1)], 4e6) < 1.1
        assert 0.5 < together(hosts, [(0, 1), (0, 2)], 6e6) < 1.1
        assert 0.5 < together(hosts, [(1, 3), (2, 3)], 3e6) < 1.1


@needs_lab
def test_streams_share_the_uplink_of_a_rack(tmp_path: Path) -> None:
    """Two hosts of the left rack send 4 MB/s each to the right one: its way up carries 3; within the rack, 4."""
    up = RackUplink(name="left", hosts=("n0", "n1"), up_bytes_per_s=3e6, down_bytes_per_s=1e7)
    lab = toy_lab(toy_cluster(4, 1, rate=lambda a, b: 4e6), uplinks=(up,))
    with hosts_of(tmp_path, lab) as hosts:
        assert 0.5 < together(hosts, [(0, 2), (1, 3)], 3e6) < 1.1
        assert 0.5 < together(hosts, [(0, 1), (2, 3)], 8e6) < 1.1
        assert 0.5 < together(hosts, [(2, 0), (3, 1)], 8e6) < 1.1


@needs_lab
def test_an_asymmetric_lab_is_checked_link_by_link(tmp_path: Path) -> None:
    """Other work on the machine makes some links slower and some actions later; nothing makes them faster."""
    cluster = toy_cluster(3, 1, rate=lambda a, b: 3e6 + 2e6 * a + 1e6 * b)
    lab = toy_lab(replace(cluster, hosts=(replace(cluster.hosts[0], devices=2), *cluster.hosts[1:])))
    made = Lab.open_lab(lab_path(tmp_path, lab))
    with lifecycle.hold_lab(made):
        result = check.calibrate_lab(made)
    seen = {(pair.source, pair.target): pair.requested for pair in result.pairs}
    assert seen == {(0, 0): 1e8} | {(a, b): 3e6 + 2e6 * a + 1e6 * b for a in range(3) for b in range(3) if a != b}
    assert max(pair.relative_error for pair in result.pairs) <= check.LINKS_WITHIN
    assert statistics.median(abs(pair.relative_error) for pair in result.pairs) <= 0.5
    assert [each.device for each in result.devices] == [0, 1, 2, 3]
    assert all(each.relative_error > -0.02 and each.emulated_s > 1 for each in result.devices)


def test_a_calibration_is_good_or_says_what_is_not(tmp_path: Path) -> None:
    made = Lab.open_lab(lab_path(tmp_path, toy_lab()))
    links = (check.PairCheck(0, 1, 1e7, 0.95e7), check.PairCheck(1, 0, 1e7, 1.02e7))
    paces = (check.PaceCheck(0, 2.0, 2.01, 0), check.PaceCheck(1, 2.0, 2.02, 1))
    good = check.LabCalibration(links, paces)
    assert good.is_good and check.as_data(made, good)["links"] == pytest.approx(
        {"mean_error": 0.035, "max_error": 0.05, "allowed": 0.1}
    )
    assert check.as_lines(made, good)[1:4] == ["           n0     n1", "    n0      -  0.950", "    n1  1.020      -"]
    slow = check.LabCalibration((check.PairCheck(0, 1, 1e7, 0.89e7), *links[1:]), paces)
    late = check.LabCalibration(links, (check.PaceCheck(0, 2.0, 2.1, 30), *paces[1:]))
    assert not slow.is_good and not late.is_good
    text = "\n".join(check.as_lines(made, slow) + check.as_lines(made, late))
    assert "links: NOT GOOD: mean error 6.50%, largest 11.00% of 10% allowed" in text
    assert "pace: NOT GOOD: mean error 3.00%, largest 5.00% of 2% allowed, 31 actions late" in text
