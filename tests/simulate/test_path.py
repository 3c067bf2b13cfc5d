"""The critical path is a real chain of its stated length, and what is on it is critical."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.random_schedules import cases

from pipefit.schedule import Action, lower_schedule
from pipefit.schedule.check.deadlock import message_name
from pipefit.simulate import Timeline, simulate_schedule


@settings(max_examples=200, deadline=None)
@given(cases(), st.booleans())
def test_it_is_a_chain_from_zero_to_the_end(case, lowered: bool) -> None:
    schedule, edges, costs = case
    timeline = simulate_schedule(lower_schedule(schedule, edges, costs) if lowered else schedule, costs, edges)
    path = timeline.critical_path
    assert path[0].start_s == 0.0
    assert path[-1].stop_s == timeline.makespan_s
    for before, after in pairwise(path):
        assert before.stop_s == after.start_s
        assert _linked(timeline, before, after, edges), (before, after)
    assert sum(span.stop_s - span.start_s for span in path) == pytest.approx(timeline.makespan_s)


def _linked(timeline: Timeline, before, after, edges) -> bool:
    """Whether `after` may have had to wait for `before`, by the rules as they are told, not as they are coded."""
    a, b = before.action, after.action
    if a.kind == "NORM" or b.kind in ("NORM", "STEP", "REDUCE", "GATHER"):
        return True
    sends = ("SEND_F", "SEND_B")
    if a.kind in sends and b.kind in sends:  # one port, one after the other
        return before.lane == after.lane
    if a.kind in sends:  # the consumer
        direction, _, target, _, m, k = message_name(a)
        return b[1:4] == (target, m, k) and (b.kind == "F") == (direction == "F")
    if b.kind in sends:  # the producer, what stands before the SEND, or what stands before its RECV
        return before.lane == after.lane or before.lane == timeline.schedule.placement[b.peer]
    serial = [x for x in timeline.schedule.lanes[before.lane] if x.kind in ("F", "I", "W", "B", "STEP", "NORM")]
    return before.lane == after.lane and serial.index(b) == serial.index(a) + 1


@settings(max_examples=100, deadline=None)
@given(cases())
def test_slowing_down_what_is_on_it_slows_down_the_whole(case) -> None:
    schedule, edges, costs = case
    dense = {
        kind: replace(table, time_s=np.array(np.broadcast_to(table.time_s, _shape(schedule))))
        for kind, table in costs.actions.items()
    }
    costs = replace(costs, actions=dense)
    timeline = simulate_schedule(schedule, costs, edges)
    for span in timeline.critical_path:
        if span.action.kind in dense:
            kind, stage, m, k = span.action[:4]
            slower = {name: replace(table, time_s=table.time_s.copy()) for name, table in dense.items()}
            slower[kind].time_s[stage, m, k] += 1.0
            changed = simulate_schedule(schedule, replace(costs, actions=slower), edges)
            assert changed.makespan_s == pytest.approx(timeline.makespan_s + 1.0)


def _shape(schedule) -> tuple[int, int, int]:
    return (schedule.num_stages, schedule.microbatches, schedule.slices)


def test_spans_hold_every_action_but_receives() -> None:
    from pipefit.schedule import FAMILIES, ScheduleProblem, linear_placement, uniform_costs

    schedule = lower_schedule(FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(3), microbatches=4)))
    spans = simulate_schedule(schedule, uniform_costs(linear_placement(3))).all_spans()
    drawn = sorted((span.lane, span.action) for span in spans)
    assert drawn == sorted((lane, a) for lane, _, a in schedule if not a.kind.startswith("RECV"))
    assert [span.start_s for span in spans] == sorted(span.start_s for span in spans)
    assert Action("SEND_F", 0, 0, 0, 1) in [span.action for span in spans]
