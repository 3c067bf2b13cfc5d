"""Step times of published runs, predicted from data sheets with the published degrees.

python -m benchmarks.predictions.published_steps --json benchmarks/results/published_steps.json    some minutes
python -m benchmarks.predictions.published_steps --fit --json ...    also fits the constants, each model left out once
python -m benchmarks.predictions.published_steps --quick             eight rows

A prediction is that of `pipefit plan` on the short form of a cluster, with all degrees pinned. Nothing is measured.
Five constants of `pipefit/cluster/kinds.py` are fitted to the rows marked as fitted; `--fit` does this again, with the
rows of each model left out in turn, and predicts these rows by the others' constants. Devices get three times their
memory, since the time of every run counts, also of those that are predicted not to fit.

Rows: the runs of `published_configurations.json` in 16 bits with a step time, on at most 512 devices, and
`llm_foundry_fsdp.csv`. Hosts of the latter are assumed to have the networks of `FOUNDRY_NETWORK`.
"""

from __future__ import annotations

import csv
import math
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness import Outcome, TextTable, benchmark_parser, run_benchmark
from benchmarks.planning.published_rows import (
    PublishedModel,
    cluster_of,
    constraint_texts,
    model_source,
    published_step_s,
    read_published,
    write_model,
)
from pipefit.cluster import parse_spec
from pipefit.cluster.catalogue import find_sheet
from pipefit.cluster.kinds import ATTENTION_SHARE, BANDWIDTH_SHARE, OVERLAP, PRODUCT_TRAFFIC
from pipefit.cluster.types import Cluster, DeviceKind
from pipefit.errors import PipefitError
from pipefit.model.graph import Model
from pipefit.model.registry import open_model
from pipefit.plan.assemble.predict import add_prediction, simulate_plan
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.types import Job, Plan

FOUNDRY = Path(__file__).resolve().parents[1] / "data" / "llm_foundry_fsdp.csv"
FOUNDRY_DEVICES = {"a100_40gb": "A100-40", "a100_80gb": "A100-80", "h100_80gb": "H100"}
FOUNDRY_NETWORK = {"A100-40": "1600Gbit/s", "A100-80": "800Gbit/s", "H100": "3200Gbit/s"}
FOUNDRY_SIZES = {"760m": (24, 1536, 12), "3b": (32, 2560, 20), "13b": (40, 5120, 40), "70b": (80, 8192, 64)}
"""Layers, hidden size and heads of the MPT models of the table."""

MOST_DEVICES = 512
FITTED = ("foundry", "titan", "selene-22b", "selene-175b")
"""Beginnings of the names of rows that the constants are fitted to."""

QUICK = ("selene-22b-selective", "titan-8b-8", "foundry-13b", "foundry-760m")
QUICK_ROWS = 8

COLUMNS = (("row", "<34"), ("model", "<14"), ("published", ">11"), ("predicted", ">11"), ("error", ">8"))


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


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One published run."""

    name: str
    group: str
    "Publication and device."
    model: str
    source: str
    "The name or file of the model."
    cluster: Cluster
    job: Job
    fix: tuple[str, ...]
    step_s: float

    @property
    def is_fitted(self) -> bool:
        """Return whether constants are fitted to this row."""
        return self.name.startswith(FITTED)


@dataclass(slots=True)
class PlannedRow:
    """A run and the plan with its degrees."""

    row: MeasuredRow
    plan: Plan
    model: Model

    def predicted_s(self, constants: KernelConstants | None = None) -> float:
        """Return the predicted step time; with other constants, that of the same plan."""
        if constants is None:
            assert self.plan.prediction is not None
            return self.plan.prediction.step_s
        kinds = {name: constants.change_kind(kind) for name, kind in self.row.cluster.kinds.items()}
        cluster = replace(self.row.cluster, kinds=kinds)
        predicted = add_prediction(self.plan, self.model, simulate_plan(self.plan, self.model, cluster))
        assert predicted.prediction is not None
        return predicted.prediction.step_s


def main() -> int:
    parser = benchmark_parser(__doc__, quick="eight rows")
    parser.add_argument("--fit", action="store_true", help="fit the constants, with each model left out once")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Predict all rows."""
    table = TextTable(*COLUMNS)
    table.print_head()
    planned, results = [], []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in plan_rows(choose_rows(Path(folder), arguments.quick)):
            planned.append(entry)
            results.append(row_result(entry, entry.predicted_s()))
            table.print_row(*table_cells(results[-1]))
        left_out = fit_without_each(planned) if arguments.fit else None
    groups = summarize_groups(results)
    for name, group in groups.items():
        print(f"{name}: mean error {group['mean_error']:.1%} of {group['rows']} rows")
    return Outcome({"groups": groups, "left_out": left_out, "fitted": FITTED, "rows": results})


def choose_rows(folder: Path, quick: bool) -> Iterator[MeasuredRow]:
    """Return the rows, those of a model one after the other."""
    rows = sorted((*configuration_rows(folder), *foundry_rows(folder)), key=lambda row: (row.group, row.source))
    if not quick:
        yield from rows
        return
    for prefix in QUICK:
        yield from [row for row in rows if row.name.startswith(prefix)][: QUICK_ROWS // len(QUICK)]


def configuration_rows(folder: Path) -> Iterator[MeasuredRow]:
    """Return the runs of the file of published configurations."""
    file = read_published()
    for row in file.rows:
        step_s = published_step_s(row, file)
        if not step_s or row.precision not in ("bfloat16", "float16") or row.family == "mpt":
            continue
        if row.devices > MOST_DEVICES or "zero3" in row.name:
            continue
        try:
            source, cluster = model_source(row, file, folder), cluster_of(row, file)
            parse_constraints(constraint_texts(row), row.batch)
        except PipefitError:
            continue
        device = next(iter(cluster.kinds))
        yield MeasuredRow(
            row.name, f"{row.family} {device}", row.model, source, cluster, row.job, constraint_texts(row), step_s
        )


def foundry_rows(folder: Path) -> Iterator[MeasuredRow]:
    """Return the runs of llm-foundry: MPT models under FSDP."""
    with FOUNDRY.open(encoding="utf-8") as lines:
        entries = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    for number, entry in enumerate(entries):
        devices, sequence, rows = int(entry["gpus"]), int(entry["seq"]), int(entry["mbs"])
        device = FOUNDRY_DEVICES[entry["gpu"]]
        layers, hidden, heads = FOUNDRY_SIZES[entry["model"]]
        sizes = PublishedModel(
            source="foundry", architecture="gpt", layers=layers, hidden=hidden, heads=heads, vocabulary=50368
        )
        batch = rows * int(entry["accum"]) * devices
        fix = (
            *(f"dp={devices}", "tp=1", "cp=1", "pp=1", f"mbs={rows}"),
            f"zero={2 if entry['sharding'] == 'SHARD_GRAD_OP' else 3}",
            f"recompute={'full' if entry['recompute'] == 'True' else 'none'}",
        )
        spec = f"8x{device}" if devices == 8 else f"{devices // 8}x8x{device}:{FOUNDRY_NETWORK[device]}"
        yield MeasuredRow(
            f"foundry-{entry['model']}-{devices}-{sequence}-{number}",
            f"foundry {device}",
            f"mpt-{entry['model']}",
            write_model(f"mpt-{entry['model']}", sizes, sequence, folder),
            parse_spec(spec),
            Job(batch=batch, sequence=sequence, precision="bfloat16"),
            fix,
            batch * sequence / (float(entry["tokens_s_gpu"]) * devices),
        )


def plan_rows(rows: Iterable[MeasuredRow]) -> Iterator[PlannedRow]:
    """Return the plans of rows; a row that cannot be planned is left out, with a message."""
    models: dict[str, Model] = {}
    for row in rows:
        try:
            if row.source not in models:
                models = {row.source: open_model(row.source)}
            kinds = {
                name: replace(kind, memory_bytes=3 * kind.memory_bytes) for name, kind in row.cluster.kinds.items()
            }
            constraints = parse_constraints(row.fix, row.job.batch)
            cluster = replace(row.cluster, kinds=kinds)
            plan = make_plan(models[row.source], cluster, row.job, constraints, tolerance=0.0, name=row.model)
        except PipefitError as error:
            print(f"{row.name}: {error.what}", file=sys.stderr)
            continue
        yield PlannedRow(replace(row, cluster=cluster), plan, models[row.source])


def row_result(entry: PlannedRow, predicted_s: float) -> dict[str, Any]:
    """Return the figures of a row."""
    row = entry.row
    return {
        "row": row.name,
        "group": row.group,
        "model": row.model,
        "fitted": row.is_fitted,
        "published_s": round(row.step_s, 4),
        "predicted_s": round(predicted_s, 4),
        "error": round(predicted_s / row.step_s - 1, 4),
    }


def table_cells(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row of the printed table."""
    seconds = (f"{result[key]:.3f} s" for key in ("published_s", "predicted_s"))
    return (result["row"], result["model"], *seconds, f"{result['error']:+.0%}")


def summarize_groups(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the mean absolute error of every group."""
    groups = {}
    for name in dict.fromkeys(result["group"] for result in results):
        errors = [abs(result["error"]) for result in results if result["group"] == name]
        groups[name] = {"rows": len(errors), "mean_error": round(mean(errors), 4), "largest_error": max(errors)}
    return groups


def fit_without_each(planned: Sequence[PlannedRow]) -> dict[str, Any]:
    """Return the constants fitted to all fitted rows, and every model's error by constants fitted without it."""
    fitted = [entry for entry in planned if entry.row.is_fitted]
    everything = fit_constants(fitted)
    print("fitted:", everything)
    models = {}
    for model in dict.fromkeys(entry.row.model for entry in fitted):
        constants = fit_constants([entry for entry in fitted if entry.row.model != model], everything)
        errors = [
            abs(entry.predicted_s(constants) / entry.row.step_s - 1) for entry in fitted if entry.row.model == model
        ]
        models[model] = {"rows": len(errors), "mean_error": round(mean(errors), 4)}
        print(f"without {model}: mean error {mean(errors):.1%} of {len(errors)} rows", flush=True)
    return {"constants": {name: round(getattr(everything, name), 4) for name in FIELDS}, "models": models}


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


def fit_constants(entries: Sequence[PlannedRow], start: KernelConstants = START) -> KernelConstants:
    """Return the constants with the least error of the logarithms of step times, outliers counting less."""
    import numpy as np
    from scipy.optimize import least_squares

    names = FIELDS[1:]

    def constants_of(logarithms: Sequence[float]) -> KernelConstants:
        return KernelConstants(START.product_traffic, *(min(1.0, math.exp(value)) for value in logarithms))

    def errors_of(logarithms: Sequence[float]) -> Any:
        constants = constants_of(logarithms)
        return np.array([math.log(entry.predicted_s(constants) / entry.row.step_s) for entry in entries])

    begin = [math.log(getattr(start, name)) for name in names]
    solution = least_squares(errors_of, begin, loss="soft_l1", f_scale=0.1, diff_step=0.02)
    return constants_of(solution.x)


if __name__ == "__main__":
    sys.exit(main())
