"""The placement search against going through all placements, against itself without numba, and its starts and moves."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
from tests.plan.placement.kernels.test_state import chain, two_kinds
from tests.support.placement_toys import Candidate, candidate, skewed_cluster

from pipefit.cluster import Cluster
from pipefit.plan.placement import search
from pipefit.plan.placement.kernels.compile import kernel_functions
from pipefit.plan.placement.links import TICK_S
from pipefit.plan.placement.lowered import LoweredPlacement, place_lowered
from pipefit.plan.placement.search import (
    PlacementBudget,
    PlacementResult,
    PlacementSearch,
    search_placement,
    starting_placements,
)
from pipefit.plan.placement.starts import (
    block_moves,
    chain_order,
    cluster_order,
    host_distance,
    spectral_order,
    tile_devices,
    tile_shapes,
)
from pipefit.simulate import simulate_schedule


def placed(made: Candidate, moves: int = 1_500, seed: int = 0, compiled: bool = False) -> PlacementResult:
    return search_placement(made.question, made.timeline, PlacementBudget(moves=moves, seed=seed), compiled=compiled)


def best_of_all(made: Candidate) -> float:
    """The least simulated iteration over all placements of a plan that takes all devices."""
    searcher = PlacementSearch(made.question, made.timeline, compiled=False)
    best = float("inf")
    for order in itertools.permutations(made.question.devices.tolist()):
        searcher.estimate_ticks(np.array(order))
        best = min(best, searcher.paths.step_s(searcher.entry_ticks))
    return best


@pytest.mark.parametrize(("hosts", "devices", "stages", "replicas"), [(6, 1, 3, 2), (6, 1, 2, 3), (3, 2, 3, 2)])
def test_it_finds_the_best_of_all_placements(hosts: int, devices: int, stages: int, replicas: int) -> None:
    made = candidate(skewed_cluster(hosts, devices, seed=9), chain(stages, replicas, microbatches=6))
    assert placed(made).step_s == pytest.approx(best_of_all(made), rel=1e-9)


@pytest.mark.slow
def test_it_finds_the_best_of_all_placements_of_eight_hosts() -> None:
    made = candidate(skewed_cluster(8, seed=4), chain(4, 2, microbatches=6))
    searcher = PlacementSearch(made.question, made.timeline, compiled=False)
    searcher.probe_entries(made.question.devices)
    found = placed(made, 6_000)
    assert found.step_s < found.given_s
    for order in itertools.permutations(range(8)):
        if order[0] < order[1]:  # replicas are alike
            device, least_s = np.array(order), found.step_s * (1 - 1e-9)
            assert searcher.estimate_ticks(device) * TICK_S > least_s or searcher.simulate_placement(device) > least_s


def test_what_it_says_is_what_the_simulator_says() -> None:
    made = candidate(skewed_cluster(4, 2, seed=6), chain(4, 2, inner="stage"))
    found = placed(made, 800)
    assert sorted(found.devices) == list(range(8))
    assert found.given_s == pytest.approx(made.timeline.makespan_s, rel=1e-9)
    table = made.costs_of(np.array(found.devices))
    assert found.step_s == pytest.approx(simulate_schedule(made.schedule, table).makespan_s, rel=1e-7)
    assert found.step_s < found.given_s and found.simulated > 2 and found.cuts > 5


@pytest.mark.slow
def test_compiled_and_plain_find_the_same_placement() -> None:
    for made in (
        candidate(skewed_cluster(10, seed=1), chain(3, 3)),
        candidate(skewed_cluster(5, 2, seed=1), chain(3, 3)),
        candidate(skewed_cluster(3, 4, seed=2, rails=2), chain(3, 4, sharded_state="optimizer")),
        candidate(two_kinds(), chain(3, 2)),
    ):
        assert placed(made, 1_200, compiled=True) == placed(made, 1_200)


def test_the_functions_are_compiled_when_numba_is_loaded_or_it_pays() -> None:
    assert kernel_functions(False)["anneal"].__module__ == "pipefit.plan.placement.kernels.anneal"
    assert not hasattr(kernel_functions(False)["anneal"], "py_func")
    import numba

    assert "numba" in sys.modules and isinstance(kernel_functions(True)["recompute"], numba.core.dispatcher.Dispatcher)


def test_the_seed_decides() -> None:
    made = candidate(skewed_cluster(12, seed=8), chain(4, 3))
    assert placed(made, 400, seed=1) == placed(made, 400, seed=1)
    devices = {placed(made, 400, seed=seed).devices for seed in range(3)}
    assert len(devices) > 1


def test_a_large_budget_is_spent_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them is the search of a small budget; the others begin anew, and the best of all is kept."""
    made = candidate(skewed_cluster(10, 2, seed=8), chain(5, 4))
    one = placed(made, 400)
    monkeypatch.setattr(search, "DEVICES_WAY", replace(search.DEVICES_WAY, round_moves=400))
    assert placed(made, 799) != one, "up to twice the moves of a round, one round has them all"
    several = placed(made, 1_600)
    assert several.step_s < one.step_s and several.moves > 3 * one.moves
    assert several == placed(made, 1_600)


def test_a_budget_of_seconds_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        search, "ANNEALING_BUDGET", replace(search.ANNEALING_BUDGET, min_chunk_moves=100, max_chunk_moves=100)
    )
    made = candidate(skewed_cluster(8), chain(4, 2))
    now = [0.0]

    def clock() -> float:
        now[0] += 0.2
        return now[0]

    found = search_placement(
        made.question, made.timeline, PlacementBudget(moves=10**9, seconds=1.0), compiled=False, clock=clock
    )
    assert 0 < found.moves < 50_000 and found.step_s <= found.given_s


def test_it_leaves_out_the_slowest_host() -> None:
    """Five hosts for four lanes, one of them behind a link of a hundredth: it is idle in the end."""
    cluster = skewed_cluster(5, seed=3)
    rail = cluster.rails[0]
    bandwidth = np.array(rail.bandwidth_bytes_per_s)
    bandwidth[1, :] /= 100
    bandwidth[:, 1] /= 100
    slow = replace(rail, bandwidth_bytes_per_s=tuple(map(tuple, bandwidth.tolist())))
    found = placed(candidate(replace(cluster, rails=(slow,)), chain(4, 1)))
    assert 1 not in found.devices


def test_shard_groups_stay_together() -> None:
    made = candidate(skewed_cluster(3, 4, seed=7), chain(3, 2, shards=(1, 1), sharding="megatron"))
    found = placed(made, 600)
    pairs = [found.devices[i : i + 2] for i in range(0, 12, 2)]
    assert found.step_s < found.given_s
    assert all(two == one + 1 and one % 2 == 0 for one, two in pairs), "each pair in one host, as it was"


def test_one_device_is_left_alone() -> None:
    made = candidate(skewed_cluster(2), chain(1, 1))
    found = placed(made)
    assert found.devices == (0,) and found.moves == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_one_shard_group_is_left_alone(compiled: bool) -> None:
    """Its placement has neither transfers nor collectives of replicas: no time to draw a move from."""
    made = candidate(skewed_cluster(2, 2), chain(1, 1, shards=(1, 1), sharding="megatron"))
    found = placed(made, compiled=compiled)
    assert found.devices == (0, 1) and found.moves == 0
    given = LoweredPlacement(question=made.question, timeline=made.timeline, step_s=found.step_s)
    again = place_lowered(given, lambda _: given, PlacementBudget(moves=1_500), compiled=compiled)
    assert again.devices == (0, 1) and again.moves == 0


def racked(per_rack: int, racks: int, seed: int) -> tuple[Cluster, list[int]]:
    """(hosts of shuffled racks, ten times as fast within; the rack of each host)."""
    hosts = per_rack * racks
    cluster = skewed_cluster(hosts, seed=seed)
    rack = np.random.default_rng(seed).permutation(hosts) // per_rack
    bandwidth = np.where(rack[:, None] == rack[None, :], 1e9, 1e8)
    rail = replace(
        cluster.rails[0],
        bandwidth_bytes_per_s=tuple(map(tuple, bandwidth.tolist())),
        latency_s=tuple(tuple(0.0 if a == b else 1e-5 for b in range(hosts)) for a in range(hosts)),
    )
    return replace(cluster, rails=(rail,)), rack.tolist()


def test_racks_are_found_and_hosts_of_one_stand_together() -> None:
    cluster, rack = racked(4, 3, seed=5)
    made = candidate(cluster, chain(3, 4))
    distance = host_distance(made.question.links, 1e6)
    order, racks = cluster_order(distance)
    assert sorted(order) == list(range(12))
    assert sorted(map(sorted, racks)) == [
        [h for h in range(12) if rack[h] == r] for r in sorted(range(3), key=lambda r: rack.index(r))
    ]
    for hosts in (order, chain_order(distance), spectral_order(distance)):
        assert sorted(hosts) == list(range(12))
        changes = sum(rack[a] != rack[b] for a, b in itertools.pairwise(hosts))
        assert changes == 2, "racks are not torn apart"
    moves = block_moves(made.question.devices, made.question.shape, made.question.links, racks)
    assert moves.racks.shape == (3, 4)
    even = candidate(skewed_cluster(9), chain(3, 3)).question
    found = cluster_order(host_distance(even.links, 1e6))[1]
    assert block_moves(even.devices, even.shape, even.links, found).racks.size == 0, "no two of them are equal racks"


def test_starts_are_placements_and_hold_every_split_of_a_host() -> None:
    made = candidate(skewed_cluster(4, 4), chain(4, 4))
    shape = made.question.shape
    assert list(tile_shapes(shape, 4)) == [(4, 1), (2, 2), (1, 4)]
    starts, _ = starting_placements(made.question)
    for device in starts.values():
        assert sorted(device.tolist()) == list(range(16))
    grid = tile_devices(np.arange(16), shape, (2, 2), False).reshape(4, 4)
    assert grid[:2, :2].tolist() == [[0, 1], [2, 3]], "the first host has two replicas of two stages"
    pipelines = tile_devices(np.arange(16), shape, (1, 4), True).reshape(4, 4)
    assert pipelines[:, 0].tolist() == [0, 1, 2, 3], "the first host has a pipeline"
    assert tile_devices(np.arange(16), shape, (4, 1), False).tolist() == list(range(16))


def test_blocks_are_units_and_hosts() -> None:
    made = candidate(skewed_cluster(3, 4), chain(5, 2))
    moves = block_moves(made.question.devices, made.question.shape, made.question.links, [])
    assert [level.shape for level in moves.levels] == [(12, 1), (3, 4)]
    hosts = made.question.links.host[made.question.devices]
    for slots in moves.levels[1]:
        assert len(set(hosts[slots].tolist())) == 1
