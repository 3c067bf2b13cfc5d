"""Lowerings of uneven parts: prices worked out by hand on small groups, and which of them is cheapest where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipefit.cluster import parse_spec
from pipefit.cluster.measured import ClusterMeasurements, CollectiveCurve
from pipefit.cluster.types import Cluster, DeviceKind, Host, Link, Provenance, Rail
from pipefit.cost.comm.collectives import all_gather_s, reduce_scatter_s
from pipefit.cost.comm.lowerings import GROUPED_OVER_EVEN, CollectiveLowerings, shard_collective
from pipefit.cost.comm.network import Network

MB = 1e6


def hosts(matrix, kind="gpu", latency_s=0.0, shared=True) -> Network:
    """One device a host, with these bandwidths in MB/s between them."""
    count = len(matrix)
    return Network(
        Cluster(
            name="hosts",
            kinds={
                kind: DeviceKind(
                    name=kind,
                    memory_bytes=1 << 30,
                    peak_flops_per_s=dict.fromkeys(("float64", "float32", "bfloat16"), 1e12),
                    memory_bandwidth_bytes_per_s=1e12,
                )
            },
            links={"inside": Link(latency_s=0.0, bandwidth_bytes_per_s=1e9)},
            hosts=tuple(Host(name=f"h{h}", kind=kind, devices=1, link="inside") for h in range(count)),
            rails=(
                Rail(
                    name="net",
                    latency_s=tuple(tuple(latency_s * (a != b) for b in range(count)) for a in range(count)),
                    bandwidth_bytes_per_s=tuple(tuple(rate * MB for rate in row) for row in matrix),
                    shared_ports=shared,
                ),
            ),
            provenance=Provenance(source="assumed", where="a test"),
        )
    )


def even(count, rate):
    return [[rate * (a != b) for b in range(count)] for a in range(count)]


PARTS = (0.5, 0.25, 0.25)


def test_alltoallv_keeps_the_busiest_port_busy():
    network = hosts(even(3, 10.0), latency_s=1e-3)
    lowerings = CollectiveLowerings(network, [(0, 1, 2)])
    # The first sends its half twice; in a sum it is sent two halves.
    assert lowerings.collective_time_s("all_gather", "alltoallv", 30 * MB, PARTS) == pytest.approx(2e-3 + 2 * 15 / 10)
    assert lowerings.collective_time_s("reduce_scatter", "alltoallv", 30 * MB, PARTS) == pytest.approx(
        2e-3 + 2 * 15 / 10
    )
    # Where links are what is slow, only the longest part counts.
    loose = CollectiveLowerings(hosts(even(3, 10.0), shared=False), [(0, 1, 2)])
    assert loose.collective_time_s("all_gather", "alltoallv", 30 * MB, PARTS) == pytest.approx(2 * 15 / 10)
    slow = even(3, 10.0)
    slow[0] = [0.0, 1.0, 10.0]
    found = CollectiveLowerings(hosts(slow), [(0, 1, 2)]).collective_time_s("all_gather", "alltoallv", 30 * MB, PARTS)
    assert found == pytest.approx(15 / 1 + 15 / 10), "the first one's port: a slow link, then a fast one"
    empty = CollectiveLowerings(hosts(slow), [(0, 1, 2)]).collective_time_s(
        "all_gather", "alltoallv", 30 * MB, (0.0, 0.5, 0.5)
    )
    assert empty == pytest.approx(2 * 15 / 10), "an empty part does not use the slow link"


def test_padding_is_the_even_collective_of_the_longest_part():
    network = hosts(even(3, 10.0), latency_s=1e-3)
    lowerings = CollectiveLowerings(network, [(0, 1, 2)])
    for operation, even_s in (("all_gather", all_gather_s), ("reduce_scatter", reduce_scatter_s)):
        wanted = even_s(network, [(0, 1, 2)], 1.5 * 30 * MB)
        assert lowerings.collective_time_s(operation, "padded", 30 * MB, PARTS) == pytest.approx(wanted)
        assert lowerings.one_named(operation, "padded", 30 * MB).lowered_s(PARTS) == pytest.approx(wanted)


def test_grouped_calls_of_nccl_carry_every_part_but_one_over_a_hop():
    network = hosts(even(3, 10.0))
    lowerings = CollectiveLowerings(network, [(0, 1, 2)])
    for operation in ("all_gather", "reduce_scatter"):
        found = lowerings.collective_time_s(operation, "grouped", 30 * MB, PARTS)
        assert found == pytest.approx(GROUPED_OVER_EVEN[operation, False] * (0.75 * 30 / 10))
    # HAP's figures: grouped calls pay from n x the longest part = 1.48 on between hosts, if nobody's part is small.
    many = CollectiveLowerings(hosts(even(64, 10.0)), [range(64)])
    for longest, cheaper in ((1.40, "padded"), (1.56, "grouped")):
        parts = (longest / 64,) + ((1 - longest / 64) / 63,) * 63
        seconds = {name: many.collective_time_s("all_gather", name, 64 * MB, parts) for name in ("padded", "grouped")}
        assert min(seconds, key=seconds.get) == cheaper


def test_grouped_calls_of_gloo_are_trees_and_rings_one_after_the_other():
    network = hosts(even(4, 10.0), kind="cpu", latency_s=1e-3)
    assert network.over_gloo
    lowerings = CollectiveLowerings(network, [(0, 1, 2, 3)])
    parts = (0.4, 0.3, 0.2, 0.1)
    # A tree over four has two rounds, so every part is sent twice, one after the other.
    assert lowerings.collective_time_s("all_gather", "grouped", 40 * MB, parts) == pytest.approx(8e-3 + 2 * 40 / 10)
    # A reduce: three steps of a quarter, then three quarters into the root's port.
    assert lowerings.collective_time_s("reduce_scatter", "grouped", 40 * MB, parts) == pytest.approx(
        16e-3 + 1.5 * 40 / 10
    )


def test_gloo_sums_a_reduce_scatter_by_an_all_reduce():
    """So it moves twice as much as all-to-all-v, unless a measurement says otherwise."""
    network = hosts(even(4, 10.0), kind="cpu")
    seconds = {
        name: CollectiveLowerings(network, [(0, 1, 2, 3)]).collective_time_s(
            "reduce_scatter", name, 40 * MB, (0.25,) * 4
        )
        for name in ("padded", "grouped", "alltoallv")
    }
    assert seconds == pytest.approx({"padded": 6.0, "grouped": 6.0, "alltoallv": 3.0})


def test_all_to_all_moves_parts_of_parts():
    lowerings = CollectiveLowerings(hosts(even(3, 10.0)), [(0, 1, 2)])
    new = (0.2, 0.2, 0.6)
    # The first keeps a fifth of its half and sends the rest; the last is sent 0.6 of what the others have.
    assert lowerings.collective_time_s("all_to_all", "alltoallv", 30 * MB, PARTS, new) == pytest.approx(3 * 0.6 * 0.75)
    padded = lowerings.collective_time_s("all_to_all", "padded", 30 * MB, PARTS, new)
    assert padded == pytest.approx(3 * 2 * 0.5 * 0.6), "blocks of the longest part of the longest part"
    grouped = lowerings.collective_time_s("all_to_all", "grouped", 30 * MB, PARTS, new)
    assert grouped == pytest.approx(lowerings.collective_time_s("all_gather", "grouped", 30 * MB, PARTS))


def measured_there(plain: Network, devices=(0, 1, 2), **times) -> Network:
    """The network with direct collectives measured: operation -> ((bytes of the whole tensor, seconds), ...)."""
    curves = tuple(
        CollectiveCurve(
            operation=operation, devices=devices, sizes_bytes=tuple(int(size) for size, _ in points),
            time_s=tuple(time_s for _, time_s in points), spread=(0.0,) * len(points),
            latency_factor=3.0, bandwidth_factor=1.0,
        )
        for operation, points in times.items()
    )  # fmt: skip
    return Network(replace(plain.cluster, measured=ClusterMeasurements(collectives=curves)))


def test_measured_factors_multiply():
    """Steps of 1 ms three times as long, and every byte twice (all-to-all) or five times as long."""
    plain = hosts(even(3, 10.0), latency_s=1e-3)
    # All-to-all: two thirds leave every port at 10 MB/s; grouped: two parts of three over every hop.
    measured = measured_there(
        plain, **{name: ((3 * MB, 6e-3 + factor * 0.2),) for name, factor in (("all_to_all", 2.0), ("broadcasts", 5.0))}
    )
    one, two = (CollectiveLowerings(each, [(0, 1, 2)]) for each in (plain, measured))
    for name, factor in (("alltoallv", 2.0), ("grouped", 5.0 / GROUPED_OVER_EVEN["all_gather", False])):
        before, after = (each.one_named("all_gather", name, 30 * MB) for each in (one, two))
        assert after.constant_s == pytest.approx(3 * before.constant_s)
        assert after.lowered_s(PARTS) - after.constant_s == pytest.approx(
            factor * (before.lowered_s(PARTS) - before.constant_s)
        )


def test_prices_go_through_the_measured_times_and_the_last_slope_goes_on():
    """Short messages that cost little say nothing of long ones: 3 ms for 24 kB, 53 ms for 240 kB, 253 ms for 1.2 MB."""
    curve = ((24e3, 3e-3), (240e3, 53e-3), (1.2e6, 253e-3))
    lowerings = CollectiveLowerings(measured_there(hosts(even(3, 10.0), kind="cpu"), all_to_all=curve), [(0, 1, 2)])
    thirds = (1 / 3,) * 3
    for size, wanted in (*curve, (132e3, 28e-3), (0.72e6, 153e-3), (2.4e6, 503e-3), (12e3, 1.5e-3)):
        assert lowerings.collective_time_s("all_gather", "alltoallv", size, thirds) == pytest.approx(wanted)
    # Messages of an all-to-all are parts of parts: of 720 kB, as long as those of 240 kB that are gathered.
    assert lowerings.collective_time_s("all_to_all", "alltoallv", 720e3, thirds, thirds) == pytest.approx(53e-3)
    # Uneven: the longest message decides which factor holds, here that of 240 kB; the first sends its half twice, and
    # is sent the other half, which counts as much.
    assert lowerings.collective_time_s("all_gather", "alltoallv", 160e3, PARTS) == pytest.approx(
        53e-3 * (160 + 80) / 320
    )
    halves = (0.5, 0.5, 0.0)
    both = lowerings.collective_time_s("all_to_all", "padded", 320e3, halves, halves)
    assert both == pytest.approx(53e-3 * (320 * 1.5 * 1.5) / 720), "blocks of 80 kB, as those of 240 kB gathered"


def test_what_goes_the_other_way_slows_an_exchange_over_gloo_as_it_slows_even_parts():
    """Even parts keep every port busy both ways; they take 1.5 times what they would one way. Uneven ones go the other
    way less."""
    curve = ((3 * MB, 0.3), (30 * MB, 3.0))
    measured = {
        kind: CollectiveLowerings(measured_there(hosts(even(3, 10.0), kind=kind), all_to_all=curve), [(0, 1, 2)])
        for kind in ("cpu", "gpu")
    }
    thirds = (1 / 3,) * 3
    for parts, out, back in (
        (thirds, 2 / 3, 2 / 3),
        (PARTS, 1.0, 0.5),
        ((0.9, 0.05, 0.05), 1.8, 0.1),
        ((1.0, 0.0, 0.0), 2.0, 0.0),
    ):
        for operation in ("all_gather", "reduce_scatter"):
            over_gloo, over_nccl = (
                one.collective_time_s(operation, "alltoallv", 30 * MB, parts) for one in measured.values()
            )
            assert over_gloo == pytest.approx(3 * (out + 0.5 * back))
            assert over_nccl == pytest.approx(3 * 1.5 * out)
    # Of an all-to-all between unlike cuts: the last sends 0.4 of its quarter, and is sent 0.6 of three quarters.
    found = measured["cpu"].collective_time_s("all_to_all", "alltoallv", 90 * MB, PARTS, (0.2, 0.2, 0.6))
    assert found == pytest.approx(9 * (0.6 * 0.75 + 0.5 * 0.4 * 0.25))


def test_other_groups_go_by_messages_of_the_same_length():
    """Two devices, measured on three: parts of 80 kB are those of 240 kB there."""
    measured = measured_there(hosts(even(3, 10.0), kind="cpu"), all_to_all=((240e3, 53e-3), (1.2e6, 253e-3)))
    plain = CollectiveLowerings(hosts(even(3, 10.0), kind="cpu"), [(0, 1)])
    factor = 53e-3 / CollectiveLowerings(hosts(even(3, 10.0), kind="cpu"), [(0, 1, 2)]).collective_time_s(
        "all_gather", "alltoallv", 240e3, (1 / 3,) * 3
    )
    found = CollectiveLowerings(measured, [(0, 1)]).collective_time_s("all_gather", "alltoallv", 160e3, (0.5, 0.5))
    assert found == pytest.approx(factor * plain.collective_time_s("all_gather", "alltoallv", 160e3, (0.5, 0.5)))


def test_straight_lines_for_a_linear_program_are_the_same_prices():
    """Equal for one cut; of two cuts they touch at even parts."""
    draw = np.random.default_rng(0)
    network = hosts((draw.uniform(1, 10, (4, 4)) * (1 - np.eye(4))).tolist(), kind="cpu")
    lowerings = CollectiveLowerings(network, [range(4)])
    for operation in ("all_gather", "reduce_scatter"):
        for one in lowerings.all_of(operation, 8 * MB):
            parts = tuple(draw.dirichlet(np.ones(4)))
            lines = sum(max(load @ np.array(parts)) + constant for load, constant in one.rounds.as_lines(4))
            assert one.constant_s + one.slope * lines == pytest.approx(one.lowered_s(parts))
    for one in lowerings.all_of("all_to_all", 8 * MB):
        if one.name != "grouped":
            flat = (0.25,) * 4
            lines = sum(max(load @ np.array(flat)) + constant for load, constant in one.rounds.as_lines(4))
            assert one.constant_s + one.slope * lines == pytest.approx(one.lowered_s(flat, flat))


def test_shares_are_cut_into_whole_units():
    network = Network(parse_spec("4xA100-80"))
    collective = shard_collective(network, [(0, 1)], (5, 4))
    halves = shard_collective(network, [(0, 1)], (1, 1))
    assert collective("all_gather", 8 * MB, "padded", (2,)) == halves("all_gather", 8 * MB)
    for units in ((9,), ()):
        wanted = all_gather_s(network, [(0, 1)], 8 * MB * 10 / 9)
        assert collective("all_gather", 8 * MB, "padded", units) == pytest.approx(wanted)
    assert collective("all_reduce", 8 * MB) == halves("all_reduce", 8 * MB)
