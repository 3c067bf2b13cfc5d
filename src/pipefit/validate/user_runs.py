"""A user's own measured runs: run folders of `pipefit train`, logs of other trainers beside a plan, and tables.

| text | run |
| --- | --- |
| `RUN_DIR` | a folder of `pipefit train`: its plan and its step times |
| `PLAN.json=LOG` | a plan, and the log of torchtitan or Megatron-LM that ran with its degrees |
| `FILE.csv` | a run a line: model, cluster, fix, batch, sequence, precision, and a speed |
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

from pipefit.cluster import device_count, open_cluster
from pipefit.cluster.calibration import split_calibration
from pipefit.cluster.types import Cluster
from pipefit.errors import FormatError, PipefitError
from pipefit.plan.check.rules import check_staleness
from pipefit.plan.types import Job, Plan
from pipefit.precision import Precision
from pipefit.show.record import RunRecord, steady_median
from pipefit.show.subject import find_cluster, find_model, open_plan_or_run
from pipefit.validate.runs import MeasuredRun, PlannedRun, plan_runs

SPEEDS = ("step_s", "tokens_per_s", "tokens_per_s_per_device")
"""Columns of a table that give the speed of a run; one of them is needed."""

COLUMNS = ("model", "cluster", "batch", "sequence")
"""Columns that a table must have, beside a speed."""

_TITAN_RATE = re.compile(r"\bstep:\s*\d+\b.*?\btps:\s*([\d,]+(?:\.\d+)?)")
_MEGATRON_TIME = re.compile(r"\biteration\s+\d+/.*?elapsed time per iteration \(ms\):\s*([\d.]+)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def open_user_runs(texts: Sequence[str]) -> list[PlannedRun]:
    """Return the runs that the texts name, with their plans.

    Raises FormatError for a text of another form or a file without step times, StalePlanError for a plan whose cluster
    or model has changed, and PlanError for degrees of a table that cannot be planned.
    """
    runs: list[PlannedRun] = []
    for text in texts:
        plan, separator, log = text.partition("=")
        path = Path(text)
        if separator and not path.exists():
            runs.append(_open_log(Path(plan), Path(log)))
        elif path.suffix.lower() == ".csv":
            runs.extend(_open_table(path))
        elif path.is_dir():
            runs.append(_open_folder(path))
        else:
            raise FormatError(
                "This is not a measured run.",
                where=text,
                allowed="a folder of `pipefit train`, PLAN.json=LOG with the log of torchtitan or Megatron-LM, or a "
                "table FILE.csv",
            )
    return runs


def read_step_times(text: str, plan: Plan, where: str) -> list[float]:
    """Return the step times in seconds of a log of torchtitan, Megatron-LM or `pipefit train`, in its order.

    Rates of tokens are those of one device, as torchtitan prints them. Raises FormatError if the log has none.
    """
    plain = _COLOURS.sub("", text)
    times = [float(value) / 1e3 for value in _MEGATRON_TIME.findall(plain)]
    if not times:
        tokens = plan.job.batch * plan.job.sequence / len(plan.used_devices)
        rates = [float(value.replace(",", "")) for value in _TITAN_RATE.findall(plain)]
        times = [tokens / rate for rate in rates if rate > 0]
    if not times:
        raise FormatError(
            "The log has no step times.",
            where=where,
            allowed="lines with `step: N ... tps: RATE` (torchtitan), or with `iteration N/ M ... elapsed time per "
            "iteration (ms): TIME` (Megatron-LM)",
        )
    return times


def _open_folder(path: Path) -> PlannedRun:
    plan, record = open_plan_or_run(path)
    assert isinstance(record, RunRecord)
    if not record.step_s > 0:
        raise FormatError("The run has no finished step.", where=str(path))
    return _planned_run(plan, path, path.name, record.step_s)


def _open_log(plan_path: Path, log_path: Path) -> PlannedRun:
    plan, _ = open_plan_or_run(plan_path)
    try:
        text = log_path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FormatError("The log cannot be read.", where=str(log_path), seen=error) from None
    times = read_step_times(text, plan, str(log_path))
    return _planned_run(plan, plan_path, log_path.name, steady_median(times))


def _planned_run(plan: Plan, path: Path, name: str, step_s: float) -> PlannedRun:
    """Return a run of a plan on its cluster, without the calibration that it may have been made with."""
    return PlannedRun(
        name=name,
        measured_s=step_s,
        plan=plan,
        model=find_model(plan, ""),
        cluster=_plain_cluster(plan, path),
    )


def _plain_cluster(plan: Plan, path: Path) -> Cluster:
    text, calibration = split_calibration(plan.cluster)
    if calibration is None:
        return find_cluster(plan, path, "")
    check_staleness(plan, cluster=open_cluster(plan.cluster))
    return open_cluster(text)


def _open_table(path: Path) -> Iterator[PlannedRun]:
    """Yield the runs of a table. Raises FormatError for a table without the columns, or with a wrong entry."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = {number: line for number, line in enumerate(file, 1) if not line.startswith("#")}
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError("The table of runs cannot be read.", where=str(path), seen=error) from None
    rows = [
        {str(name).strip(): (value or "").strip() for name, value in row.items() if isinstance(value, str | None)}
        for row in csv.DictReader(lines.values())
    ]
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing or not any(name in rows[0] for name in SPEEDS):
        raise FormatError(
            "A table of runs has a column for each of these, and one for a speed.",
            where=str(path),
            seen=", ".join(rows[0]) if rows else "no rows",
            allowed=f"{', '.join(COLUMNS)}; one of {', '.join(SPEEDS)}; and fix, precision, name if wanted",
        )
    numbers = [*lines][1:]
    runs = [_row_run(row, f"{path}, line {number}") for number, row in zip(numbers, rows, strict=False)]
    yield from (planned for _, planned in plan_runs(runs, _raise_error))


def _raise_error(run: MeasuredRun, error: PipefitError) -> None:
    raise error


def _row_run(row: Mapping[str, str], where: str) -> MeasuredRun:
    cluster = open_cluster(split_calibration(row["cluster"])[0])
    batch, sequence = (int(_positive_number(row, name, where)) for name in ("batch", "sequence"))
    speed = next((name for name in SPEEDS if row.get(name)), "")
    if not speed:
        raise FormatError("The run has no speed.", where=where, allowed=", ".join(SPEEDS))
    value = _positive_number(row, speed, where)
    precision = row.get("precision") or "bfloat16"
    if precision not in get_args(Precision):
        raise FormatError(
            "This is not a precision.", where=where, seen=precision, allowed=", ".join(get_args(Precision))
        )
    job = Job(batch=batch, sequence=sequence, precision=precision)  # type: ignore[arg-type]
    tokens = batch * sequence / (device_count(cluster) if speed == "tokens_per_s_per_device" else 1)
    return MeasuredRun(
        name=row.get("name") or where.rpartition("/")[2],
        model=row["model"],
        source=row["model"],
        cluster=cluster,
        job=job,
        fix=tuple(row.get("fix", "").split()),
        step_s=value if speed == "step_s" else tokens / value,
    )


def _positive_number(row: Mapping[str, str], name: str, where: str) -> float:
    try:
        value = float(row[name].replace(",", ""))
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise FormatError(f"{name} is a number above zero.", where=where, seen=repr(row[name]))
    return value
