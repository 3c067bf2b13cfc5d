"""Which constructions of `fit` win: each is left out in turn, on the problems of benchmarks, plans and tests.

For every problem the search runs once as it is. The result names the constructions from which the best schedule was
improved, the best start of each construction, and their shares of the CPU time. Then each construction that took part
is removed and the search runs again: the loss is the increase of the schedule's time. A construction took part if one
of its starts was annealed or tuned; without the others the result is the same, so they are not run.

    python -m benchmarks.ablation.fit_constructions --json benchmarks/results/fit_ablation.json
        [--only GROUP] [--seconds 300]

Problems that PATH already holds are not run again; `--seconds` ends a run early, and the next one goes on from there.
"""

from __future__ import annotations

import itertools
import os
import pickle
import statistics
import sys
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.ablation.fit_instances import GROUPS, FitCase
from benchmarks.harness import Outcome, TextTable, benchmark_parser, earlier_result, run_benchmark, write_result
from benchmarks.provenance import provenance
from pipefit.errors import ScheduleError
from pipefit.schedule import FAMILIES
from pipefit.schedule.fit import search
from pipefit.schedule.fit.fit_budget import FIT_BUDGET
from pipefit.schedule.fit.instance import B, F, FitInstance, I, W
from pipefit.schedule.fit.local import improve
from pipefit.schedule.fit.starts import construct

Record = dict[str, Any]
Patch = tuple[Any, str, Any]
"""(module, name, replacement)."""

SUFFIXES = ("exact", "tuned", "extended")
MERGES = ("split", "merged", "merged where quicker", "merged where memory is short")
"""Choices of the stages whose backwards run as B, in the order of `construct.merge_choices`."""


def constructions_of(name: str) -> set[str]:
    """Return the constructions that a start's name contains."""
    parts, labels = name.split(", "), set()
    while parts[-1] in SUFFIXES:
        labels.add(parts.pop())
    base = ", ".join(parts)
    if base.startswith(("block ", "pattern ")):
        return labels | {base.partition(" ")[0] + "s"}
    family, wished, _ = base.partition(" in memory")
    if family in FAMILIES:
        return labels | {f"family {family}", "families in memory" if wished else "families unchanged"}
    return labels | {base}


def with_budget(module: ModuleType, **fields: int) -> list[Patch]:
    """Return the patch that gives a module of the search a budget with these fields."""
    return [(module, "FIT_BUDGET", replace(FIT_BUDGET, **fields))]


def without_starts(label: str) -> list[Patch]:
    """Return the patch that drops the starts of a family, or the families' starts of one kind."""
    original = construct.family_starts

    def remaining(*arguments: Any) -> Iterator[Any]:
        return (start for start in original(*arguments) if label not in constructions_of(start.name))

    return [(construct, "family_starts", remaining)]


def without_merge(label: str) -> list[Patch]:
    """Return the patches that drop one choice of merged stages."""

    def remaining(instance: FitInstance) -> list[Any]:
        choices = merge_formulas(instance)
        kept = [choice.tobytes() for name, choice in choices.items() if name != label]
        return [np.frombuffer(packed, dtype=np.bool_).copy() for packed in dict.fromkeys(kept)]

    return [(module, "merge_choices", remaining) for module in (construct, search)]


def merge_formulas(instance: FitInstance) -> dict[str, Any]:
    """Return the choices of merged stages by name, as `construct.merge_choices` computes them, with duplicates."""
    split, merged = ~instance.may_split, instance.may_merge.copy()
    time_s, held = instance.time_s, instance.held_bytes
    is_open = instance.open_stages()
    quicker = is_open & (time_s[B].sum(axis=1) < (time_s[I] + time_s[W]).sum(axis=1) * (1 - 1e-9))
    grown = np.maximum(held[F], held[F] + held[I]).sum(axis=1) + instance.passing_bytes.max(axis=(0, 2))
    needs = np.bincount(instance.placement, weights=grown, minlength=instance.lanes)
    short = is_open & (needs > instance.limit_bytes)[instance.placement]
    return dict(zip(MERGES, (split, merged, split | quicker, split | short), strict=True))


def open_merges(instance: FitInstance) -> set[str]:
    """Return the choices of merged stages that differ from all others on an instance, but for the first."""
    packed = {name: choice.tobytes() for name, choice in merge_formulas(instance).items()}
    return {name for name in MERGES[1:] if list(packed.values()).count(packed[name]) == 1}


REMOVALS: Mapping[str, Callable[[], list[Patch]]] = {
    "families unchanged": lambda: without_starts("families unchanged"),
    "families in memory": lambda: without_starts("families in memory"),
    "blocks": lambda: [(module, "block_starts", lambda *_: iter(())) for module in (construct, search)],
    "patterns": lambda: [(construct, "pattern_starts", lambda *_: [])],
    "extended": lambda: with_budget(search, short_searches=0),
    "steady state": lambda: [(search, "steady_starts", lambda *_: [])],
    "tuned": lambda: [(search, "tune_offsets", lambda *_: None)],
    **{name: (lambda name=name: without_merge(name)) for name in MERGES[1:]},  # type: ignore[misc]
    **{f"family {name}": (lambda name=name: without_starts(f"family {name}")) for name in FAMILIES},  # type: ignore[misc]
    "race of starts": lambda: with_budget(improve, racers=1),
    "shifts of a run": lambda: with_budget(improve, shift_percent=85, run_shift_percent=0),
    "waves": lambda: with_budget(improve, run_shift_percent=30),
    "shifts on the critical path": lambda: with_budget(improve, critical_percent=0),
    "switches between B and I with W": lambda: [(improve, "toggle_percent", lambda instance: 0)],
    "merging of neighbours": lambda: [(search, "merge_neighbours", lambda instance, t, loops, start: start)],
    "pieces in the memory held": lambda: [(search, "_bytes_held", lambda fit, safe: fit.instance.limit_bytes)],
}
"""By construction: the patches that remove it."""
LOCAL = ("race of starts", "shifts of a run", "waves", "shifts on the critical path")

TIMED = (
    (construct, "family_starts", "families"),
    (construct, "block_starts", "blocks"),
    (construct, "pattern_starts", "patterns"),
    (search, "extend_starts", "extended"),
    (search, "steady_starts", "steady state"),
    (search, "tune_offsets", "tuned"),
    (search, "improve_orders", "local search"),
    (search, "merge_neighbours", "merging of neighbours"),
)


class StartRecorder:
    """What happens in one search: the starts that take part, and the CPU time of every construction."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.best_s: dict[str, float] = {}
        self.cpu_s: dict[str, float] = defaultdict(float)
        self.open: set[str] = set()
        self.repairs = 0

    def patches(self) -> Iterator[Patch]:
        for module, name, label in TIMED:
            yield module, name, self._timed(getattr(module, name), label)
        original = search._improve_safely

        def repaired(*arguments: Any) -> Any:
            self.repairs += 1
            return original(*arguments)

        yield search, "_improve_safely", repaired

    def _timed(self, original: Callable[..., Any], label: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self._look(label, arguments)
            since = time.process_time()
            result = original(*arguments)
            result = list(result) if isinstance(result, Iterator) else result
            self.cpu_s[label] += time.process_time() - since
            return result

        return run

    def _look(self, label: str, arguments: tuple[Any, ...]) -> None:
        if label == "tuned":
            self.used |= constructions_of(arguments[3].name)
        if label == "local search":
            self.open |= open_merges(arguments[0])
            for start in arguments[3][: FIT_BUDGET.racers]:
                self.used |= constructions_of(start.name)
            self.best_s = {}
            for start in arguments[3]:
                for construction in constructions_of(start.name):
                    self.best_s.setdefault(construction, start.time_s)


class StartCache:
    """Starts of equal instances are built once for all removals."""

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, ...], Any] = {}

    def patches(self) -> Iterator[Patch]:
        for module, name in ((construct, "block_starts"), (construct, "pattern_starts"), (construct, "family_starts")):
            yield module, name, self._cached(getattr(module, name), name)

    def _cached(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(instance: FitInstance, *rest: Any) -> Any:
            plain = [entry.tobytes() for entry in rest if isinstance(entry, np.ndarray)]
            key = (name, pickle.dumps(instance), *plain)
            if key not in self.kept:
                self.kept[key] = list(original(instance, *rest))
            return list(self.kept[key]) if name == "pattern_starts" else iter(self.kept[key])

        return run


def run_fit(case: FitCase, patches: Iterable[Patch]) -> Any:
    """Return the result of a search with these patches; None if it finds no schedule."""
    with ExitStack() as stack:
        for module, name, value in patches:
            stack.enter_context(mock.patch.object(module, name, value))
        try:
            return search.fit_schedule(case.problem, **case.options)
        except ScheduleError:
            return None


def ablate(case: FitCase) -> Record | None:
    """Return the record of one problem; None if no schedule fits."""
    recorder, since = StartRecorder(), time.process_time()
    whole = run_fit(case, recorder.patches())
    if whole is None:
        return None
    cpu_s = time.process_time() - since
    takes_part = recorder.used | recorder.open | ({*LOCAL} if whole.moves else set())
    if case.options.get("options"):
        takes_part |= {"blocks"}
    if recorder.open or "B" in getattr(case.problem.costs, "actions", {}):
        takes_part |= {"merging of neighbours", "switches between B and I with W"}
    if recorder.repairs:
        takes_part |= {*recorder.best_s, "pieces in the memory held"}
    cache, without = StartCache(), {}
    with ExitStack() as stack:
        for module, name, value in cache.patches():
            stack.enter_context(mock.patch.object(module, name, value))
        for label in REMOVALS:
            if label in takes_part:
                rest = run_fit(case, REMOVALS[label]())
                without[label] = None if rest is None else rest.time_s / whole.time_s - 1
    fastest = min(recorder.best_s.values(), default=whole.time_s)
    return {
        "name": case.name,
        "moves": whole.moves,
        "winner": whole.how,
        "above_bound": whole.time_s / whole.bound_s - 1,
        "starts": {label: time_s / fastest - 1 for label, time_s in sorted(recorder.best_s.items())},
        "loss_without": without,
        "cpu_s": {"all": cpu_s, **recorder.cpu_s},
    }


def summarise(rows: list[Record]) -> dict[str, Record]:
    """Return, by construction, how often it won, how often its removal loses or gains, and its share of the time."""
    won: Counter[str] = Counter(label for row in rows for label in constructions_of(row["winner"]))
    total = sum(row["cpu_s"]["all"] for row in rows)
    summary = {}
    for label in REMOVALS:
        losses = [row["loss_without"].get(label, 0.0) for row in rows]
        known = [loss for loss in losses if loss is not None]
        lost = [loss for loss in known if loss > 1e-9]
        others = [min((t for name, t in row["starts"].items() if name != label), default=1.0) for row in rows]
        seconds = sum(row["cpu_s"].get(label, 0.0) for row in rows)
        summary[label] = {
            "takes_part": sum(label in row["loss_without"] for row in rows),
            "won": won[label],
            "best_start_alone": sum(
                row["starts"].get(label, 1.0) < other - 1e-9 for row, other in zip(rows, others, strict=True)
            ),
            "loses_without": len(lost) + losses.count(None),
            "gains_without": sum(loss < -1e-9 for loss in known),
            "mean_loss": statistics.fmean(known) if known else 0.0,
            "largest_loss": max(known, default=0.0),
            "share_of_cpu": seconds / total if seconds else None,
        }
    return summary


SUMMARY = TextTable(
    ("", "<34"), ("part", ">5"), ("won", ">5"), ("alone", ">6"), ("loses", ">6"), ("gains", ">6"), ("mean", ">9"),
    ("largest", ">9"), ("CPU", ">6"),
)  # fmt: skip


def print_summary(summary: Mapping[str, Record]) -> None:
    SUMMARY.print_head()
    for label, row in summary.items():
        SUMMARY.print_row(
            label,
            *(row[key] for key in ("takes_part", "won", "best_start_alone", "loses_without", "gains_without")),
            f"{row['mean_loss']:.3%}",
            f"{row['largest_loss']:.2%}",
            "" if row["share_of_cpu"] is None else f"{row['share_of_cpu']:.0%}",
        )


def main() -> int:
    parser = benchmark_parser(__doc__, quick="three problems of every group")
    parser.add_argument("--only", action="append", choices=list(GROUPS), help="only this group; repeatable")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no problem after this time")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Ablate every problem that the file of `--json` does not hold yet, and write it after each."""
    until, origin = time.monotonic() + arguments.seconds, provenance()
    result: Record = {"provenance": origin, "runs": [], "problems": {}, **earlier_result(arguments.json)}
    result["runs"] = [*result["runs"], origin]
    groups: dict[str, list[Record]] = result["problems"]
    search.fit_schedule(next(GROUPS["merging"]()).problem, moves=200)
    names = arguments.only or [*GROUPS]
    known = {(name, row["name"]) for name in names for row in groups.get(name, [])}
    cases = itertools.zip_longest(*(((name, case) for case in GROUPS[name]()) for name in names))
    for name, case in filter(
        None, itertools.chain.from_iterable(itertools.islice(cases, 3 if arguments.quick else None))
    ):
        if time.monotonic() > until:
            break
        if (name, case.name) in known:
            continue
        since = time.process_time()
        record = ablate(case)
        if record is None:
            continue
        groups.setdefault(name, []).append(record)
        print(f"  {time.process_time() - since:6.1f} s  {case.name}: {record['winner']}", flush=True)
        result["summary"] = summarise([row for rows in groups.values() for row in rows])
        write_result(arguments.json, result)
    print_summary(summarise([row for rows in groups.values() for row in rows]))
    return Outcome()


if __name__ == "__main__":
    sys.exit(main())
