"""How many rounds of pairs does it take to know the links of a cluster, and how good are they then?

Simulated clusters of 16, 64 and 256 hosts, measured with noise and with rounds that are slow as a whole: the full
tournament with the mean of its repetitions, the same with noise and order told from the links, and the rounds that
`pipefit profile` chooses. With --lab: `pipefit profile --only links` in the lab, against the links that it was given.

    python -m benchmarks.profiling.links --json benchmarks/results/link_measurement.json
    python -m benchmarks.profiling.links --lab --json benchmarks/results/link_measurement_lab.json [--hosts 8]
        [--kind racks --host-rounds 8 | --kind mild]
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Outcome, benchmark_parser, earlier_result, run_benchmark
from benchmarks.provenance import provenance
from pipefit.profile.adaptive import AdaptiveSurvey
from pipefit.profile.completion import complete_links
from pipefit.profile.config import TINY
from pipefit.profile.estimate import PairTimes, pair_times, tabulate_samples
from pipefit.profile.links import LinkSurvey, RoundOutcome, survey_pairs
from pipefit.profile.tournament import HostPair, shuffle_members, shuffle_rounds

DATA = Path(__file__).parents[1] / "data"
HOSTS = (16, 64, 256)
LAB_HOSTS = (4, 8, 16)
SIZE = 2**24
LATENCY_S = 1e-5
REPEATS = 2
NOISE, ORDER = 0.02, 0.02
"""Standard deviations (of logarithms) of one measurement, and of the rounds as a whole."""

OWN = 0.02
"""Every link's own deviation from what its cluster says, except in the uniform one."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Truth:
    """A cluster: bytes/s from host to host, and the same without the links' own deviations."""

    name: str
    bandwidth: Matrix
    nominal: Matrix


def uniform(count: int, random: np.random.Generator) -> Truth:
    """All links alike."""
    return _truth("uniform", np.full((count, count), 25e9), random, own=0.0)


def slow_hosts(count: int, random: np.random.Generator) -> Truth:
    """One host in eight at 0.4 of the others' speed; a link is as fast as its slower end."""
    speed = np.where(random.permutation(count) < max(1, count // 8), 0.4, 1.0)
    return _truth("slow hosts", 25e9 * np.minimum(speed[:, None], speed[None, :]), random)


def racks_in_order(count: int, random: np.random.Generator) -> Truth:
    """Racks of eight, one to four oversubscribed, hosts named rack by rack."""
    return _racks("racks, named in order", np.arange(count) // 8, random)


def racks_shuffled(count: int, random: np.random.Generator) -> Truth:
    """The same, but the names say nothing."""
    return _racks("racks, names shuffled", random.permutation(np.arange(count) // 8), random)


def regions(count: int, random: np.random.Generator) -> Truth:
    """The measured bandwidths between ten cloud regions; hosts spread over them, 5 Gbit/s inside each."""
    data = json.loads((DATA / "cloud_regions.json").read_text(encoding="utf-8"))
    names = sorted({name for pair in data["pairs"] for name in pair[:2]})
    between = np.full((len(names), len(names)), 5e9 / 8)
    for one, other, _, gbit_per_s in data["pairs"]:
        a, b = names.index(one), names.index(other)
        between[a, b] = between[b, a] = gbit_per_s * 1e9 / 8
    at = random.permutation(np.arange(count) * len(names) // count)
    return _truth("cloud regions", between[np.ix_(at, at)], random)


def plane(count: int, random: np.random.Generator) -> Truth:
    """Hosts at random in a square; rates fall with the distance, by a factor of e across its side."""
    place = random.uniform(0, 1, (count, 2))
    apart = np.linalg.norm(place[:, None] - place[None, :], axis=2)
    return _truth("in a plane", 25e9 * np.exp(-apart), random)


def unstructured(count: int, random: np.random.Generator) -> Truth:
    """Every pair with a rate of its own: lognormal, sigma 0.35, the same both ways."""
    pair = random.normal(0.0, 0.35, (count, count))
    return _truth("unstructured", 25e9 * np.exp((pair + pair.T) / np.sqrt(2)), random)


KINDS: tuple[Callable[[int, np.random.Generator], Truth], ...] = (
    uniform,
    slow_hosts,
    racks_in_order,
    racks_shuffled,
    regions,
    plane,
    unstructured,
)


def _racks(name: str, rack: NDArray[np.int64], random: np.random.Generator) -> Truth:
    return _truth(name, np.where(rack[:, None] == rack[None, :], 25e9, 6.25e9), random)


def _truth(name: str, nominal: Matrix, random: np.random.Generator, own: float = OWN) -> Truth:
    return Truth(name, nominal * np.exp(random.normal(0.0, own, nominal.shape)), nominal)


def measure_of(truth: Truth, seed: int) -> Callable[[Sequence[HostPair], int], RoundOutcome]:
    """Round trips with noise; each round as a whole fast or slow."""
    random = np.random.default_rng(seed)

    def measure(pairs: Sequence[HostPair], size: int) -> RoundOutcome:
        factor = np.exp(random.normal(0.0, ORDER) + random.normal(0.0, NOISE, len(pairs)))
        return RoundOutcome(
            {
                (a, b): (2 * LATENCY_S + size / truth.bandwidth[a, b]) * float(factor[i])
                for i, (a, b) in enumerate(pairs)
            }
        )

    return measure


def tournament(truth: Truth) -> tuple[LinkSurvey, int]:
    """All pairs, and how many rounds that took."""
    count = len(truth.bandwidth)
    found = survey_pairs(shuffle_members([range(count)]), (TINY, SIZE), REPEATS, measure_of(truth, 1))
    return found, count - 1


def chosen(truth: Truth) -> tuple[LinkSurvey, AdaptiveSurvey]:
    """The rounds that the profile would choose, were this no simulation."""
    found, chooser, measure = LinkSurvey(), AdaptiveSurvey(range(len(truth.bandwidth))), measure_of(truth, 2)
    batch = 0
    while games := chooser.next_rounds(found.samples):
        survey_pairs(shuffle_rounds(games, batch), (TINY, SIZE), REPEATS, measure, seed=batch, found=found)
        batch += 1
    return found, chooser


def plain_mean(found: LinkSurvey, count: int) -> Matrix:
    """Time of a large message, mean over the repetitions, less half of the tiny round trip."""
    total, times = np.zeros((2, count, count)), np.zeros((2, count, count))
    for sample in found.samples:
        which = int(sample.size_bytes == SIZE)
        total[which, sample.source, sample.target] += sample.round_trip_s
        times[which, sample.source, sample.target] += 1
    mean = total / np.maximum(times, 1)
    return np.asarray(mean[1] - mean[0] / 2)


def judged(truth: Truth, time_s: Matrix) -> dict[str, float]:
    """Errors of the times of a large message, and the differences that were invented: the standard deviation that the
    error has between links that are nominally alike."""
    apart = ~np.eye(len(time_s), dtype=bool)
    exact = (LATENCY_S + SIZE / truth.bandwidth)[apart]
    error = np.log(time_s[apart] / exact)
    _, alike = np.unique(np.round(np.log(truth.nominal[apart]), 6), return_inverse=True)
    groups = np.bincount(alike)
    invented = error - (np.bincount(alike, weights=error) / groups)[alike] if groups.max() > 2 else error - error.mean()
    return {
        "mean_error": float(np.mean(np.abs(np.expm1(error)))),
        "max_error": float(np.max(np.abs(np.expm1(error)))),
        "false_structure": float(np.std(invented)),
    }


def compare(kind: Callable[[int, np.random.Generator], Truth], count: int, seed: int = 0) -> dict[str, Any]:
    """One cluster, three ways."""
    truth = kind(count, np.random.default_rng(seed))
    found, rounds = tournament(truth)
    full = judged(truth, plain_mean(found, count))
    table = tabulate_samples(found.samples, range(count))
    shape = complete_links(table.select_size(len(table.sizes_bytes) - 1)).shape
    told = judged(truth, pair_times(found.samples, range(count), shape=shape).time_s[-1])
    start = time.process_time()
    few, chooser = chosen(truth)
    times: PairTimes = pair_times(few.samples, range(count), shape=chooser.progress.host_shape, predict=True)
    cpu_s = time.process_time() - start
    held_out = chooser.progress.held_out
    predicted = times.error[times.predicted]
    return {
        "cluster": truth.name,
        "hosts": count,
        "tournament_mean": full | {"rounds": rounds},
        "tournament_told_apart": told | {"rounds": rounds},
        "chosen": judged(truth, times.time_s[-1])
        | {
            "rounds": chooser.progress.rounds,
            "everything_measured": chooser.progress.everything,
            "held_out_error": held_out[-1] if held_out else None,
            "claimed_error_of_predicted": float(np.sqrt(np.mean(predicted**2))) if len(predicted) else None,
            "classes": len(set(chooser.progress.host_shape.classes)) if chooser.progress.host_shape else 0,
            "cpu_s": round(cpu_s, 1),
        },
    }


HEAD = (
    f"{'':>28}  tournament, mean         order and noise told apart  rounds chosen\n"
    f"{'cluster':<22} hosts  rounds  mean  max   false   mean  max   false     rounds  mean   max   false  held out"
)


def row(one: dict[str, Any]) -> str:
    """One line of the table."""
    full, told, few = one["tournament_mean"], one["tournament_told_apart"], one["chosen"]
    held_out = f"{few['held_out_error']:.1%}" if few["held_out_error"] is not None else "-"
    everything = "all" if few["everything_measured"] else "   "
    return (
        f"{one['cluster']:<22} {one['hosts']:>5}  {full['rounds']:>6}  {_three(full)}  {_three(told)}"
        f"  {few['rounds']:>5} {everything} {_three(few)}  {held_out:>6}"
    )


def _others(path: str | None, kind: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Other labs that a result file holds already: large labs take minutes, and can be measured one by one."""
    defaults = {"kind": "own", "host_rounds": "auto", "predicted": 0}
    kept = [defaults | one for one in earlier_result(path).get("lab", ())]
    return [one for one in kept if one["kind"] != kind or one["hosts"] not in sizes]


def _three(part: dict[str, float]) -> str:
    return f"{part['mean_error']:>5.1%} {part['max_error']:>6.1%} {part['false_structure']:>6.2%}"


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = benchmark_parser(__doc__, quick="16 hosts only (in the lab: four)")
    parser.add_argument("--lab", action="store_true", help="In the lab: needs root and iproute2.")
    parser.add_argument("--hosts", type=int, nargs="+", help="Other numbers of hosts.")
    parser.add_argument("--repeats", type=int, default=2, help="In the lab: of every link.")
    parser.add_argument("--kind", default="own", help="In the lab: own, racks or mild (links_lab.py).")
    parser.add_argument(
        "--host-rounds", default="auto", help="In the lab: rounds of pairs, as `pipefit profile` takes it."
    )
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Simulate clusters of every kind and size, or profile labs."""
    sizes = LAB_HOSTS if arguments.lab else HOSTS
    sizes = tuple(arguments.hosts or (sizes[:1] if arguments.quick else sizes))
    if arguments.lab:
        return Outcome({"lab": measure_labs(arguments, sizes)})
    rows = []
    print(HEAD)
    for count in sizes:
        for kind in KINDS:
            rows.append(compare(kind, count))
            print(row(rows[-1]), flush=True)
    return Outcome({"simulated": rows})


def measure_labs(arguments: Namespace, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Profile a lab of every size, and keep the other labs of an earlier result."""
    from benchmarks.profiling.links_lab import HEAD as lab_head
    from benchmarks.profiling.links_lab import KINDS as LAB_KINDS
    from benchmarks.profiling.links_lab import measure
    from benchmarks.profiling.links_lab import row as lab_row

    labs = _others(arguments.json, arguments.kind, sizes)
    print(lab_head)
    for count in sizes:
        labs.append(measure(count, arguments.repeats, arguments.kind, arguments.host_rounds))
        labs[-1]["provenance"] = provenance()
        print(lab_row(labs[-1]), flush=True)
    return sorted(labs, key=lambda one: (LAB_KINDS.index(one["kind"]), one["hosts"]))


if __name__ == "__main__":
    sys.exit(main())
