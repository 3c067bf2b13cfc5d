"""Whether published configurations can be pinned with `--fix`, in 2 s, and whether the free plan is at least as fast.

Every row of `pipefit/validate/data/published_configurations.json` becomes a model, a cluster, a job and the `--fix`
options of its degrees. The pinned plan is made twice; the processor time of the second call counts, because the first
one may compile. Then the free plan of the same request is made, once for all rows that share it. A run passes if every
pinned plan, or its refusal, takes at most 2 s, no pinned step is shorter than the free one by more than 0.5 %, and no
plan fails an assertion. Rows that cannot be expressed are listed with the missing axis; free plans that were not made
are listed as skipped.

    python -m benchmarks.planning.published [--quick] [--only sc21] [--max-devices N] [--json PATH]
"""

from __future__ import annotations

import re
import signal
import tempfile
import time
import traceback
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.harness import Outcome, TextTable, benchmark_parser, earlier_result, run_benchmark
from pipefit.errors import DoesNotFitError, PipefitError
from pipefit.model.graph import Model
from pipefit.model.registry import open_model, resolve_model
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints, parse_constraints
from pipefit.plan.types import Plan
from pipefit.units import format_seconds
from pipefit.validate.published import (
    FLOAT8,
    PublishedFile,
    PublishedRow,
    cluster_of,
    constraint_texts,
    model_source,
    network_of,
    published_step_s,
    read_published,
)

LIMIT_S = 2.0
"""Processor seconds of a pinned plan."""

MARGIN = 0.005
"""A pinned plan beats the free one if its step is shorter by more than this fraction."""

QUICK = ("titan-8b-8", "bridge-qwen3-30b-ep16")
FAMILIES = ("sc21", "selene", "titan", "mpt", "nemo", "bridge")
COLUMNS = (
    ("row", "<26"),
    ("devices", ">8"),
    ("outcome", ">16"),
    ("published", ">11"),
    ("pinned", ">11"),
    ("free", ">11"),
    ("free/pinned", ">12"),
    ("first", ">9"),
    ("second", ">9"),
    ("free CPU", ">10"),
)


class OutOfTimeError(Exception):
    """A plan that needs more processor time than it may have."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """The work that a run may do."""

    pinned_s: float
    free_s: float
    max_devices: int


@dataclass(slots=True)
class PlanMaker:
    """Plans of one run; models and free plans are kept."""

    file: PublishedFile
    limits: RunLimits
    folder: Path
    models: dict[str, Model] = field(default_factory=dict)
    free: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    def open_row_model(self, row: PublishedRow) -> Model:
        """Return the captured model of a row."""
        source = model_source(row, self.file, self.folder)
        if source not in self.models:
            self.models = {source: open_model(source)}  # rows of a model follow each other
        return self.models[source]

    def make_row_plan(self, row: PublishedRow, constraints: Constraints) -> Plan:
        """Return the fastest plan. Raises PlanError."""
        return make_plan(
            self.open_row_model(row), cluster_of(row, self.file), row.job, constraints, tolerance=0.0, name=row.model
        )


def main() -> int:
    parser = benchmark_parser(__doc__, quick="two small rows", only=FAMILIES)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="these rows only; others stay in an earlier result")
    parser.add_argument("--max-devices", type=int, default=64, help="no free plan for more devices than this")
    parser.add_argument("--pinned-limit", type=float, default=120, help="processor seconds of a pinned plan at most")
    parser.add_argument("--free-limit", type=float, default=600, help="processor seconds of a free plan at most")
    return run_benchmark(parser, measure_all)


def approximations(row: PublishedRow, file: PublishedFile) -> tuple[str, ...]:
    """Return the differences between a row and its request."""
    notes = []
    if row.precision not in ("bfloat16", "float16", "float8"):
        notes.append(f"{row.precision} as {'float8' if row.precision in FLOAT8 else 'bfloat16'}")
    if row.hosts > 1 and row.network is None:
        notes.append(f"network of {network_of(row)} a host assumed")
    return tuple(notes)


def measure_all(arguments: Namespace) -> Outcome:
    """Plan all chosen rows."""
    file = read_published()
    chosen = {row.name for row in choose_rows(file, arguments)}
    earlier = {row["row"]: row for row in earlier_result(arguments.json).get("rows", ())}
    limits = RunLimits(arguments.pinned_limit, arguments.free_limit, arguments.max_devices)
    table, results = TextTable(*COLUMNS), []
    table.print_head()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        maker = PlanMaker(file, limits, Path(folder))
        for row in file.rows:
            if row.name in chosen:
                results.append(measure_row(row, maker))
                table.print_row(*table_cells(results[-1]), note=row_note(results[-1]))
            elif row.name in earlier:
                results.append(earlier[row.name])
    verdicts = judge_rows(results)
    print_verdicts(verdicts)
    passed = not any(verdicts[title] for title in ("slow", "faster than free", "crashed"))
    return Outcome({"limit_s": LIMIT_S, "margin": MARGIN, "verdicts": verdicts, "rows": results}, passed)


def choose_rows(file: PublishedFile, arguments: Namespace) -> Sequence[PublishedRow]:
    """Return the rows that the command line asks for."""
    names = QUICK if arguments.quick else arguments.rows
    return [row for row in file.rows if (names is None or row.name in names) and arguments.only in (None, row.family)]


def measure_row(row: PublishedRow, maker: PlanMaker) -> dict[str, Any]:
    """Return the pinned and the free plan of a row, or the axes that it lacks."""
    result: dict[str, Any] = {
        "row": row.name,
        "model": row.model,
        "devices": row.devices,
        "fix": " ".join(constraint_texts(row)),
        "approximations": approximations(row, maker.file),
        "published_s": published_step_s(row, maker.file),
    }
    obstacles = find_obstacles(row, maker)
    if obstacles:
        return {**result, "outcome": "not expressible", "obstacles": obstacles}
    pinned = measure_pinned(row, maker)
    if pinned["outcome"] == "refused":
        return {**result, **pinned, "outcome": "not expressible", "obstacles": {"plan": pinned["error"]}}
    free = measure_free(row, maker)
    ratio = free["free_s"] / pinned["pinned_s"] if free.get("free_s") and pinned.get("pinned_s") else None
    return {**result, **pinned, **free, "ratio": ratio}


def find_obstacles(row: PublishedRow, maker: PlanMaker) -> dict[str, str]:
    """Return the reasons why a row cannot be asked for, by axis: device, model, or a key of `--fix`."""
    checks: dict[str, Callable[[], object]] = {
        "device": lambda: cluster_of(row, maker.file),
        "model": lambda: resolve_model(model_source(row, maker.file, maker.folder)),
    }
    texts = constraint_texts(row)
    for text in texts:
        needed = dict.fromkeys((*texts[:2], text))  # rows of a microbatch need dp, and a sharding needs tp
        checks[text.partition("=")[0]] = partial(parse_constraints, needed, row.batch)
    obstacles = {}
    for axis, check in checks.items():
        try:
            check()
        except PipefitError as error:
            obstacles[axis] = f"{error.what} ({error.seen})"
    return obstacles


def measure_pinned(row: PublishedRow, maker: PlanMaker) -> dict[str, Any]:
    """Return the plan with the degrees of a row, and the seconds of two calls."""
    constraints = parse_constraints(constraint_texts(row), row.batch)
    maker.open_row_model(row)
    first = time_plan(lambda: maker.make_row_plan(row, constraints), maker.limits.pinned_s)
    if first["outcome"] == "out of time":
        second = first
    else:
        second = time_plan(lambda: maker.make_row_plan(row, constraints), maker.limits.pinned_s)
    return {**rename_plan("pinned", second), "first_cpu_s": first["cpu_s"], "first_wall_s": first["wall_s"]}


def measure_free(row: PublishedRow, maker: PlanMaker) -> dict[str, Any]:
    """Return the free plan of a row's request, or why it was not made."""
    if row.devices > maker.limits.max_devices:
        return {"free_outcome": f"skipped: more than {maker.limits.max_devices} devices"}
    if row.request not in maker.free:
        plan = time_plan(lambda: maker.make_row_plan(row, NO_CONSTRAINTS), maker.limits.free_s)
        maker.free[row.request] = rename_plan("free", plan)
    return {("free_outcome" if key == "outcome" else key): value for key, value in maker.free[row.request].items()}


def rename_plan(prefix: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a timed plan with a prefix, but its outcome and its error."""
    plain = ("outcome", "error", "missing")
    return {key if key in plain else f"{prefix}_{key}".replace("_step_s", "_s"): value for key, value in plan.items()}


def time_plan(make: Callable[[], Plan], limit_s: float) -> dict[str, Any]:
    """Return a plan's step and choices, or why there is none, and the seconds that it took."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    try:
        with limit_time(limit_s):
            plan = make()
        assert plan.prediction is not None
        outcome = {"outcome": "planned", "step_s": plan.prediction.step_s, "plan": describe_plan(plan)}
    except OutOfTimeError:
        outcome = {"outcome": "out of time", "error": f"more than {limit_s:g} s of processor time"}
    except DoesNotFitError as error:
        missing = re.search(r"at least (\S+ \S+) are missing", error.what)
        outcome = {"outcome": "does not fit", "missing": missing[1] if missing else "", "error": error.full_text()}
    except PipefitError as error:
        outcome = {"outcome": "refused", "error": error.full_text()}
    except AssertionError as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome = {"outcome": "crashed", "error": f"assertion in {place.name}, line {place.lineno}: {place.line}"}
    return {**outcome, "cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block after this much processor time."""

    def stop_plan(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    previous = signal.signal(signal.SIGVTALRM, stop_plan)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def describe_plan(plan: Plan) -> str:
    """Return the choices of a plan as `--fix` options, without its cuts and devices."""
    return " ".join(f"{key}={value}" for key, value in plan.decisions.items() if key not in ("cuts", "mapping"))


def judge_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the names of the rows that miss a target, that do not fit, or that lack an axis."""
    lacking: dict[str, list[str]] = {}
    for row in rows:
        for axis in row.get("obstacles", ()):
            lacking.setdefault(axis, []).append(row["row"])
    asked = [row for row in rows if row["outcome"] != "not expressible"]
    return {
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "slow": [row["row"] for row in asked if row["pinned_cpu_s"] > LIMIT_S],
        "faster than free": [row["row"] for row in asked if is_beaten(row)],
        "does not fit": [row["row"] for row in asked if row["outcome"] == "does not fit"],
        "crashed": [row["row"] for row in asked if "crashed" in (row["outcome"], row["free_outcome"])],
        "compared": sum(row.get("ratio") is not None for row in asked),
        "not expressible": lacking,
    }


def is_beaten(row: Mapping[str, Any]) -> bool:
    """Return whether a pinned plan is faster than the free one, or fits where no free one does."""
    if row["outcome"] != "planned":
        return False
    ratio = row.get("ratio")
    return bool(row["free_outcome"] == "does not fit" if ratio is None else ratio > 1 / (1 - MARGIN))


def table_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row as cells of the table."""
    steps = (row.get("published_s"), row.get("pinned_s"), row.get("free_s"))
    times = (row.get("first_cpu_s"), row.get("pinned_cpu_s"), row.get("free_cpu_s"))
    ratio = row.get("ratio")
    return (
        row["row"],
        str(row["devices"]),
        row["outcome"],
        *(format_seconds(step) if step else "" for step in steps),
        f"{ratio:.3f}" if ratio else "",
        *(f"{seconds:.2f} s" if seconds is not None else "" for seconds in times),
    )


def row_note(row: Mapping[str, Any]) -> str:
    """Return the missing axes or bytes, and why there is no free plan."""
    notes = [", ".join(row.get("obstacles", ())), row.get("missing", "")]
    if row.get("free_outcome", "planned") != "planned":
        notes.append(f"free: {row['free_outcome']}")
    return "  " + "; ".join(filter(None, notes))


def print_verdicts(verdicts: Mapping[str, Any]) -> None:
    """Print the lists of rows that miss a target."""
    print(", ".join(f"{outcome}: {count}" for outcome, count in verdicts["outcomes"].items()))
    print(f"free plans compared: {verdicts['compared']}")
    for title in ("slow", "faster than free", "does not fit", "crashed"):
        print(f"{title} ({len(verdicts[title])}): {', '.join(verdicts[title])}")
    for axis, names in verdicts["not expressible"].items():
        print(f"lack {axis} ({len(names)}): {', '.join(names)}")


if __name__ == "__main__":
    raise SystemExit(main())
