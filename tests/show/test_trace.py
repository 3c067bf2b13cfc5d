"""Traces: the prediction's shape, reading what runs leave, clocks laid on each other, and every refusal by its text."""

import json

import numpy as np
import pytest
from tests.support.show_toys import toy_model, toy_plan, write_toy_run

from pipefit.errors import FormatError
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.show.trace import from_timeline, read_trace


@pytest.fixture
def run(tmp_path):
    plan, cluster = toy_plan()
    return plan, write_toy_run(tmp_path / "run", plan, cluster)


def changed(directory, change):
    """The trace file after `change` of its document."""
    file = directory / "trace.json"
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    return file


def test_a_prediction_has_every_action_but_the_receives_at_the_simulators_times():
    plan, cluster = toy_plan()
    timeline = simulate_plan(plan, toy_model(9), cluster).timeline
    trace = from_timeline(timeline)
    assert trace.stop_s == pytest.approx(plan.prediction.step_s)
    spans = {(span.lane, span.action): (span.start_s, span.stop_s) for span in timeline.all_spans()}
    drawn = {
        (row.lane, action): (start, stop)
        for row in trace.rows
        for action, start, stop in zip(row.actions, row.start_s.tolist(), row.stop_s.tolist(), strict=True)
    }
    assert drawn.keys() == spans.keys() and not any(action.kind.startswith("RECV") for _, action in drawn)
    for key, times in spans.items():
        assert drawn[key] == pytest.approx(times)


def test_a_run_reads_back_with_ranks_in_lane_order(run):
    plan, directory = run
    trace = read_trace(directory / "trace.json", plan)
    assert [row.device for row in trace.rows] == [0, 1, 2, 3] and [row.lane for row in trace.rows] == [0, 1, 2, 3]
    assert trace.step == 20 and trace.facts[2].rank == 2 and trace.facts[2].data_s > 0
    words = [list(map(str, row.actions)) for row in trace.rows]
    assert words == [line.split() for line in plan.order.lanes]


def test_clocks_of_ranks_are_laid_on_each_other_where_norm_ends(run):
    plan, directory = run
    before = read_trace(directory / "trace.json", plan)

    def shift(document):
        for rank, offset in ((1, 0.7), (3, 0.2)):
            for span in document["ranks"][rank]["spans"]:
                span[1] += offset
                span[2] += offset

    after = read_trace(changed(directory, shift), plan)
    for one, other in zip(before.rows, after.rows, strict=True):
        np.testing.assert_allclose(one.start_s, other.start_s, atol=1e-9)
        np.testing.assert_allclose(one.stop_s, other.stop_s, atol=1e-9)


def test_no_file_is_no_trace(tmp_path):
    assert read_trace(tmp_path / "trace.json", toy_plan()[0]) is None


def test_ranks_whose_trace_is_missing_are_left_out(run):
    plan, directory = run
    trace = read_trace(changed(directory, lambda document: document["ranks"].pop(1)), plan)
    assert [row.device for row in trace.rows] == [0, 2, 3]


def set_span(value):
    return lambda document: document["ranks"][1]["spans"].__setitem__(3, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format="other"), ["not a pipefit trace", "trace.json"]),
        (lambda d: d.update(version=9), ["another version", "seen: 9", "allowed: 1"]),
        (lambda d: d.update(plan="0123"), ["another plan", "seen: 0123", "delete the file"]),
        (lambda d: d.update(step="ten"), ["which step", "seen: ten"]),
        (lambda d: d.update(ranks=[]), ["no ranks"]),
        (lambda d: d["ranks"][1].update(rank=4), ["not one of the plan's", "ranks[1]", "seen: 4", "0 to 3"]),
        (lambda d: d["ranks"][1].update(rank=0), ["a rank twice", "ranks[1]"]),
        (lambda d: d["ranks"][1]["spans"].pop(), ["different numbers of actions", "ranks[1]", "as lane 1"]),
        (lambda d: d["ranks"][1].pop("spans"), ["different numbers of actions", "no spans"]),
        (set_span(["0F0"]), ["not an action with its times", "ranks[1].spans[3]", '["0F0"]', "wait_s"]),
        (set_span(["0F0", 1.0, None]), ["not an action with its times", "null"]),
        (set_span(["7F7", 1.0, 2.0]), ["another schedule", "ranks[1].spans[3]", "seen: 7F7"]),
        (lambda d: d["ranks"][1]["spans"][3].__setitem__(2, -1.0), ["not an action with its times"]),
        (lambda d: d["ranks"][1]["spans"][3].__setitem__(1, 9e9), ["stops before it starts", "spans[3]"]),
        (lambda d: d["ranks"][0].update(data_s=-1), ["not a number from 0", "ranks[0].data_s", "seen: -1"]),
    ],
)
def test_each_defect_of_a_trace_is_one_error_that_names_the_place(run, change, words):
    plan, directory = run
    with pytest.raises(FormatError) as caught:
        read_trace(changed(directory, change), plan)
    for word in words:
        assert word in str(caught.value)


def test_a_trace_that_was_cut_short_says_so(run):
    plan, directory = run
    file = directory / "trace.json"
    file.write_text(file.read_text()[:500])
    with pytest.raises(FormatError, match=r"cut short[\s\S]*trace.json, line 1"):
        read_trace(file, plan)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="cannot be read"):
        read_trace(file, plan)
