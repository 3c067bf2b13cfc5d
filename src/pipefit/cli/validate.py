"""`pipefit validate`: predict published runs from data sheets, and print published, predicted and difference."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.cli._options import takes_options

if TYPE_CHECKING:
    from pipefit.cli._progress import ProgressLines
    from pipefit.errors import PipefitError
    from pipefit.validate.report import RunResult
    from pipefit.validate.runs import MeasuredRun, PlannedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions:
    """Options of `pipefit validate`."""

    sets: tuple[str, ...] = ()
    "Only this set of runs; repeatable. An unknown name lists them."
    calibrate: int = 0
    "Also calibrate on this many runs of every group, and predict its others."
    show_all: bool = False
    "Print every run, not the groups alone."
    quiet: bool = False
    "Print no progress on stderr."
    as_json: bool = False
    "Print all runs and groups as JSON."


@takes_options(ValidateOptions, flags={"sets": ("--set",), "show_all": ("--all",)}, metavars={"sets": "NAME"})
def command(options: ValidateOptions) -> None:
    """Predict runs that others published, as `pipefit plan` does: data sheets, with their degrees fixed."""
    from pipefit.cli._progress import ProgressLines
    from pipefit.errors import FormatError
    from pipefit.validate.sets import choose_sets

    names = choose_sets(options.sets)
    if options.calibrate < 0:
        raise FormatError("A number of runs is not negative.", where="--calibrate", seen=options.calibrate)
    with (
        ProgressLines(quiet=options.quiet) as progress,
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        results = _predict_sets(names, options.calibrate, Path(folder), progress)
    if options.as_json:
        from pipefit.validate.report import result_data

        print(json.dumps(result_data(results), indent=1))
        return
    _print_results(names, results, options.show_all)


def _predict_sets(names: tuple[str, ...], calibrate: int, folder: Path, progress: ProgressLines) -> list[RunResult]:
    """Return the results of all runs of the sets."""
    from pipefit.validate.report import calibrate_groups, predict_result
    from pipefit.validate.runs import plan_runs
    from pipefit.validate.sets import published_runs

    def refuse_run(run: MeasuredRun, error: PipefitError) -> None:
        print(f"{run.name} is left out: {error.what}", file=sys.stderr)

    runs = published_runs(names, folder)
    results: list[RunResult] = []
    plans: list[PlannedRun] = []
    for number, (run, planned) in enumerate(plan_runs(runs, refuse_run), 1):
        progress.show_text(f"{run.set}: {run.name}, {number} of {len(runs)} runs")
        results.append(predict_result(run, planned))
        plans.append(planned)
    return calibrate_groups(results, plans, calibrate, progress.show_text) if calibrate else results


def _print_results(names: tuple[str, ...], results: list[RunResult], show_all: bool) -> None:
    """Print the groups of every set, and its runs if they are wanted."""
    from pipefit.cli._plans import print_tables
    from pipefit.plan.explain.text import TextTable
    from pipefit.validate.report import group_cells, result_cells, summarize_groups
    from pipefit.validate.sets import SETS

    tables = []
    for name in names:
        members = [result for result in results if result.set == name]
        fitted = sum(result.is_fitted for result in members)
        note = f"constants of data sheets are fitted to {fitted} of these runs" if fitted else "nothing is fitted"
        groups = summarize_groups(members)
        columns = ("group", "runs", "mean error", "bias", "largest", "rank correlation", "calibrated")
        rows = tuple(group_cells(group, summary) for group, summary in groups.items())
        tables.append(TextTable(f"{name}: {SETS[name]}; {note}", columns, rows))
        if show_all:
            columns = ("run", "published", "predicted", "difference", "calibrated")
            tables.append(TextTable(f"runs of {name}", columns, tuple(map(result_cells, members))))
    print_tables(tables)
    print(
        "\nErrors are of step times. Runs with constants fitted to them: docs/results/validation.md has the errors of"
    )
    print("models that were left out of the fit.")
