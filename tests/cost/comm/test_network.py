"""Transfers and collectives against numbers worked out by hand, and against a step-by-step ring."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipefit.cluster import Cluster, parse_spec
from pipefit.cluster.spec import uniform_rail
from pipefit.cost.comm.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from pipefit.cost.comm.network import Network

MB = 1e6


def hosts(count: int, devices: int, *, rails: int = 1, shared: bool = True) -> Cluster:
    """Hosts with 300 GB/s and 5 us inside (A100) and 10 GB/s and 10 us on each rail between them."""
    cluster = parse_spec(f"{count}x{devices}xA100-80:10GB/s")
    made = [replace(uniform_rail(f"rail{i}", count, 10e-6, 10e9), shared_ports=shared) for i in range(rails)]
    return replace(full_bandwidth(cluster), rails=tuple(made))


def full_bandwidth(cluster: Cluster) -> Cluster:
    """Return a cluster whose links inside hosts have their data-sheet bandwidth, which no collective reaches."""
    link = replace(cluster.links["inside"], bandwidth_bytes_per_s=300e9)
    return replace(cluster, links={"inside": link})


def test_a_message_takes_latency_and_its_bytes() -> None:
    network = Network(hosts(2, 4))
    inside, between = network.transfer_time([(0, 1, 30 * MB)]), network.transfer_time([(0, 4, 30 * MB)])
    assert inside.whole_s == pytest.approx(5e-6 + 30e6 / 300e9)
    assert between.whole_s == pytest.approx(10e-6 + 30e6 / 10e9)
    assert between.port_s == pytest.approx(30e6 / 10e9), "the latency does not hold the port"


def test_a_message_to_oneself_and_an_empty_one_are_free() -> None:
    network = Network(hosts(2, 4))
    assert network.transfer_time([(3, 3, 1e9), (0, 4, 0.0)]).whole_s == 0.0


def test_messages_of_one_host_share_its_port() -> None:
    network = Network(hosts(2, 4))
    assert network.transfer_time([(0, 4, MB), (1, 5, MB), (2, 6, MB)]).port_s == pytest.approx(3 * MB / 10e9)
    assert network.transfer_time([(0, 4, MB), (4, 0, MB)]).port_s == pytest.approx(MB / 10e9), "the two ways are apart"


def test_messages_to_one_host_share_its_port() -> None:
    network = Network(hosts(3, 1))
    assert network.transfer_time([(0, 2, MB), (1, 2, MB)]).port_s == pytest.approx(2 * MB / 10e9)


def test_rails_and_ports_of_their_own_are_not_shared() -> None:
    messages = [(d, 4 + d, MB) for d in range(4)]
    assert Network(hosts(2, 4, rails=4)).transfer_time(messages).port_s == pytest.approx(MB / 10e9)
    assert Network(hosts(2, 4, rails=2)).transfer_time(messages).port_s == pytest.approx(2 * MB / 10e9)
    assert Network(hosts(2, 4, shared=False)).transfer_time(messages).port_s == pytest.approx(MB / 10e9)


def test_a_ring_inside_a_host() -> None:
    """Four devices, 400 MB: three steps of 100 MB at 300 GB/s and 5 us each; a sum is two such passes."""
    network = Network(full_bandwidth(parse_spec("4xA100-80")))
    one_pass = 3 * (5e-6 + 100e6 / 300e9)
    assert all_gather_s(network, [[0, 1, 2, 3]], 400e6) == pytest.approx(one_pass)
    assert reduce_scatter_s(network, [[0, 1, 2, 3]], 400e6) == pytest.approx(one_pass)
    assert all_reduce_s(network, [[0, 1, 2, 3]], 400e6) == pytest.approx(2 * one_pass)


def test_two_hosts_of_four_reduce_inside_first() -> None:
    """By hand, 800 MB. Flat ring of 8: 2 x 7 steps of 100 MB at 10 GB/s = 140 ms. Two levels: inside 2 x 3 steps of
    200 MB at 300 GB/s = 4 ms; between, four rings share the port: 2 x 1 steps of (800/4)/2 MB at 10/4 GB/s = 80 ms."""
    network = Network(hosts(2, 4))
    flat = 2 * 7 * (10e-6 + 100e6 / 10e9)
    levels = 2 * 3 * (5e-6 + 200e6 / 300e9) + 2 * 1 * (10e-6 + 100e6 / 2.5e9)
    assert levels < flat
    assert all_reduce_s(network, [list(range(8))], 800e6) == pytest.approx(levels)


def test_rings_that_run_together_share_the_port() -> None:
    """Two replicas on two hosts, four shard positions: four rings of two through one port, or one rail each."""
    rings = [[d, 4 + d] for d in range(4)]
    one = all_reduce_s(Network(hosts(2, 4)), rings, 100e6)
    assert one == pytest.approx(2 * (10e-6 + 50e6 / 2.5e9))
    assert all_reduce_s(Network(hosts(2, 4, rails=4)), rings, 100e6) == pytest.approx(2 * (10e-6 + 50e6 / 10e9))


def test_the_slowest_link_of_the_group_decides() -> None:
    cluster = hosts(3, 1)
    slow = [list(row) for row in cluster.rails[0].bandwidth_bytes_per_s]
    slow[1][2] = 1e9
    rail = replace(cluster.rails[0], bandwidth_bytes_per_s=tuple(map(tuple, slow)))
    network = Network(replace(cluster, rails=(rail,)))
    assert all_gather_s(network, [[0, 1, 2]], 30e6) == pytest.approx(2 * (10e-6 + 10e6 / 1e9))
    assert all_gather_s(network, [[0, 1]], 30e6) == pytest.approx(10e-6 + 15e6 / 10e9), "it is not in this group"


def test_a_group_of_one_needs_nothing() -> None:
    network = Network(hosts(2, 4))
    assert all_reduce_s(network, [[0], [1]], 1e9) == 0.0


@given(size=st.integers(2, 9), total=st.floats(1e3, 1e9))
def test_an_all_gather_against_a_ring_played_step_by_step(size: int, total: float) -> None:
    """Every device passes on the part that it got last, all at once, until everyone has everything."""
    network = Network(parse_spec(f"{size}xV100"))
    have = [{device} for device in range(size)]
    latest = list(range(size))
    clock = 0.0
    while any(len(parts) < size for parts in have):
        sends = [(device, (device + 1) % size, latest[device]) for device in range(size)]
        clock += network.transfer_time([(a, b, total / size) for a, b, _ in sends]).whole_s
        for _, target, part in sends:
            have[target].add(part)
            latest[target] = part
    assert all_gather_s(network, [range(size)], total) == pytest.approx(clock)


def test_groups_laid_out_alike_stand_for_each_other_on_equal_hosts() -> None:
    network = Network(hosts(4, 4, rails=2))
    assert network.has_equal_hosts
    assert network.representative_devices((9, 11, 13, 15)) == (1, 3, 5, 7)
    assert network.representative_devices((5, 1)) == (5, 1), "the order stays"
    for ring in ((8, 12), (9, 10, 13, 14), (4, 5, 12)):
        alike = network.representative_devices(ring)
        assert alike != ring
        for collective in (all_gather_s, reduce_scatter_s, all_reduce_s):
            assert collective(network, [ring], 3 * MB) == collective(network, [alike], 3 * MB)


def test_hosts_with_other_links_or_kinds_do_not_stand_for_each_other() -> None:
    equal = hosts(3, 2)
    rail = equal.rails[0]
    slower = [list(row) for row in rail.bandwidth_bytes_per_s]
    slower[0][2] /= 2
    uneven = replace(equal, rails=(replace(rail, bandwidth_bytes_per_s=tuple(map(tuple, slower))),))
    smaller = replace(equal, hosts=(*equal.hosts[:2], replace(equal.hosts[2], devices=1)))
    for cluster in (uneven, smaller):
        network = Network(cluster)
        assert not network.has_equal_hosts and network.representative_devices((2, 3)) == (2, 3)
