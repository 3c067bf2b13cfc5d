"""Run directories: what they say, and one clear error for each way in which they are broken."""

import json
import math

import pytest
from tests.support.show_toys import toy_plan, write_toy_run

from pipefit.errors import FormatError
from pipefit.show.record import read_run, warm_up_count


@pytest.fixture
def run(tmp_path):
    plan, cluster = toy_plan()
    return plan, write_toy_run(tmp_path / "run", plan, cluster, stretch=1.25)


def test_a_run_tells_its_median_step_without_the_warm_up(run):
    plan, directory = run
    record = read_run(directory)
    assert record.plan == plan and record.plan.content_hash == plan.content_hash
    assert len(record.steps) == 20 and warm_up_count(20) == 2
    assert record.step_s == pytest.approx(1.25 * plan.prediction.step_s)
    assert record.evaluations == ((10, pytest.approx(1.7)), (20, pytest.approx(1.45)))
    assert record.peak_bytes[2] == pytest.approx(1.25 * plan.prediction.lanes[2].peak_bytes)


def test_steps_done_again_after_a_resume_count_once(run):
    _, directory = run
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "loss": 0.5, "step_s": 1.0}) + "\n")
        file.write(json.dumps({"step": 21, "loss": 0.4, "step_s": 1.0}) + "\n")
    record = read_run(directory)
    assert [step.step for step in record.steps][-2:] == [20, 21] and record.steps[-2].loss == 0.5
    assert math.isnan(record.steps[-1].memory_bytes)


def test_a_loss_that_is_not_a_number_is_kept(run):
    _, directory = run
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": NaN, "step_s": 1.0}\n')
    assert math.isnan(read_run(directory).steps[-1].loss)


def test_a_run_without_trace_knows_rank_0_only(run):
    plan, directory = run
    (directory / "trace.json").unlink()
    record = read_run(directory)
    assert record.trace is None and list(record.peak_bytes) == [plan.used_devices[0]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"step": 3, "lo', ["not a JSON object", "line 23", "killed while it wrote"]),
        ("[1, 2]", ["not a JSON object", "line 23"]),
        ('{"step": 3, "step_s": 1.0}', ["no number 'loss'", "line 23", "seen: null"]),
        ('{"step": 3, "loss": "low", "step_s": 1.0}', ["no number 'loss'", '"low"']),
        ('{"step": 3, "loss": 1.0}', ["no number 'step_s'"]),
        ('{"step": 3, "loss": 1.0, "step_s": 0}', ["positive time", "step_s", "seen: 0"]),
        ('{"step": 3.5, "loss": 1.0, "step_s": 1}', ["A step is a count", "3.5"]),
        ('{"loss": 1.0, "step_s": 1}', ["no number 'step'"]),
        ('{"eval_loss": true, "step": 3}', ["no number 'eval_loss'", "true"]),
    ],
)
def test_each_broken_line_of_the_metrics_is_one_error(run, line, words):
    _, directory = run
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(FormatError) as caught:
        read_run(directory)
    for word in words:
        assert word in str(caught.value)


def test_a_directory_that_is_no_run_says_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(FormatError, match=r"not a run directory[\s\S]*notes.txt[\s\S]*plan.json and metrics.jsonl"):
        read_run(tmp_path)


def test_a_run_that_stopped_before_its_first_step_has_no_metrics(run):
    _, directory = run
    (directory / "metrics.jsonl").unlink()
    with pytest.raises(FormatError, match=r"no metrics[\s\S]*report the plan alone"):
        read_run(directory)


def test_a_plan_cut_short_and_metrics_that_are_no_text_are_refused(run):
    _, directory = run
    (directory / "metrics.jsonl").write_bytes(b"\xff\xff")
    with pytest.raises(FormatError, match="metrics cannot be read"):
        read_run(directory)
    text = (directory / "plan.json").read_text()
    (directory / "plan.json").write_text(text[: len(text) // 2])
    with pytest.raises(FormatError, match=r"cut short[\s\S]*plan.json, line"):
        read_run(directory)
