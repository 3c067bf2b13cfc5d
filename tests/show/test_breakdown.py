"""Where a step goes: against sampling the timeline moment by moment, a hand-made run, and the run that was made up."""

import json

import numpy as np
import pytest
from tests.support.show_toys import toy_model, toy_plan, write_toy_run

from pipefit.plan.assemble.predict import simulate_plan
from pipefit.show.breakdown import TIME_PARTS, measured_breakdown, predicted_breakdown, with_waits
from pipefit.show.trace import read_trace

SHAPES = [
    {"stages": 4, "microbatches": 8},
    {"stages": 2, "microbatches": 4, "schedule": "gpipe", "replicas": (1, 1)},
    {"stages": 4, "microbatches": 4, "placement": (0, 1, 1, 0), "replicas": (1, 1), "schedule": "gpipe"},
    {"stages": 1, "microbatches": 2, "replicas": (1, 1, 1, 1), "sharded_state": "optimizer"},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_predicted_parts_add_up_to_the_step_and_agree_with_sampling(shape):
    plan, cluster = toy_plan(**shape)
    timeline = simulate_plan(plan, toy_model(9), cluster).timeline
    moments = (np.arange(20000) + 0.5) / 20000 * timeline.makespan_s
    for part in predicted_breakdown(timeline):
        assert part.total_s == pytest.approx(plan.prediction.step_s)
        assert all(value >= 0 for value in part.seconds.values()) and part.seconds["data"] == 0
        actions = timeline.schedule.lanes[part.lane]
        for name, kinds in (("compute", "F I W B"), ("optimizer", "NORM STEP")):
            busy = np.zeros(len(moments), dtype=bool)
            for action, start, stop in zip(
                actions, timeline.starts_s[part.lane], timeline.stops_s[part.lane], strict=True
            ):
                if action.kind in kinds.split():
                    busy |= (moments >= start) & (moments < stop)
            assert part.seconds[name] == pytest.approx(busy.mean() * timeline.makespan_s, abs=timeline.makespan_s / 500)
        prediction = plan.prediction.lanes[part.lane]
        assert part.seconds["compute"] + part.seconds["optimizer"] == pytest.approx(prediction.busy_s)
        assert part.seconds["communication"] + part.seconds["idle"] == pytest.approx(prediction.idle_s)


def test_reductions_that_nothing_hides_are_exposed():
    plan, cluster = toy_plan(stages=1, microbatches=2, replicas=(1, 1, 1, 1), sharded_state="optimizer")
    simulation = simulate_plan(plan, toy_model(9), cluster)
    (part,) = predicted_breakdown(simulation.timeline)
    reduce_s = float(simulation.costs.reduce_s[0] + simulation.costs.gather_s[0])
    assert reduce_s > 0 and part.seconds["communication"] == pytest.approx(reduce_s)


def hand_made(tmp_path, waits):
    """Two stages, one microbatch: stage 1 begins its F at 0 and gets its data at 5; all figures can be checked."""
    plan, cluster = toy_plan(stages=2, microbatches=1)
    directory = write_toy_run(tmp_path / "run", plan, cluster)
    times = {
        "0F0": (0, 4, 0), "0SEND_F0": (4, 4.5, 0), "0RECV_B0": (4.5, 4.5, 0), "0B0": (4.5, 12, 5.5),
        "1RECV_F0": (0, 0, 0), "1F0": (0, 7, 5), "1B0": (7, 9, 0), "1SEND_B0": (9, 9, 0),
    }  # fmt: skip
    ends = {0: {"NORM": (12, 13, 0), "STEP": (13, 14, 0)}, 1: {"NORM": (9, 13, 0), "STEP": (13, 15, 0)}}
    ranks = []
    for rank, line in enumerate(plan.order.lanes):
        rows = {**times, **ends[rank]}
        spans = [[word, *map(float, rows[word][: 3 if waits else 2])] for word in line.split()]
        ranks.append({"rank": rank, "spans": spans, "data_s": 0.5})
    document = json.loads((directory / "trace.json").read_text())
    (directory / "trace.json").write_text(json.dumps({**document, "ranks": ranks}))
    return plan, read_trace(directory / "trace.json", plan)


def test_recorded_waits_split_into_idle_and_exposed_communication(tmp_path):
    plan, trace = hand_made(tmp_path, waits=True)
    one, two = (part.seconds for part in measured_breakdown(trace, plan))
    # Device 0: B waits 5.5 from 4.5, the sender sends at 9, so 4.5 of it are idle; NORM starts last here, at 12.
    assert one == pytest.approx(
        {"compute": 4 + 2, "communication": 0.5 + 1 + 1, "idle": 4.5 + 1, "optimizer": 1, "data": 0.5}
    )
    # Device 1: F waits 5, until the sender sends at 4 idle; NORM waits for device 0 from 9 to 12.
    assert two == pytest.approx({"compute": 2 + 2, "communication": 1 + 1, "idle": 4 + 3, "optimizer": 2, "data": 0.5})
    assert sum(one.values()) == pytest.approx(15.5) == sum(two.values())


def test_without_recorded_waits_the_transfer_itself_counts_as_compute(tmp_path):
    plan, trace = hand_made(tmp_path, waits=False)
    one, two = (part.seconds for part in measured_breakdown(trace, plan))
    assert one["idle"] == pytest.approx(4.5 + 1) and one["compute"] == pytest.approx(4 + 3)
    assert two["idle"] == pytest.approx(4 + 3) and two["compute"] == pytest.approx(3 + 2)
    filled = with_waits(trace, plan)
    waits = {
        str(a): w for row in filled.rows for a, w in zip(row.actions, row.wait_s.tolist(), strict=True) if a.stage == 1
    }
    assert waits["1F0"] == pytest.approx(4)


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_a_run_that_follows_its_prediction_measures_the_predicted_compute(tmp_path, shape):
    plan, cluster = toy_plan(**shape)
    directory = write_toy_run(tmp_path / "run", plan, cluster, stretch=1.25)
    trace = read_trace(directory / "trace.json", plan)
    predicted = {part.lane: part for part in predicted_breakdown(simulate_plan(plan, toy_model(9), cluster).timeline)}
    measured = measured_breakdown(trace, plan)
    assert len(measured) == len(plan.used_devices)
    for part in measured:
        assert set(part.seconds) == set(TIME_PARTS)
        assert part.seconds["compute"] == pytest.approx(1.25 * predicted[part.lane].seconds["compute"])
        assert part.total_s - part.seconds["data"] == pytest.approx(1.25 * plan.prediction.step_s)
