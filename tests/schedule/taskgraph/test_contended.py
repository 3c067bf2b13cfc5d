"""Transfers that share ports: cases worked out by hand, and an oracle that walks actions, on random pipelines."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fluid_simulator import FluidSimulator, contended

from pipefit.cost.types import CostTable, PortFlow
from pipefit.schedule import lower_schedule
from pipefit.schedule.families import FAMILIES
from pipefit.schedule.problem import ScheduleProblem, uniform_costs
from pipefit.schedule.taskgraph.compile import compile_graph
from pipefit.schedule.taskgraph.times import run_graph
from pipefit.schedule.text.grid import draw_grid
from pipefit.simulate import simulate_schedule


def times_of(random: Random, placement: tuple[int, ...]) -> CostTable:
    forward_s, input_s, weight_s = ([random.uniform(0.5, 2) for _ in placement] for _ in range(3))
    costs = uniform_costs(placement, forward_s=forward_s, input_s=input_s, weight_s=weight_s)
    edges = []
    for edge in costs.edges:
        there, back, more = (np.full((1, 1), random.uniform(0.2, 2.0)) for _ in range(3))
        edges.append(
            replace(
                edge, forward_port_s=there, forward_s=there + 0.1 * more, backward_port_s=back, backward_s=back + more
            )
        )
    return replace(costs, edges=tuple(edges))


def random_case(seed: int):
    """A lowered schedule and costs whose pipelines share a few ports and lines."""
    random = Random(seed)
    name = random.choice(["gpipe", "1f1b", "zb-h1", "1f1b-v"])
    placement = FAMILIES[name].placement(random.choice([2, 3]))
    schedule = FAMILIES[name].build(ScheduleProblem(placement=placement, microbatches=random.choice([2, 4])))
    main = times_of(random, placement)
    lanes, stages = max(placement) + 1, len(placement)
    main = replace(
        main,
        reduce_s=np.array([random.uniform(0.5, 3) for _ in range(stages)]),
        gather_s=np.array([random.uniform(0.5, 3) for _ in range(stages)]),
        step_s=np.array([random.uniform(0, 1) for _ in range(lanes)]),
    )
    tables = tuple(replace(times_of(random, placement), step_s=main.step_s) for _ in range(random.choice([1, 2, 3])))
    ports, flows = 4, {}

    def flow(queue: int) -> PortFlow:
        chosen = random.sample(range(ports), random.choice([0, 1, 2, 3]))
        return PortFlow(tuple(chosen), tuple(random.uniform(0.3, 1.0) for _ in chosen), random.uniform(0.5, 2), queue)

    for k in range(len(tables)):
        for index, edge in enumerate(main.edges):
            if placement[edge.source] != placement[edge.target]:
                for way in ("SEND_F", "SEND_B"):
                    flows[way, index, 0, k] = flow(random.choice([-1, 0, 1, 2]))
    for k, stage, kind in itertools.product(range(len(tables)), range(stages), "FIWB"):
        if random.random() < 0.3:
            flows[kind, stage, 0, k] = flow(-1)
    for stage in range(stages):
        flows["REDUCE", stage, 0, 0], flows["GATHER", stage, 0, 0] = flow(-1), flow(-1)
    costs = replace(main, contention=contended(main, flows, tables, ports))
    return lower_schedule(schedule, None, main, zero=range(0, stages, 2)), costs


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_against_devices_that_walk_their_actions(seed: int) -> None:
    schedule, costs = random_case(seed)
    oracle = FluidSimulator(schedule, costs)
    makespan = oracle.run()
    timeline = simulate_schedule(schedule, costs, compiled=False)
    whole = simulate_schedule(schedule, costs, compiled=True)
    assert whole.times.start_s.tolist() == timeline.times.start_s.tolist(), "numba gives the same bits"
    assert whole.times.moment_s.tolist() == timeline.times.moment_s.tolist()
    assert timeline.makespan_s == pytest.approx(makespan, rel=1e-6)
    assert costs.contention is not None
    pipelines = range(len(costs.contention.pipelines))
    ends = {k: max(_compute_ends(schedule, oracle, k)) for k in pipelines}
    last = max(pipelines, key=lambda k: ends[k])
    assert timeline.compute_end_s == pytest.approx(ends[last], rel=1e-6)


def _compute_ends(schedule, oracle, k):
    for lane, actions in enumerate(schedule.lanes):
        for step, action in enumerate(actions):
            if action.kind in "FIWB":
                yield oracle.stops[k, lane][step]


def two_pipelines(flows: dict, ports: int = 1):
    """GPipe on two lanes, one microbatch, two equal pipelines: F 1 s, B 2 s, messages of 4 s, reductions of 3 s."""
    costs = uniform_costs((0, 1), forward_s=1.0, transfer_s=4.0, port_s=4.0)
    costs = replace(costs, reduce_s=np.array([3.0, 3.0]))
    schedule = lower_schedule(FAMILIES["gpipe"].build(ScheduleProblem(placement=(0, 1), microbatches=1)), None, costs)
    return schedule, replace(costs, contention=contended(costs, flows, (costs, costs), ports))


def ends(timeline) -> dict[str, float]:
    return {str(span.action): span.stop_s for span in timeline.all_spans()}


def test_two_messages_on_one_port_take_twice_as_long() -> None:
    """F 0 to 1; both messages at half rate until 9; F until 10, B until 12; back without sharing until 16."""
    flows = {("SEND_F", 0, 0, k): PortFlow((0,), (1.0,), 1.0) for k in (0, 1)}
    schedule, costs = two_pipelines(flows)
    found = ends(simulate_schedule(schedule, costs))
    assert (found["0SEND_F0"], found["1F0"], found["1SEND_B0"]) == (9.0, 10.0, 16.0)


def test_a_grid_shows_what_is_shared() -> None:
    """F0 of the second lane begins 8 s after the first lane's, not 4."""
    schedule, costs = two_pipelines({("SEND_F", 0, 0, k): PortFlow((0,), (1.0,), 1.0) for k in (0, 1)})
    assert draw_grid(schedule, costs).splitlines() == draw_grid(schedule, _slower(costs)).splitlines()
    assert draw_grid(schedule, costs) != draw_grid(schedule, replace(costs, contention=None))


def _slower(costs: CostTable) -> CostTable:
    """Without sharing, but with twice the time ahead."""
    (edge,) = costs.edges
    ahead = replace(edge, forward_s=2 * edge.forward_s, forward_port_s=2 * edge.forward_port_s)
    return replace(costs, contention=None, edges=(ahead,))


def test_messages_of_a_queue_take_turns() -> None:
    """The first message from 1 to 5, the second from 5 to 9: what is seen is the pipeline that is done last."""
    flows = {("SEND_F", 0, 0, k): PortFlow((0,), (1.0,), 1.0, queue=0) for k in (0, 1)}
    schedule, costs = two_pipelines(flows)
    timeline = simulate_schedule(schedule, costs)
    assert ends(timeline)["0SEND_F0"] == 9.0
    assert [span.start_s for span in timeline.all_spans() if str(span.action) == "0SEND_F0"] == [5.0]


def test_a_message_beside_a_reduction() -> None:
    """Stage 1's reduction (3 s) and both messages back (4 s), from 8 on, on one port, a third of it each. Then a
    reduction that takes half of the port and messages that take a quarter: together that is no more than all."""
    flows = {("SEND_B", 0, 0, k): PortFlow((0,), (1.0,), 1.0) for k in (0, 1)}
    flows["REDUCE", 1, 0, 0] = PortFlow((0,), (1.0,), 1.0)
    schedule, costs = two_pipelines(flows)
    found = ends(simulate_schedule(schedule, costs))
    assert found["1REDUCE"] == pytest.approx(8.0 + 3 * 3.0)
    assert found["1SEND_B0"] == pytest.approx(17.0 + 2 * 1.0), "1 s is left of each, at half rate"
    light = {key: replace(flow, use=(0.25 if key[0] == "SEND_B" else 0.5,)) for key, flow in flows.items()}
    schedule, costs = two_pipelines(light)
    found = ends(simulate_schedule(schedule, costs))
    assert (found["1REDUCE"], found["1SEND_B0"]) == (11.0, 12.0)


def test_an_action_with_collectives_beside_a_reduction() -> None:
    """Stage 1's reduction (6 s) begins at 8, as does the message back (4 s); stage 0's backward (2 s) begins at 12, and
    goes by to a half in collectives on the reduction's port: both need 1.5 times as long."""
    schedule, costs = two_pipelines({})
    costs = replace(costs, reduce_s=np.array([3.0, 6.0]))
    apart = replace(costs, contention=contended(costs, {}, (costs,), 0))
    found = ends(simulate_schedule(schedule, apart))
    assert (found["0B0"], found["1REDUCE"]) == (14.0, 14.0)
    flows = {("REDUCE", 1, 0, 0): PortFlow((0,), (1.0,), 1.0), ("B", 0, 0, 0): PortFlow((0,), (0.5,), 1.0)}
    found = ends(simulate_schedule(schedule, replace(costs, contention=contended(costs, flows, (costs,), 1))))
    assert found["0B0"] == pytest.approx(15.0), "2 s at 2/3"
    assert found["1REDUCE"] == pytest.approx(15.0), "4 s alone, then 2 s at 2/3"


def test_what_a_slow_message_leaves_goes_to_the_fast_one() -> None:
    """One message can use a quarter of the port (1 byte a second), the other all of it (4): it gets three quarters."""
    flows = {("SEND_F", 0, 0, 0): PortFlow((0,), (0.25,), 1.0), ("SEND_F", 0, 0, 1): PortFlow((0,), (1.0,), 4.0)}
    schedule, costs = two_pipelines(flows)
    timeline = simulate_schedule(schedule, costs)
    assert ends(timeline)["0SEND_F0"] == pytest.approx(1.0 + 4.0 + 4.0 * 0.25), "until 5 three quarters, then all of it"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_without_anything_shared_nothing_changes(seed: int) -> None:
    """One pipeline that shares nothing: the bits of the plain simulator on a graph in which sends do not wait."""
    schedule, costs = random_case(seed)
    plain = replace(costs, contention=None)
    alone = replace(costs, contention=contended(plain, {}, (plain,), 0))
    graph = compile_graph(schedule, own_ports=False)
    wanted = run_graph(graph, plain)
    found = simulate_schedule(schedule, alone).times
    assert found.start_s.tolist() == wanted.start_s.tolist()
    assert found.moment_s.tolist() == wanted.moment_s.tolist()
