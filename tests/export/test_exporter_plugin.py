"""`pipefit export`: an exporter of another package, from the how-to page, and the built-in targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.plugin_package import installed, page_examples, write_package

from pipefit.errors import PipefitError
from pipefit.export import PlanExporter, find_exporters, register_exporter
from pipefit.plan.check.rules import load_plan
from pipefit.schedule.text.csv_io import from_csv

__all__ = ["installed"]


@pytest.fixture
def plan_file(tmp_path: Path, pipefit) -> Path:
    """A plan of two lanes by the planner."""
    path = tmp_path / "plan.json"
    words = ("--batch", "16", "--seq", "128", "--fix", "stages=2", "--fix", "replicas=2", "--fix", "slices=1")
    code, _, err = pipefit("plan", "--model", "tiny", "--cluster", "4xH100", *words, "-o", str(path))
    assert code == 0, err
    return path


def test_the_exporter_of_a_package_is_listed_and_exports(tmp_path: Path, plan_file: Path, installed, pipefit) -> None:
    assert "toy-lanes" not in pipefit("export", "--list")[1]
    installed(write_package(tmp_path / "site", page_examples("add-an-exporter.md"), "toy_lanes"), find_exporters())
    code, out, _ = pipefit("export", "--list")
    assert code == 0 and "toy-lanes        devices and busy share of each lane\n" in out and "torch-csv" in out
    output = tmp_path / "plan.lanes"
    code, out, err = pipefit("export", str(plan_file), "--to", "toy-lanes", "-o", str(output))
    assert (code, out) == (0, f"toy-lanes written to {output}\n"), err
    plan = load_plan(plan_file)
    assert plan.prediction is not None
    busy = [lane.busy_s / plan.prediction.step_s for lane in plan.prediction.lanes]
    assert output.read_text() == f"lane 0: devices 0,1, busy {busy[0]:.3f}\nlane 1: devices 2,3, busy {busy[1]:.3f}\n"


def test_torch_csv_holds_the_compute_actions_of_the_plan(plan_file: Path, pipefit) -> None:
    assert pipefit("export", str(plan_file), "--to", "torch-csv")[0] == 0
    schedule = load_plan(plan_file).to_schedule()
    read = from_csv(plan_file.with_suffix(".csv").read_text())
    compute = [tuple(action for action in lane if action.kind in ("F", "B", "I", "W")) for lane in schedule.lanes]
    assert list(read.lanes) == compute and read.placement == schedule.placement


def test_perfetto_holds_what_simulate_writes(plan_file: Path, pipefit) -> None:
    output, trace = plan_file.with_name("exported.json"), plan_file.with_name("trace.json")
    assert pipefit("export", str(plan_file), "--to", "perfetto", "-o", str(output))[0] == 0
    assert pipefit("simulate", str(plan_file), "--trace", str(trace))[0] == 0
    assert json.loads(output.read_text()) == json.loads(trace.read_text())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "Name the plan to export.\n  where: pipefit export\n  allowed: a plan file or RUN_DIR"),
        (("plan.json", "--to", "torch-cvs"), "No exporter has this name.\n  where: --to\n  seen: 'torch-cvs'"),
        (("plan.json", "--to", "torch-cvs"), "try: did you mean 'torch-csv'?"),
        (("no.json", "--to", "torch-csv"), "There is no such file or directory."),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], text: str, pipefit) -> None:
    code, _, err = pipefit("export", *words)
    assert code == 2 and text in err


def test_a_second_exporter_of_a_name_is_refused() -> None:
    with pytest.raises(PipefitError, match="Two exporters have one name"):
        register_exporter(PlanExporter(name="perfetto", summary="", suffix=".x", write=lambda source: ""))
