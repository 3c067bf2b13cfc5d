"""Step times of published runs, predicted as `pipefit validate` does, and the fit of the constants of data sheets.

python -m benchmarks.predictions.published_steps --json benchmarks/results/published_steps.json    some minutes
python -m benchmarks.predictions.published_steps --fit --json ...    also fits the constants, each model left out once
python -m benchmarks.predictions.published_steps --quick             eight runs

Five constants of `pipefit/cluster/kinds.py` are fitted to the runs marked as fitted; `--fit` does this again, with the
runs of each model left out in turn, and predicts these runs by the others' constants. Every group is also calibrated on
three of its runs, as `pipefit calibrate` does, and the others are predicted with it.
"""

from __future__ import annotations

import math
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness import Outcome, TextTable, benchmark_parser, run_benchmark
from pipefit.cluster.catalogue import find_sheet
from pipefit.cluster.kinds import ATTENTION_SHARE, BANDWIDTH_SHARE, OVERLAP, PRODUCT_TRAFFIC
from pipefit.cluster.types import Cluster, DeviceKind
from pipefit.errors import PipefitError
from pipefit.validate.report import RunResult, calibrate_groups, predict_result, result_cells, summarize_groups
from pipefit.validate.runs import MeasuredRun, PlannedRun, plan_runs
from pipefit.validate.sets import FITTED, SETS, published_runs

QUICK = ("selene-22b-selective", "titan-8b-8", "foundry-13b", "foundry-760m")
QUICK_ROWS = 8
CALIBRATED_ON = 3
"""Runs of a group that it is calibrated on."""

COLUMNS = (("run", "<34"), ("published", ">11"), ("predicted", ">11"), ("error", ">8"), ("calibrated", ">11"))


@dataclass(frozen=True, slots=True)
class KernelConstants:
    """The fitted constants of `pipefit/cluster/kinds.py`."""

    product_traffic: float
    bandwidth_share: float
    attention_share: float
    hopper_attention_share: float
    overlap: float

    def change_kind(self, kind: DeviceKind) -> DeviceKind:
        """Return a kind with these constants."""
        hopper = kind.name.startswith("H")
        return replace(
            kind,
            product_traffic=self.product_traffic,
            bandwidth_efficiency=self.bandwidth_share,
            attention_efficiency=self.hopper_attention_share if hopper else self.attention_share,
            overlap=self.overlap,
        )

    def change_cluster(self, cluster: Cluster) -> Cluster:
        """Return a cluster with these constants."""
        return replace(cluster, kinds={name: self.change_kind(kind) for name, kind in cluster.kinds.items()})


def main() -> int:
    parser = benchmark_parser(__doc__, quick="eight runs")
    parser.add_argument("--fit", action="store_true", help="fit the constants, with each model left out once")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Predict all runs."""
    table = TextTable(*COLUMNS)
    table.print_head()
    planned: list[tuple[MeasuredRun, PlannedRun]] = []
    results: list[RunResult] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = published_runs(SETS, Path(folder))
        for run, entry in plan_runs(choose_quick(runs) if arguments.quick else runs, report_refusal):
            planned.append((run, entry))
            results.append(predict_result(run, entry))
            table.print_row(*result_cells(results[-1]))
        results = calibrate_groups(results, [entry for _, entry in planned], CALIBRATED_ON, lambda text: None)
        left_out = fit_without_each(planned) if arguments.fit else None
    groups = summarize_groups(results)
    for name, group in groups.items():
        more = "" if group.calibrated_error is None else f"; calibrated {group.calibrated_error:.1%} of the others"
        print(f"{name}: mean error {group.mean_error:.1%} of {group.runs} runs{more}")
    return Outcome(
        {
            "groups": {name: rounded_data(asdict(group)) for name, group in groups.items()},
            "left_out": left_out,
            "fitted": FITTED,
            "rows": [row_data(result) for result in results],
        }
    )


def report_refusal(run: MeasuredRun, error: PipefitError) -> None:
    """Name a run that cannot be planned."""
    print(f"{run.name}: {error.what}", file=sys.stderr)


def choose_quick(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Return the runs of a quick benchmark."""
    count = QUICK_ROWS // len(QUICK)
    return [run for prefix in QUICK for run in [run for run in runs if run.name.startswith(prefix)][:count]]


def rounded_data(data: dict[str, Any]) -> dict[str, Any]:
    """Return data with four decimals."""
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in data.items()}


def row_data(result: RunResult) -> dict[str, Any]:
    """Return the figures of a run."""
    return rounded_data(
        {
            "row": result.name,
            "set": result.set,
            "group": result.group,
            "model": result.model,
            "fitted": result.is_fitted,
            "published_s": result.published_s,
            "predicted_s": result.predicted_s,
            "error": result.error,
            "calibrated_error": result.calibrated_error,
        }
    )


def fit_without_each(planned: Sequence[tuple[MeasuredRun, PlannedRun]]) -> dict[str, Any]:
    """Return the constants fitted to all fitted runs, and every model's error by constants fitted without it."""
    fitted = [(run.model, entry) for run, entry in planned if run.is_fitted]
    everything = fit_constants([entry for _, entry in fitted])
    print("fitted:", everything)
    models = {}
    for model in dict.fromkeys(name for name, _ in fitted):
        constants = fit_constants([entry for name, entry in fitted if name != model], everything)
        errors = [abs(relative_error(entry, constants)) for name, entry in fitted if name == model]
        models[model] = {"rows": len(errors), "mean_error": round(mean(errors), 4)}
        print(f"without {model}: mean error {mean(errors):.1%} of {len(errors)} runs", flush=True)
    return {"constants": {name: round(getattr(everything, name), 4) for name in FIELDS}, "models": models}


def relative_error(entry: PlannedRun, constants: KernelConstants) -> float:
    """Return the relative error of a run predicted with other constants."""
    return entry.predict_step(constants.change_cluster) / entry.measured_s - 1


FIELDS = tuple(field.name for field in fields(KernelConstants))
START = KernelConstants(
    product_traffic=PRODUCT_TRAFFIC,
    bandwidth_share=BANDWIDTH_SHARE,
    attention_share=ATTENTION_SHARE,
    hopper_attention_share=find_sheet("H100").attention_share or 0.0,
    overlap=OVERLAP,
)
"""The constants of today. The rows determine the traffic of products and the bandwidth of other operators only
together: the traffic is set."""


def fit_constants(entries: Iterable[PlannedRun], start: KernelConstants = START) -> KernelConstants:
    """Return the constants with the least error of the logarithms of step times, outliers counting less."""
    import numpy as np
    from scipy.optimize import least_squares

    names, entries = FIELDS[1:], [*entries]

    def constants_of(logarithms: Sequence[float]) -> KernelConstants:
        return KernelConstants(START.product_traffic, *(min(1.0, math.exp(value)) for value in logarithms))

    def errors_of(logarithms: Sequence[float]) -> Any:
        constants = constants_of(logarithms)
        return np.array([math.log1p(relative_error(entry, constants)) for entry in entries])

    begin = [math.log(getattr(start, name)) for name in names]
    solution = least_squares(errors_of, begin, loss="soft_l1", f_scale=0.1, diff_step=0.02)
    return constants_of(solution.x)


if __name__ == "__main__":
    sys.exit(main())
