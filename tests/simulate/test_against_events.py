"""The simulator against the event-driven one on random schedules, DAGs, placements, slices and costs: same bits."""

from __future__ import annotations

from hypothesis import given, settings
from tests.support.event_simulator import EventSimulator
from tests.support.random_schedules import cases

from pipefit.schedule import lower_schedule
from pipefit.schedule.check.deadlock import message_name
from pipefit.simulate import simulate_schedule


@settings(max_examples=400, deadline=None)
@given(cases())
def test_computed_and_lowered(case) -> None:
    schedule, edges, costs = case
    lowered = lower_schedule(schedule, edges, costs, zero=range(0, schedule.num_stages, 2), tied={"t": (0,)})
    for one in (schedule, lowered):
        compare(one, edges, costs)


@settings(max_examples=150, deadline=None)
@given(cases(), cases())
def test_a_lowering_made_for_other_costs(case, other) -> None:
    """Receives then stand in the wrong places, and transfers must wait for them: still the same."""
    schedule, edges, costs = case
    compare(lower_schedule(schedule, edges, None), edges, costs)


def compare(schedule, edges, costs) -> None:
    events = EventSimulator(schedule, costs, edges)
    makespan = events.run()
    for compiled in (False, True):
        timeline = simulate_schedule(schedule, costs, edges, compiled=compiled)
        assert timeline.makespan_s == makespan
        for lane, actions in enumerate(schedule.lanes):
            for step, action in enumerate(actions):
                start, stop = timeline.starts_s[lane][step], timeline.stops_s[lane][step]
                if action.kind.startswith("SEND"):
                    begun, _, arrived = events.transfers[message_name(action)]
                    assert (start, stop) == (begun, arrived)
                elif action.kind.startswith("RECV"):
                    assert (start, stop) == (
                        events.posted[message_name(action)],
                        events.transfers[message_name(action)][2],
                    )
                else:
                    assert (start, stop) == (events.start[lane, step], events.stop[lane, step]), action
        ports = [0.0] * len(schedule.lanes)
        for sent, (begun, free, _) in events.transfers.items():
            ports[schedule.placement[sent[1]]] += free - begun
        for ours, theirs in zip(timeline.port_s, ports, strict=True):
            assert abs(ours - theirs) < 1e-9
