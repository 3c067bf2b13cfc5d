"""`pipefit compare`: figures from plan and run, what cannot be compared, and the two forms of output."""

import json
from dataclasses import replace

import pytest
from tests.support.show_toys import toy_plan, write_toy_run

from pipefit.cli.compare import command
from pipefit.codec import dump_text
from pipefit.errors import FormatError, PlanError
from pipefit.show.compare import compare_entries
from pipefit.show.record import read_run


@pytest.fixture
def two(tmp_path):
    """A plan of four stages in a file, and a run of a plan of two."""
    four, _ = toy_plan(stages=4)
    (tmp_path / "four.json").write_text(dump_text(four))
    plan, cluster = toy_plan(stages=2, microbatches=4, replicas=(1, 1))
    write_toy_run(tmp_path / "run", plan, cluster, stretch=1.25)
    return tmp_path, four, plan


def test_figures_are_the_plans_and_the_runs(two, capsys):
    directory, four, plan = two
    command(paths=[directory / "four.json", directory / "run"], as_json=True)
    first, second = json.loads(capsys.readouterr().out)
    assert first["plan"] == four.content_hash
    assert first["step_s"] == {"predicted": four.prediction.step_s, "measured": None}
    step_s = plan.prediction.step_s
    assert second["step_s"] == {"predicted": step_s, "measured": pytest.approx(1.25 * step_s)}
    assert second["tokens_per_s"]["predicted"] == plan.prediction.tokens_per_s
    assert second["tokens_per_s"]["measured"] == pytest.approx(16 * 64 / (1.25 * step_s))
    peak = max(lane.peak_bytes for lane in plan.prediction.lanes)
    assert second["peak_bytes"] == {"predicted": peak, "measured": pytest.approx(1.25 * peak)}
    idle = sum(lane.idle_s for lane in plan.prediction.lanes) / (2 * step_s)
    assert second["idle_share"]["predicted"] == pytest.approx(idle)
    # Each device also spent 2 % of the step on its data, in which nothing was computed.
    assert second["idle_share"]["measured"] == pytest.approx(1 - (1 - idle) / 1.02, rel=1e-3)


def test_the_table_has_a_row_for_each_and_the_error(two, capsys):
    directory, _, _ = two
    command(paths=[directory / "four.json", directory / "run"], as_json=False)
    out = capsys.readouterr().out
    assert "toy, batch 16 x 64 tokens" in out and "stages" in out and "replicas" in out
    lines = [line.split() for line in out.splitlines()]
    assert sum("predicted" in line for line in lines) >= 2
    measured = next(line for line in lines if line[:1] == ["measured"])
    error = next(line for line in lines if line[:1] == ["error"])
    assert measured[1:] and error[1:3] == ["-20.0%", "+25.0%"]


def test_a_run_without_trace_has_no_measured_idle_share(tmp_path):
    plan, cluster = toy_plan()
    write_toy_run(tmp_path / "run", plan, cluster, traced=False)
    (entry,) = compare_entries([(tmp_path / "run", plan, read_run(tmp_path / "run"))])
    idle = entry.figures["idle_share"]
    assert idle.measured is None and idle.relative_error is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"blocks": 8}, ["the model differs", "same --model"]),
        ({"batch": 32}, ["the batch differs", "16 and 32"]),
        ({"sequence": 128}, ["the sequence length differs", "64 and 128"]),
    ],
)
def test_only_plans_of_one_model_and_batch_can_be_compared(tmp_path, other, words):
    for name, choices in (("a.json", {}), ("b.json", other)):
        (tmp_path / name).write_text(dump_text(toy_plan(**choices)[0]))
    with pytest.raises(PlanError) as caught:
        command(paths=[tmp_path / "a.json", tmp_path / "b.json"], as_json=False)
    for word in (*words, "a.json", "b.json"):
        assert word in str(caught.value)


def test_a_plan_without_prediction_says_how_to_get_one(tmp_path):
    plan, _ = toy_plan()
    (tmp_path / "bare.json").write_text(dump_text(replace(plan, prediction=None)))
    with pytest.raises(PlanError, match=r"no prediction[\s\S]*pipefit plan"):
        command(paths=[tmp_path / "bare.json"], as_json=False)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FormatError, match=r"no such file[\s\S]*nothing.json"):
        command(paths=[tmp_path / "nothing.json"], as_json=False)
