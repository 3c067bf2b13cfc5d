"""The placement search's arrays against the cost tables and the simulator, and its steps against working out anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.placement_toys import Candidate, candidate, skewed_cluster, skewed_rail

from benchmarks.plain_devices import plain_spec
from pipefit.cluster import Cluster
from pipefit.cluster.measured import ClusterMeasurements, LinkCurve, RailCurve
from pipefit.cost.comm.network import Network
from pipefit.plan.placement.kernels.state import with_moves
from pipefit.plan.placement.kernels.tables import ARRIVED, USED
from pipefit.plan.placement.links import TICK_S, link_arrays, links_differ
from pipefit.plan.placement.search import PlacementSearch
from pipefit.plan.placement.starts import block_moves
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.schedule.families import FAMILIES
from pipefit.schedule.taskgraph.times import left_to_reduce_s
from pipefit.simulate import simulate_schedule

FIELDS = ("device", "x", "value")


def chain(stages: int, replicas: int | tuple[int, ...], microbatches: int = 8, **more: object) -> ParallelConfig:
    schedule = str(more.get("schedule", "1f1b"))
    placement = FAMILIES[schedule].placement(stages)
    plain = placement == tuple(range(stages))
    return replace(
        ParallelConfig(
            stages=len(placement),
            placement=() if plain else placement,
            replicas=(1,) * replicas if isinstance(replicas, int) else replicas,
            microbatches=microbatches,
        ),
        **more,
    )


def two_kinds() -> Cluster:
    """Six hosts, every other one half as fast and with half the memory."""
    cluster = skewed_cluster(6)
    fast = next(iter(cluster.kinds.values()))
    slow = replace(
        fast,
        name="slow",
        peak_flops_per_s={name: peak / 50 for name, peak in fast.peak_flops_per_s.items()},
        memory_bandwidth_bytes_per_s=fast.memory_bandwidth_bytes_per_s / 50,
        overhead_s=2e-5,
        memory_bytes=fast.memory_bytes // 2,
    )
    hosts = tuple(replace(host, kind="slow") if i % 2 else host for i, host in enumerate(cluster.hosts))
    return replace(cluster, kinds={**cluster.kinds, "slow": slow}, hosts=hosts)


CANDIDATES = {
    "a chain on hosts of one device": lambda: candidate(skewed_cluster(8), chain(4, 2)),
    "pipelines in hosts of four": lambda: candidate(skewed_cluster(3, 4), chain(4, 3, inner="stage")),
    "stages in hosts of four, two idle": lambda: candidate(skewed_cluster(3, 4), chain(5, 2, inner="replica")),
    "four rails": lambda: candidate(skewed_cluster(3, 4, rails=4), chain(3, 4)),
    "ports of their own": lambda: candidate(skewed_cluster(3, 4, shared=False), chain(3, 4)),
    "ZeRO-1": lambda: candidate(skewed_cluster(4, 2), chain(2, 4, sharded_state="optimizer")),
    "tied": lambda: candidate(skewed_cluster(6), chain(3, 2), tied=True),
    "a V": lambda: candidate(skewed_cluster(6), chain(3, 2, schedule="zb-v")),
    "interleaved": lambda: candidate(skewed_cluster(6), chain(3, 2, schedule="interleaved-1f1b", microbatches=6)),
    "W apart": lambda: candidate(skewed_cluster(6), chain(3, 2, schedule="zb-h1")),
    "slices": lambda: candidate(skewed_cluster(4), chain(2, 2, slices=(96, 32), schedule="gpipe")),
    "uneven replicas": lambda: candidate(skewed_cluster(6), chain(3, (2, 1))),
    "no replicas": lambda: candidate(skewed_cluster(5), chain(5, 1)),
    "two kinds": lambda: candidate(two_kinds(), chain(3, 2)),
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_times_are_those_of_the_cost_table(name: str) -> None:
    """Every transfer, reduction and gather, and the simulated iteration, of random placements."""
    made = CANDIDATES[name]()
    searcher = PlacementSearch(made.question, made.timeline, compiled=False)
    for device in [made.question.devices, *made.permutations(6)]:
        table = made.costs_of(device)
        searcher.estimate_ticks(device)
        compare(made, searcher, table)
        assert searcher.paths.step_s(searcher.entry_ticks) == pytest.approx(
            simulate_schedule(made.schedule, table).makespan_s, rel=1e-7
        )


def compare(made: Candidate, searcher: PlacementSearch, table: object) -> None:
    question, x = made.question, searcher.entry_ticks * TICK_S
    for edge in table.edges:
        for way, whole, port in (
            ("F", edge.forward_s, edge.forward_port_s),
            ("B", edge.backward_s, edge.backward_port_s),
        ):
            for slice_ in range(whole.shape[1]):
                flow = question.flow_of[edge.source, edge.target, edge.tensor, way, slice_]
                assert x[flow] == pytest.approx(whole[0, slice_], abs=2e-12)
                assert x[question.flow_count + flow] == pytest.approx(port[0, slice_], abs=2e-12)
    first = 2 * question.flow_count
    left = left_to_reduce_s(made.timeline.graph, table)
    for (what, stage), term in question.term_of.items():
        tied = sum(x[flow] for flow in question.tied.get(stage, ()))
        wanted = table.gather_s[stage] if what == "gather" else left[stage] - tied
        assert x[first + term] == pytest.approx(wanted, rel=1e-9, abs=5e-11)


@pytest.mark.parametrize("name", CANDIDATES)
def test_the_estimate_is_a_lower_bound_and_exact_where_it_was_simulated(name: str) -> None:
    made = CANDIDATES[name]()
    searcher = PlacementSearch(made.question, made.timeline, compiled=False)
    searcher.probe_entries(made.question.devices)
    places = made.permutations(8, seed=1)
    for device in places:
        simulated = searcher.simulate_placement(device)
        assert searcher.estimate_ticks(device) * TICK_S == pytest.approx(simulated, rel=1e-7)
    assert int(searcher.tables.state.counters[USED]) > 3, "one path is not enough for all of them"
    for device in made.permutations(20, seed=2):
        estimate = searcher.estimate_ticks(device) * TICK_S
        assert estimate <= searcher.paths.step_s(searcher.entry_ticks) * (1 + 1e-7)


def test_the_estimate_orders_placements_as_the_simulator_does() -> None:
    from scipy.stats import spearmanr  # takes two seconds, and every process that collects tests reads this file

    made = candidate(skewed_cluster(16, seed=3), chain(4, 4, microbatches=12))
    searcher = PlacementSearch(made.question, made.timeline, compiled=False)
    searcher.simulate_placement(made.question.devices)
    searcher.probe_entries(made.question.devices)
    places = made.permutations(150, seed=4)
    simulated = [simulate_schedule(made.schedule, made.costs_of(device)).makespan_s for device in places]
    for more, wanted in ((0, 0.95), (12, 0.98)):
        for device in made.permutations(more, seed=5):
            searcher.simulate_placement(device)
        estimated = [searcher.estimate_ticks(device) for device in places]
        assert spearmanr(estimated, simulated).statistic > wanted, f"{more} placements simulated before"


def test_the_estimate_forgets_nothing_that_a_search_met() -> None:
    """Many more paths than a few placements have: it stays exact at the first that was simulated as at the last."""
    made = candidate(skewed_cluster(32, seed=3), chain(8, 4, microbatches=24))
    searcher = PlacementSearch(made.question, made.timeline, compiled=False)
    searcher.probe_entries(made.question.devices)
    places = made.permutations(120, seed=6)
    simulated = [searcher.simulate_placement(device) for device in places]
    assert len(searcher.known) > 100
    assert [searcher.estimate_ticks(device) * TICK_S for device in places] == pytest.approx(simulated, rel=1e-7)


@pytest.mark.parametrize("name", CANDIDATES)
def test_changing_step_by_step_is_exactly_working_out_anew(name: str) -> None:
    made = CANDIDATES[name]()
    question = made.question
    searcher = PlacementSearch(question, made.timeline, compiled=False)
    for device in made.permutations(3):
        searcher.simulate_placement(device)
    searcher.probe_entries(question.devices)
    run = searcher.run
    random = np.array([11, 12], dtype=np.int64)
    racks = [[0, 1], [2, 3]]
    blocks = block_moves(question.devices, question.shape, question.links, racks)
    searcher.tables = with_moves(searcher.tables, blocks)
    links, plan, moves, state, _ = searcher.tables
    searcher.estimate_ticks(question.devices)
    changed = 0
    for number in range(200):
        before = [getattr(state, field).copy() for field in FIELDS]
        count = run["propose"](random, links, plan, moves, state)
        run["exchange"](0, count, links, plan, state)
        if state.counters[ARRIVED]:
            count = run["repair_both"](count, random, links, plan, state)
        run["refresh"](count, links, plan, state)
        if number % 3 == 0:
            run["would_be"](0, state)
            run["exchange_back"](count, links, plan, state)
            for field, values in zip(FIELDS, before, strict=True):
                assert (getattr(state, field) == values).all(), "taking back leaves nothing behind"
            continue
        estimate = run["would_be"](np.inf, state)
        run["commit"](state)
        after = [getattr(state, field).copy() for field in FIELDS]
        assert sorted(after[0].tolist()) == sorted(question.devices.tolist())
        changed += bool((after[0] != before[0]).any())
        if number % 3 == 1:
            assert searcher.estimate_ticks(after[0]) == estimate
            for field, values in zip(FIELDS, after, strict=True):
                used = int(state.counters[USED]) if field == "value" else len(values)
                assert (getattr(state, field)[:used] == values[:used]).all()
    assert changed > 100
    assert not state.load.any(), "scratch is left clean"


def measured_cluster() -> Cluster:
    """Curves over size for the rail and for the links inside the hosts."""
    cluster = skewed_cluster(3, 2)
    sizes = (1_000, 100_000)
    spread = np.exp(np.random.default_rng(5).normal(0, 0.3, (2, 3, 3)))
    times = np.array([5e-5, 1e-3])[:, None, None] * spread
    matrices = tuple(tuple(map(tuple, matrix.tolist())) for matrix in times)
    rail = RailCurve(sizes_bytes=sizes, time_s=matrices, spread=matrices)
    link = LinkCurve(sizes_bytes=sizes, time_s=(2e-5, 9e-5), spread=(0, 0), between_pairs=(0, 0), pairs=1)
    return replace(cluster, measured=ClusterMeasurements(rails={"rail0": rail}, links={"inside": link}))


@pytest.mark.parametrize("cluster", [skewed_cluster(4, 3), skewed_cluster(4, 3, rails=2), measured_cluster()])
def test_links_are_those_of_the_network(cluster: Cluster) -> None:
    network, sizes = Network(cluster), [500.0, 40_000.0, 1e6]
    links = link_arrays(network, sizes)
    for source in range(network.devices):
        for target in set(range(network.devices)) - {source}:
            a, b = links.host[source], links.host[target]
            for index, size in enumerate(sizes):
                wanted = network.transfer_time([(source, target, size)])
                matrix = links.matrix[links.rail[source]]
                busy = links.inside_busy[index, a] if a == b else links.busy[index, matrix, a, b]
                latency = links.inside_latency[a] if a == b else links.latency[matrix, a, b]
                assert busy * TICK_S == pytest.approx(wanted.port_s, abs=1e-12)
                assert (busy + latency) * TICK_S == pytest.approx(wanted.whole_s, abs=2e-12)
    assert len(links.latency) == len(cluster.rails)


def test_rails_with_equal_figures_are_kept_once() -> None:
    cluster = skewed_cluster(3, 4)
    twice = replace(cluster, rails=(cluster.rails[0], replace(cluster.rails[0], name="other")))
    links = link_arrays(Network(twice), [1.0])
    assert links.latency.shape == (1, 3, 3) and links.matrix.tolist() == [0, 0] and links.rails == 2


def test_where_links_differ() -> None:
    even = plain_spec("4x8xH100:400Gbit/s")
    assert not links_differ(even) and not links_differ(plain_spec("8xH100"))
    assert links_differ(skewed_cluster(3, 4)) and links_differ(two_kinds()) and links_differ(measured_cluster())
    rows = [list(row) for row in even.rails[0].bandwidth_bytes_per_s]
    for factor, differs in ((0.995, False), (0.97, True)):
        rows[1][2] = factor * rows[0][1]
        rail = replace(even.rails[0], bandwidth_bytes_per_s=tuple(map(tuple, rows)))
        assert links_differ(replace(even, rails=(rail,))) is differs
    assert links_differ(replace(even, rails=(even.rails[0], skewed_rail(4, 0))))
