"""The memory curve against two recounts that know nothing of events: by program order, and at sampled moments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from random_schedules import cases

from pipefit.schedule import FAMILIES, Problem, linear, lower, uniform_costs
from pipefit.schedule.deadlock import message
from pipefit.simulate import simulate

COMPUTE = ("F", "I", "W", "B")


@settings(max_examples=200, deadline=None)
@given(cases())
def test_peak_by_program_order(case) -> None:
    """While an action runs: what earlier ones hold, what it takes and passes, and the buffers posted and not yet used.

    Between actions no more can be in use than during one of them, because a buffer is posted before its user.
    """
    schedule, edges, costs = case
    lowered = lower(schedule, edges, costs)
    timeline = simulate(lowered, costs)
    sizes = _buffer_sizes(costs)
    for lane, actions in enumerate(lowered.lanes):
        held, buffers, peak = float(costs.static_bytes[lane]), {}, float(costs.static_bytes[lane])
        for action in actions:
            if action.kind.startswith("RECV"):
                buffers[message(action)] = sizes(message(action))
            if action.kind not in COMPUTE:
                continue
            cost = costs.actions[action.kind].cost(*action[1:4])
            now = held + sum(buffers.values()) + max(cost.held_bytes, 0.0) + cost.peak_bytes
            peak = max(peak, now)
            held += cost.held_bytes
            direction = {"F": "F", "I": "B", "B": "B"}.get(action.kind)
            buffers = {
                key: size
                for key, size in buffers.items()
                if (key[0], key[2], key[4], key[5]) != (direction, *action[1:4])
            }
        assert timeline.peak_bytes[lane] == pytest.approx(peak, abs=1e-9)
        assert timeline.memory[lane].peak_bytes == timeline.peak_bytes[lane]


@settings(max_examples=100, deadline=None)
@given(cases())
def test_curve_at_any_moment(case) -> None:
    """Between two events, the sum over all intervals that cover the moment."""
    schedule, edges, costs = case
    for one in (schedule, lower(schedule, edges, costs)):
        timeline = simulate(one, costs, edges)
        intervals = _intervals(one, timeline, costs, edges)
        for lane, curve in enumerate(timeline.memory):
            assert curve.time_s.tolist() == sorted(curve.time_s.tolist())
            moments = np.unique(curve.time_s)
            apart = np.flatnonzero(np.diff(moments) > 1e-9)  # not neighbours by rounding
            for moment in (moments[apart] + moments[apart + 1]) / 2:
                naive = curve.static_bytes + sum(size for a, b, size in intervals[lane] if a < moment < b)
                drawn = curve.bytes[np.searchsorted(curve.time_s, moment) - 1]
                assert drawn == pytest.approx(naive, abs=1e-9)
            assert curve.peak_bytes >= max(curve.bytes, default=0.0)
            if len(curve.bytes) and curve.peak_bytes > curve.static_bytes:
                assert curve.peak_bytes in curve.bytes[curve.time_s == curve.peak_s]


def _buffer_sizes(costs):
    edges = {(e.source, e.target, e.tensor): e for e in costs.edges}

    def size(key) -> float:
        direction, sender, receiver, tensor, m, k = key
        ends = (sender, receiver) if direction == "F" else (receiver, sender)
        edge = edges[(*ends, tensor)]
        array = edge.forward_bytes if direction == "F" else edge.backward_bytes
        return float(array[min(m, array.shape[0] - 1), min(k, array.shape[1] - 1)])

    return size


def _intervals(schedule, timeline, costs, edges) -> list[list[tuple[float, float, float]]]:
    """(from, to, bytes) of everything that lives, by lane."""
    size, end = _buffer_sizes(costs), float("inf")
    result = [[] for _ in schedule.lanes]
    stops, backward = {}, {}
    for lane, step, action in schedule:
        if action.kind in COMPUTE:
            key = ("F" if action.kind == "F" else "B", *action[1:4])
            start, stop = timeline.starts_s[lane][step], timeline.stops_s[lane][step]
            if action.kind != "W":
                stops[key] = (lane, stop)
                backward[key] = action
            cost = costs.actions[action.kind].cost(*action[1:4])
            result[lane].append((start, stop, cost.peak_bytes))
            result[lane].append((start if cost.held_bytes > 0 else stop, end, cost.held_bytes))
    for span in timeline.spans():
        if span.action.kind.startswith("SEND"):
            key = message(span.action)
            lane, stop = stops[key[0], key[2], key[4], key[5]]
            result[lane].append((_posted(schedule, timeline, key, span.start_s), stop, size(key)))
    return result


def _posted(schedule, timeline, key, start: float) -> float:
    for lane, step, action in schedule:
        if action.kind.startswith("RECV") and message(action) == key:
            return float(timeline.starts_s[lane][step])
    return start


def test_passing_memory_and_pending_weight_gradients() -> None:
    """One stage, F I W: forward holds 10 and passes 3; I turns 10 into 6 and passes 4; W frees the 6."""
    from pipefit.schedule import Schedule, parse_lanes

    costs = uniform_costs((0,))
    for kind, held, passing in (("F", 10.0, 3.0), ("I", -4.0, 4.0), ("W", -6.0, 1.0)):
        costs.actions[kind].held_bytes[:] = held
        costs.actions[kind].peak_bytes[:] = passing
    costs.static_bytes[:] = 100.0
    lanes = parse_lanes(("0F0 0F1 0I0 0W0 0I1 0W1",))
    curve = simulate(Schedule(name="x", placement=(0,), microbatches=2, slices=1, lanes=lanes), costs).memory[0]
    assert curve.bytes.tolist() == [113, 110, 123, 120, 124, 116, 117, 110, 114, 106, 107, 100]
    assert curve.time_s.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert (curve.peak_bytes, curve.peak_s, curve.static_bytes) == (124, 2, 100)


def test_receive_buffers_live_from_posting_to_use() -> None:
    """Lane 1 takes twice as long for a forward, so the next microbatch arrives while it runs the one before."""
    placement = linear(2)
    costs = uniform_costs(placement)
    costs.actions["F"] = replace(costs.actions["F"], time_s=np.array([1.0, 2.0]).reshape(2, 1, 1))
    edge = replace(costs.edges[0], forward_bytes=np.full((1, 1), 5.0), backward_bytes=np.full((1, 1), 7.0))
    costs = replace(costs, edges=(edge,))
    computed = FAMILIES["gpipe"](Problem(placement=placement, microbatches=3))
    timeline = simulate(lower(computed, costs=costs), costs)
    assert timeline.memory[1].buffers_bytes == 10.0
    assert timeline.memory[0].buffers_bytes == 7.0
    even = simulate(lower(computed), replace(uniform_costs(placement), edges=(edge,)))
    assert even.memory[1].buffers_bytes == 5.0
