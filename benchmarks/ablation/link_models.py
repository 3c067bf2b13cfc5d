"""Which models of unmeasured links win: each is left out in turn, on the clusters of benchmarks/profiling/links.py.

Two uses are measured. A survey on more than 16 hosts chooses rounds by its predictions: a removal may cost rounds, or
error of the link times. On fewer hosts all links are measured, and times are shrunk towards the chosen model. A model
took part if it was chosen, or plausible beside the chosen one, at some time in the survey; without the others the
result is the same, so they are not run.

    python -m benchmarks.ablation.link_models --json benchmarks/results/link_ablation.json [--seconds 300]

Clusters that PATH already holds are not run again; `--seconds` ends a run early, and the next one goes on from there.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.harness import Outcome, TextTable, benchmark_parser, earlier_result, run_benchmark, write_result
from benchmarks.profiling.links import KINDS, Truth, _truth, chosen, judged, tournament
from benchmarks.provenance import provenance
from pipefit.profile import adaptive, completion
from pipefit.profile.completion import CompletionModel
from pipefit.profile.estimate import pair_times, tabulate_samples

Record = dict[str, Any]
MODELS = {
    "hosts": "hosts' effects",
    "end": "slower end",
    "classes": "host classes",
    "classes end": "host classes and slower end",
    "rank 2": "rank 2",
    "rank 4": "rank 4",
    "rank 6": "rank 6",
}
TOLERANCE = 1e-4
"""Smallest change of the mean relative error that counts."""


def senders_and_receivers(count: int, random: np.random.Generator) -> Truth:
    """Every host sends at a rate of its own and receives at another, as in tests/profile/test_estimate.py."""
    factors = np.exp(random.normal(0.0, 0.3, (count, 1)) + random.normal(0.0, 0.3, (1, count)))
    return _truth("senders and receivers", 25e9 * factors, random)


CLUSTERS: tuple[Callable[[int, np.random.Generator], Truth], ...] = (*KINDS, senders_and_receivers)


def model_name(model: CompletionModel) -> str:
    """Return the name of a model."""
    if model.shape.rank:
        return f"rank {model.shape.rank}"
    return " ".join(["classes"] * model.classes + ["end"] * model.shape.bottleneck) or "hosts"


class ModelRecorder:
    """The models that were chosen or plausible in the predictions of one survey."""

    def __init__(self) -> None:
        self.errors: dict[str, float] = {}
        self.used: set[str] = set()
        self.chosen = ""

    def hide_pairs(self, table: Any, model: CompletionModel) -> Any:
        result = HIDE_PAIRS(table, model)
        self.errors[model_name(model)] = completion._mean_error(result[0])
        return result

    def complete_links(self, table: Any) -> Any:
        self.errors = {}
        result = COMPLETE_LINKS(table)
        least = min(self.errors.values())
        order = [name for name in MODELS if name in self.errors]
        self.chosen = next(name for name in order if self.errors[name] <= completion.SIMPLER * least + 1e-3)
        reach = completion.PLAUSIBLE * self.errors[self.chosen] + 1e-3
        self.used |= {name for name, error in self.errors.items() if error <= reach}
        return result


HIDE_PAIRS, COMPLETE_LINKS = completion._hide_pairs, completion.complete_links


def survey(truth: Truth, count: int) -> tuple[Record, ModelRecorder]:
    """Return rounds and errors of one cluster: of the rounds that are chosen, or of a tournament on few hosts."""
    recorder = ModelRecorder()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(completion, "_hide_pairs", recorder.hide_pairs))
        stack.enter_context(mock.patch.object(adaptive, "complete_links", recorder.complete_links))
        if count <= adaptive.ALL_PAIRS_HOSTS:
            samples, rounds = tournament(truth)
            table = tabulate_samples(samples.samples, range(count))
            shape = recorder.complete_links(table.select_size(len(table.sizes_bytes) - 1)).shape
            times = pair_times(samples.samples, range(count), shape=shape)
        else:
            samples, chooser = chosen(truth)
            rounds = chooser.progress.rounds
            times = pair_times(samples.samples, range(count), shape=chooser.progress.host_shape, predict=True)
    return {"rounds": rounds, **judged(truth, times.time_s[-1])}, recorder


def without_models(names: Iterable[str]) -> list[tuple[Any, str, Any]]:
    """Return the patches that drop models."""
    return [
        (completion, field, tuple(model for model in getattr(completion, field) if model_name(model) not in names))
        for field in ("WAYS", "SPACES")
    ]


def ablate(kind: Callable[[int, np.random.Generator], Truth], count: int, seed: int) -> Record:
    """Return the record of one cluster."""
    truth = kind(count, np.random.default_rng(seed))
    since = time.process_time()
    whole, recorder = survey(truth, count)
    record: Record = {
        "cluster": truth.name,
        "hosts": count,
        "seed": seed,
        "chosen": recorder.chosen,
        "hidden_error": recorder.errors,
        "used": sorted(recorder.used),
        **whole,
        "cpu_s": round(time.process_time() - since, 2),
        "without": {},
    }
    removed = {name: (name,) for name in recorder.used}
    if sum(name.startswith("rank") for name in recorder.used) > 1:
        removed["all ranks"] = tuple(name for name in MODELS if name.startswith("rank"))
    for label, names in sorted(removed.items()):
        with ExitStack() as stack:
            for module, field, value in without_models(names):
                stack.enter_context(mock.patch.object(module, field, value))
            if completion.WAYS:
                record["without"][label] = survey(truth, count)[0]
    return record


def summarise(rows: list[Record]) -> dict[str, Record]:
    """Return, by model, how often it was chosen, and what its removal costs."""
    summary = {}
    for name in (*MODELS, "all ranks"):
        pairs = [(row, row["without"][name]) for row in rows if name in row["without"]]
        rounds = [without["rounds"] - row["rounds"] for row, without in pairs]
        errors = [without["mean_error"] - row["mean_error"] for row, without in pairs]
        changes = list(zip(rounds, errors, strict=True))
        summary[name] = {
            "takes_part": len(pairs),
            "chosen": sum(row["chosen"] == name for row in rows),
            "more_rounds_without": sum(more > 0 for more in rounds),
            "worse_without": sum(more > 0 or (more == 0 and error > TOLERANCE) for more, error in changes),
            "better_without": sum(more < 0 or (more == 0 and error < -TOLERANCE) for more, error in changes),
            "rounds": sum(rounds),
            "most_rounds": max(rounds, default=0),
            "mean_error_more": statistics.fmean(errors) if errors else 0.0,
            "largest_error_more": max(errors, default=0.0),
        }
    return summary


SUMMARY = TextTable(
    ("", "<30"), ("part", ">5"), ("chosen", ">7"), ("worse", ">6"), ("better", ">7"), ("rounds", ">7"), ("most", ">6"),
    ("error", ">9"), ("largest", ">9"),
)  # fmt: skip


def print_summary(summary: dict[str, Record]) -> None:
    SUMMARY.print_head()
    for name, row in summary.items():
        SUMMARY.print_row(
            MODELS.get(name, name),
            *(row[key] for key in ("takes_part", "chosen", "worse_without", "better_without")),
            f"{row['rounds']:+}",
            row["most_rounds"],
            f"{row['mean_error_more']:.3%}",
            f"{row['largest_error_more']:.3%}",
        )


def cases() -> Iterator[tuple[Any, int, int]]:
    """Yield (kind, hosts, seed)."""
    for count, seeds in ((32, (0, 1)), (64, (0,)), (8, (0, 1, 2)), (16, (0, 1, 2)), (64, (1,))):
        yield from itertools.product(CLUSTERS, (count,), seeds)


def main() -> int:
    parser = benchmark_parser(__doc__, quick="32 hosts only")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cluster after this time")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Ablate every cluster that the file of `--json` does not hold yet, and write it after each."""
    until, origin = time.monotonic() + arguments.seconds, provenance()
    result: Record = {"provenance": origin, "runs": [], "clusters": [], **earlier_result(arguments.json)}
    result["runs"] = [*result["runs"], origin]
    rows: list[Record] = result["clusters"]
    known = {(row["cluster"], row["hosts"], row["seed"]) for row in rows}
    for kind, count, seed in cases():
        if time.monotonic() > until or (arguments.quick and count != 32):
            break
        if (kind(8, np.random.default_rng(0)).name, count, seed) in known:
            continue
        since = time.process_time()
        rows.append(ablate(kind, count, seed))
        last = rows[-1]
        spent_s = time.process_time() - since
        print(f"  {spent_s:6.1f} s  {count:>3} {last['cluster']:<24} {last['chosen']:<12} {last['used']}", flush=True)
        result["summary"] = summarise(rows)
        write_result(arguments.json, result)
    print_summary(summarise(rows))
    return Outcome()


if __name__ == "__main__":
    sys.exit(main())
