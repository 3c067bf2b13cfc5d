"""`pipefit calibrate`: fit factors on data-sheet figures to runs of one's own, for later plans."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from pipefit.cli._options import takes_options

if TYPE_CHECKING:
    from pipefit.cluster.calibration import CalibrationRun, ClusterCalibration


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """Options of `pipefit calibrate`."""

    runs: tuple[str, ...]
    """Runs: folders of `pipefit train`, PLAN.json=LOG with a log of torchtitan or Megatron-LM, or FILE.csv with a run a
    line (model, cluster, fix, batch, sequence, precision, and step_s, tokens_per_s or tokens_per_s_per_device)."""
    output: Path | None = None
    "Write the calibration to this file."
    quiet: bool = False
    "Print no progress on stderr."
    as_json: bool = False
    "Print the calibration as JSON instead of tables."


@takes_options(
    CalibrateOptions,
    arguments=("runs",),
    metavars={"runs": "RUN..."},
    flags={"output": ("--output", "-o")},
)
def command(options: CalibrateOptions) -> None:
    """Fit the speeds of devices and links to measured runs. `plan --calibration FILE` uses them."""
    from pipefit.cli._progress import ProgressLines
    from pipefit.cluster.calibration import save_calibration
    from pipefit.codec import make_folder
    from pipefit.validate.fit import fit_calibration
    from pipefit.validate.user_runs import open_user_runs

    if options.output is not None:
        make_folder(options.output, "calibration")
    with ProgressLines(quiet=options.quiet) as progress:
        calibration = fit_calibration(open_user_runs(options.runs), progress.show_text)
    if options.output is not None:
        save_calibration(calibration, options.output)
    if options.as_json:
        print(json.dumps(asdict(calibration), indent=1))
        return
    _print_calibration(calibration, options.output)


def _print_calibration(calibration: ClusterCalibration, output: Path | None) -> None:
    from pipefit.cli._plans import print_tables
    from pipefit.plan.explain.text import TextTable

    runs = calibration.runs
    columns = ("run", "measured", "data sheet", "calibrated", "run left out")
    rows = [
        (
            run.name,
            f"{run.measured_s:.4g} s",
            *(_time_cell(run, value) for value in (run.data_sheet_s, run.calibrated_s, run.left_out_s)),
        )
        for run in runs
    ]
    if len(runs) > 1:
        rows.append(("mean error", "", *(_mean_cell(runs, field) for field in _FIELDS)))
    factors = tuple((figure.removeprefix("devices."), f"{factor:.3f}") for figure, factor in calibration.factors())
    print_tables(
        [
            TextTable("step times", columns, tuple(rows)),
            TextTable("factors on the data sheets", ("figure", "factor"), factors),
        ]
    )
    if output is not None:
        print(f"\nuse it: pipefit plan ... --calibration {output}")
    if len(runs) == 1:
        print("\nOne run tells no error on others: add runs with other degrees or sizes.")


_FIELDS = ("data_sheet_s", "calibrated_s", "left_out_s")


def _time_cell(run: CalibrationRun, predicted_s: float | None) -> str:
    return "" if predicted_s is None else f"{predicted_s:.4g} s ({predicted_s / run.measured_s - 1:+.1%})"


def _mean_cell(runs: tuple[CalibrationRun, ...], field: str) -> str:
    errors = [abs(value / run.measured_s - 1) for run in runs if (value := getattr(run, field)) is not None]
    return f"{mean(errors):.1%}" if errors else ""
