"""The memory curve against two recounts that know nothing of events: by program order, and at sampled moments."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.random_schedules import cases

from pipefit.schedule import FAMILIES, ScheduleProblem, linear_placement, lower_schedule, uniform_costs
from pipefit.schedule.check.deadlock import message_name
from pipefit.simulate import simulate_schedule

COMPUTE = ("F", "I", "W", "B")


@settings(max_examples=200, deadline=None)
@given(cases(), st.booleans())
def test_peak_by_program_order(case, ahead) -> None:
    """While an action runs: what earlier ones hold, what it takes and passes, the buffers posted and not yet used, what
    waits on this lane for its next stage, and what has been sent but not let go.

    Between actions there is more in use only right after one: its output before it is sent, and buffers.
    """
    schedule, edges, costs = case
    costs = replace(costs, receives_ahead=ahead)
    lowered = lower_schedule(schedule, edges, costs)
    timeline = simulate_schedule(lowered, costs)
    size, sent_size = _sizes(costs, "bytes"), _sizes(costs, "sent_bytes")
    for lane, actions in enumerate(lowered.lanes):
        static = float(costs.static_bytes[lane])
        held, buffers, local, peak = static, {}, {}, static
        outbox: dict[tuple, list[float]] = {}

        def now() -> float:
            return (
                held + sum(buffers.values()) + sum(local.values()) + sum(map(sum, outbox.values()))  # noqa: B023
            )

        for step, action in enumerate(actions):
            if action.kind.startswith("RECV"):
                buffers[message_name(action)] = size(message_name(action))
                peak = max(peak, now())
            elif action.kind.startswith("SEND"):
                queue = outbox[message_name(action)[:4]]
                gone = _sent_before(actions, step) - _most_open(lowered, action)
                if gone >= 0:
                    queue[gone] = 0.0
            if action.kind not in COMPUTE:
                continue
            direction = {"F": "F", "I": "B", "B": "B"}.get(action.kind)
            for waiting in (buffers, local):
                for key in [k for k in waiting if (k[0], k[2], k[4], k[5]) == (direction, *action[1:4])]:
                    del waiting[key]
            cost = costs.actions[action.kind].cost_of(*action[1:4])
            peak = max(peak, now() + max(cost.held_bytes, 0.0) + cost.peak_bytes)
            held += cost.held_bytes
            for source, target, tensor in edges:
                ends = (source, target) if direction == "F" else (target, source)
                if direction is not None and ends[0] == action.stage:
                    key = (direction, *ends, tensor, action.microbatch, action.slice)
                    if schedule.placement[source] == schedule.placement[target]:
                        local[key] = sent_size(key)
                    else:
                        outbox.setdefault(key[:4], []).append(sent_size(key))
            peak = max(peak, now())
        assert timeline.peak_bytes[lane] == pytest.approx(peak, abs=1e-9)
        assert timeline.lane_memory[lane].peak_bytes == timeline.peak_bytes[lane]


def _sent_before(actions, step) -> int:
    """How many messages its channel has sent before the SEND at `step`."""
    return sum(
        a.kind.startswith("SEND") and message_name(a)[:4] == message_name(actions[step])[:4] for a in actions[:step]
    )


def _most_open(lowered, send) -> int:
    """How many receives of the SEND's channel are posted and not yet used at once, at most."""
    actions = lowered.lanes[lowered.placement[send.peer]]
    most = now = 0
    for action in actions:
        if action.kind.startswith("RECV") and message_name(action)[:4] == message_name(send)[:4]:
            now += 1
            most = max(most, now)
        takes = action.kind == "F" if send.kind == "SEND_F" else action.kind in ("I", "B")
        posted = [a for a in actions if a.kind.startswith("RECV") and message_name(a)[:4] == message_name(send)[:4]]
        if takes and any(a[1:4] == action[1:4] for a in posted):
            now -= 1
    return most


@settings(max_examples=100, deadline=None)
@given(cases())
def test_curve_at_any_moment(case) -> None:
    """Between two events, the sum over all intervals that cover the moment."""
    schedule, edges, costs = case
    for one in (schedule, lower_schedule(schedule, edges, costs)):
        timeline = simulate_schedule(one, costs, edges)
        intervals = _intervals(one, timeline, costs, edges)
        for lane, curve in enumerate(timeline.lane_memory):
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


def _sizes(costs, field: str):
    edges = {(e.source, e.target, e.tensor): e for e in costs.edges}

    def size(key) -> float:
        direction, sender, receiver, tensor, m, k = key
        ends = (sender, receiver) if direction == "F" else (receiver, sender)
        edge = edges[(*ends, tensor)]
        array = getattr(edge, f"{'forward' if direction == 'F' else 'backward'}_{field}")
        return float(array[min(m, array.shape[0] - 1), min(k, array.shape[1] - 1)])

    return size


def _intervals(schedule, timeline, costs, edges) -> list[list[tuple[float, float, float]]]:
    """(from, to, bytes) of everything that lives, by lane."""
    size, sent_size, end = _sizes(costs, "bytes"), _sizes(costs, "sent_bytes"), float("inf")
    result = [[] for _ in schedule.lanes]
    spans = {}
    for lane, step, action in schedule:
        if action.kind in COMPUTE:
            key = ("F" if action.kind == "F" else "B", *action[1:4])
            start, stop = timeline.starts_s[lane][step], timeline.stops_s[lane][step]
            if action.kind != "W":
                spans[key] = (lane, start, stop)
            cost = costs.actions[action.kind].cost_of(*action[1:4])
            result[lane].append((start, stop, cost.peak_bytes))
            result[lane].append((start if cost.held_bytes > 0 else stop, end, cost.held_bytes))
    for span in timeline.all_spans():
        if span.action.kind.startswith("SEND"):
            key = message_name(span.action)
            lane, start, _ = spans[key[0], key[2], key[4], key[5]]
            result[lane].append((_posted(schedule, timeline, key, span.start_s), start, size(key)))
            lane, _, stop = spans[key[0], key[1], key[4], key[5]]
            gone = _let_go(schedule, timeline, lane, span.action) if schedule.is_lowered else span.stop_s
            result[lane].append((stop, gone, sent_size(key)))
    for source, target, tensor in edges:
        if schedule.placement[source] == schedule.placement[target]:
            for direction, one, two in (("F", source, target), ("B", target, source)):
                for place in itertools.product(range(schedule.microbatches), range(schedule.slices)):
                    (lane, _, stop), (_, start, _) = spans[direction, one, *place], spans[direction, two, *place]
                    result[lane].append((stop, start, sent_size((direction, one, two, tensor, *place))))
    return result


def _let_go(schedule, timeline, lane: int, send) -> float:
    """When the lane reaches the SEND of the message that lets this one go."""
    actions = schedule.lanes[lane]
    step = actions.index(send)
    wanted = _sent_before(actions, step) + _most_open(schedule, send)
    for later in range(step + 1, len(actions)):
        same = actions[later].kind.startswith("SEND") and message_name(actions[later])[:4] == message_name(send)[:4]
        if same and _sent_before(actions, later) == wanted:
            before = [s for s in range(later) if actions[s].kind in COMPUTE]
            return float(timeline.stops_s[lane][before[-1]])
    return float("inf")


def _posted(schedule, timeline, key, start: float) -> float:
    for lane, step, action in schedule:
        if action.kind.startswith("RECV") and message_name(action) == key:
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
    curve = simulate_schedule(
        Schedule(name="x", placement=(0,), microbatches=2, slices=1, lanes=lanes), costs
    ).lane_memory[0]
    assert curve.bytes.tolist() == [113, 110, 123, 120, 124, 116, 117, 110, 114, 106, 107, 100]
    assert curve.time_s.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert (curve.peak_bytes, curve.peak_s, curve.static_bytes) == (124, 2, 100)


def test_receive_buffers_live_from_posting_to_use() -> None:
    """Lane 1 takes twice as long for a forward, so a microbatch arrives while it runs the one before."""
    placement = linear_placement(2)
    costs = uniform_costs(placement)
    costs.actions["F"] = replace(costs.actions["F"], time_s=np.array([1.0, 2.0]).reshape(2, 1, 1))
    edge = replace(costs.edges[0], forward_bytes=np.full((1, 1), 5.0), backward_bytes=np.full((1, 1), 7.0))
    costs = replace(costs, edges=(edge,))
    computed = FAMILIES["gpipe"](ScheduleProblem(placement=placement, microbatches=3))
    timeline = simulate_schedule(lower_schedule(computed, costs=costs), costs)
    assert timeline.lane_memory[1].buffers_bytes == 10.0, "the third is posted just before the second is taken"
    assert timeline.lane_memory[0].buffers_bytes == 7.0
    even = simulate_schedule(lower_schedule(computed), replace(uniform_costs(placement), edges=(edge,)))
    assert even.lane_memory[1].buffers_bytes == 5.0
