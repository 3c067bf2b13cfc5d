"""Which host does what: our search against Pipette's annealing, fixed orders, chance, exhaustive search and long runs.

Every placement is judged by the simulated iteration of the same pipeline (1F1B, its order lowered for its own times).
Excess is counted over the best known placement of an instance, in the whole iteration and in what communication adds
to it. Pipette's annealing runs as `pipette.py` describes it, compiled, for ten seconds from a random
permutation (on its own cost, and on our estimate in the place of it); ours runs for a tenth of that, everything from
the simulated candidate on counted in, as long, and on instances of 16 to 128 hosts LONGER times as long. Seconds are
processor time of this process: both run on one core. Instances with up to ten hosts are gone through exhaustively, best
first by the estimate, which is a lower bound.

    python -m benchmarks.placement.search [--quick] [--improve SECONDS] [--others PATH] [--processes N] [--json PATH]

`--others` takes what the methods other than ours came to from a result of before, with its provenance beside the new
one: they have not changed when only our search has, and take two thirds of the time.
`--improve` looks for better placements than the best known ones and keeps them in data/placement_best.json.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Outcome, benchmark_parser, read_result, run_benchmark
from benchmarks.placement.instances import LARGE, SMALL, Instance, lab, skewed
from benchmarks.placement.pipette import pipette, pipette_on_estimate
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.placement.links import TICK_S
from pipefit.plan.placement.lowered import LoweredPlacement, place_lowered
from pipefit.plan.placement.search import PlacementBudget, PlacementResult, PlacementSearch, search_placement

BEST = Path(__file__).parents[1] / "data" / "placement_best.json"
FULL_S, OURS_PART = 10.0, 10
"""Seconds for Pipette's annealing; which part of it ours gets."""

LONGER, LARGEST = 6, 128
"""How many times as long ours runs for once more, on large instances of up to so many hosts."""

RANDOM = 10
"""Random placements, of which the mean is shown."""

METHODS = ("ours", "ours_as_long", "ours_longer", "pipette", "pipette_on_estimate", "hostname", "random")


def main() -> int:
    parser = benchmark_parser(__doc__, quick="two small instances, a second for each annealing")
    parser.add_argument("--seconds", type=float, default=FULL_S, help="for Pipette's annealing; ours gets a tenth")
    parser.add_argument("--repeat", type=int, default=3, help="seeds of every annealing")
    parser.add_argument("--only", default="", help="instances whose names hold this")
    parser.add_argument("--improve", type=float, default=0.0, help="seconds an instance to look for better best ones")
    parser.add_argument("--others", type=Path, help="a result whose runs of the other methods are taken")
    parser.add_argument("--processes", type=int, default=1, help="how many instances are measured at a time")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Compare all methods on every instance, or look for better best placements."""
    seconds = 1.0 if arguments.quick else arguments.seconds
    seeds = range(1 if arguments.quick else arguments.repeat)
    small, large = ([lab(2, 1)], [skewed(16, 4, 11)]) if arguments.quick else (SMALL, LARGE)
    wanted = [one for one in (*small, *large) if arguments.only in one.name]
    if arguments.improve:
        for instance in wanted:
            improve(instance, arguments.improve)
        return Outcome()
    before = read_result(arguments.others) if arguments.others else {}
    taken = {case["name"]: case for case in before.get("cases", ())}
    works = [(one, seconds, seeds, one in small, taken.get(one.name)) for one in wanted]
    warm_up()
    if arguments.processes > 1:  # forked, so that they have what is compiled
        with ProcessPoolExecutor(arguments.processes, mp_context=get_context("fork")) as pool:
            cases = list(pool.map(measure, *zip(*works, strict=True)))
    else:
        cases = [measure(*work) for work in works]
    result = {
        "seconds_pipette": seconds,
        "seconds_ours": seconds / OURS_PART,
        "cases": cases,
        **({"provenance_of_the_others": before["provenance"]} if taken else {}),
    }
    print_table(result)
    return Outcome(result, passed=all(case["not_worse"] for case in cases))


def warm_up() -> None:
    """Compile everything, so that no clock counts it."""
    tiny = lab(2, 1)
    start = tiny.simulated(tiny.decisions())
    search_placement(tiny.question(start), start.simulation.timeline, PlacementBudget(moves=500), compiled=True)
    pipette(tiny, 0.01, 0)
    pipette_on_estimate(tiny, knowing(tiny, start), 0.01, 0)


def knowing(instance: Instance, start: EvaluatedPlan) -> PlacementSearch:
    """A searcher whose estimate knows the paths of the probes and of a hundred random placements."""
    question = instance.question(start)
    searcher = PlacementSearch(question, start.simulation.timeline, compiled=True)
    searcher.simulate_placement(question.devices)
    searcher.probe_entries(question.devices)
    random = np.random.default_rng(1)
    for _ in range(100):
        searcher.simulate_placement(random.permutation(question.devices))
    return searcher


def measure(
    instance: Instance, seconds: float, seeds: range, exhaustive: bool, taken: dict[str, Any] | None
) -> dict[str, Any]:
    """All methods on one instance: simulated seconds of each run. Those of the other methods are `taken` if given."""
    runs: dict[str, list[float]] = {name: [] for name in METHODS}
    start = instance.simulated(instance.decisions())
    spent: list[float] = []
    moves: list[int] = []
    for seed in seeds:
        began = time.process_time()
        ours = searched(instance, start, seconds / OURS_PART, seed)
        spent.append(time.process_time() - began)
        moves.append(ours.moves)
        runs["ours"].append(instance.step_s(ours.devices))
        runs["ours_as_long"].append(instance.step_s(searched(instance, start, seconds, 1000 * seed + 1).devices))
        if not exhaustive and instance.hosts <= LARGEST:
            longer = searched(instance, start, LONGER * seconds, 1000 * seed + 2)
            runs["ours_longer"].append(instance.step_s(longer.devices))
        if not taken:
            runs["pipette"].append(instance.step_s(pipette(instance, seconds, seed).devices))
            theirs = pipette_on_estimate(instance, knowing(instance, start), seconds, seed)
            runs["pipette_on_estimate"].append(instance.step_s(theirs.devices))
    runs["hostname"] = [instance.step_s(by_stages(instance)), start.step_s]
    chance = np.random.default_rng(2)
    runs["random"] = [instance.step_s(chance.permutation(instance.hosts)) for _ in range(RANDOM)]
    if taken:
        for name in ("hostname", "random"):
            assert np.allclose(runs[name], taken["step_s"][name], rtol=1e-9), "the instance is not what it was"
        for name in ("pipette", "pipette_on_estimate"):
            runs[name] = taken["step_s"][name][: len(seeds)]
    known = best_known(instance)
    case = {
        "name": instance.name,
        "hosts": instance.hosts,
        "stages": instance.stages,
        "replicas": instance.replicas,
        "compute_s": instance.compute_s,
        "step_s": runs,
        "ours_seconds": spent,
        "ours_moves": moves,
    }
    if exhaustive and taken:
        case["optimum_s"], case["optimum_simulated"] = taken["optimum_s"], taken["optimum_simulated"]
    elif exhaustive:
        case["optimum_s"], case["optimum_simulated"] = optimum(instance, start)
    everything = [value for values in runs.values() for value in values]
    best = min([*everything, *([known["step_s"]] if known else []), *([case["optimum_s"]] if exhaustive else [])])
    case["best_known_s"] = best
    kept = known is not None and known["step_s"] <= best * (1 + 1e-9)
    case["best_known_by"] = "exhaustive search" if exhaustive else known["by"] if known and kept else "these runs"
    case["excess"] = {name: float(np.mean(values)) / best - 1 for name, values in runs.items() if values}
    case["excess"]["hostname"] = min(runs["hostname"]) / best - 1
    case["excess_worst"] = {name: max(runs[name]) / best - 1 for name in METHODS[:5] if runs[name]}
    case["excess_of_communication"] = max(runs["ours"]) - best
    case["excess_of_communication"] /= max(best - instance.compute_s, 1e-12)
    pairs = zip(runs["ours"], runs["pipette"], strict=True)
    case["not_worse"] = all(ours <= theirs * (1 + 1e-9) for ours, theirs in pairs)
    print(f"{instance.name}: ours {case['excess']['ours']:.2%}, Pipette {case['excess']['pipette']:.2%}", flush=True)
    return case


def by_stages(instance: Instance) -> list[int]:
    """Hostname order with the replicas of a stage next to each other."""
    return list(range(instance.hosts))


def optimum(instance: Instance, start: EvaluatedPlan) -> tuple[float, int]:
    """(least simulated iteration over all placements, how many were simulated). Replicas are alike, so the first
    stage's hosts stand in ascending order; a placement whose estimate is above the best time is not simulated."""
    searcher = knowing(instance, start)
    replicas, best_s, simulated = instance.replicas, float("inf"), 0
    device = searcher.question.devices.copy()
    hosts = range(instance.hosts)
    for first in itertools.combinations(hosts, replicas):
        rest = [host for host in hosts if host not in first]
        device[:replicas] = first
        for order in itertools.permutations(rest):
            device[replicas:] = order
            if searcher.estimate_ticks(device) * TICK_S < best_s * (1 - 1e-9):
                step_s = searcher.paths.step_s(searcher.entry_ticks)
                simulated += 1
                if step_s < best_s:
                    best_s = step_s
                    searcher.simulate_placement(device)
                    best = device.copy()
    return instance.step_s(best), simulated


def best_known(instance: Instance) -> dict[str, Any] | None:
    """The best placement that is kept of an instance, simulated anew."""
    kept = read_best().get(instance.name)
    return kept and {"step_s": instance.step_s(kept["devices"]), "by": kept["by"]}


def read_best() -> dict[str, Any]:
    return json.loads(BEST.read_text(encoding="utf-8")) if BEST.exists() else {}


def improve(instance: Instance, seconds: float) -> None:
    """Long runs of several methods, each for its part of the seconds; the best is kept if it beats what is kept."""
    start = instance.simulated(instance.decisions())
    kept = read_best()
    own = kept.get(instance.name)
    best_s = instance.step_s(own["devices"]) if own else float("inf")
    seed = int(time.time())
    runs: list[tuple[str, float, Callable[[float], Sequence[int]]]] = [
        ("our search", 0.3, lambda s: searched(instance, start, s, seed).devices),
        ("the best of our searches of a second", 0.3, lambda s: shorter(instance, start, s, seed)),
        ("Pipette's annealing on our estimate", 0.2, lambda s: theirs(instance, start, s, seed)),
        ("our search from the best one kept", 0.2, lambda s: again(instance, start, s, seed)),
    ]
    for name, part, found in runs:
        devices = found(part * seconds)
        step_s = instance.step_s(devices)
        if step_s < best_s * (1 - 1e-9):
            best_s, words = step_s, f"{name}, {part * seconds:.0f} s of processor time, seed {seed}"
            own = {"step_s": step_s, "by": words, "devices": [int(device) for device in devices]}
            kept = {**read_best(), instance.name: own}
            BEST.write_text(json.dumps(kept).replace('}, "', '},\n"') + "\n", encoding="utf-8")
        print(f"{instance.name}: {name} {step_s:.6f} s, best {best_s:.6f} s", flush=True)


def searched(instance: Instance, start: EvaluatedPlan, seconds: float, seed: int) -> PlacementResult:
    """Our search, with everything from the simulated candidate on in its seconds."""
    budget = PlacementBudget(moves=10**9, seconds=seconds, seed=seed % 100_000)
    return place_lowered(
        lowered(instance, start),
        lambda devices: lowered(instance, instance.simulated(instance.decisions(devices=devices))),
        budget,
        compiled=True,
        clock=time.process_time,
    )


def lowered(instance: Instance, one: EvaluatedPlan) -> LoweredPlacement:
    return LoweredPlacement(question=instance.question(one), timeline=one.simulation.timeline, step_s=one.step_s)


def shorter(instance: Instance, start: EvaluatedPlan, seconds: float, seed: int) -> Sequence[int]:
    """The best of as many searches of a second as there is time for, with seeds of their own."""
    found = [searched(instance, start, 1.0, seed + 1 + again).devices for again in range(max(1, round(seconds)))]
    return min(found, key=instance.step_s)


def theirs(instance: Instance, start: EvaluatedPlan, seconds: float, seed: int) -> list[int]:
    return pipette_on_estimate(instance, knowing(instance, start), seconds, seed % 100_000).devices.tolist()


def again(instance: Instance, start: EvaluatedPlan, seconds: float, seed: int) -> tuple[int, ...]:
    own = read_best().get(instance.name)
    if own is not None:
        start = instance.simulated(instance.decisions(devices=tuple(own["devices"])))
    return searched(instance, start, seconds, seed + 2).devices


def print_table(result: dict[str, Any]) -> None:
    print(
        f"\nsimulated iteration over the best known, in %, mean of the seeds: Pipette {result['seconds_pipette']:g} s, "
        f"ours {result['seconds_ours']:g} s"
    )
    head = ("best known", *METHODS, "ours, worst", "long, worst", "longer, worst", "of comm.")
    short = {"pipette_on_estimate": "P on ours", "ours_as_long": "as long", "ours_longer": "longer"}
    print(f"{'instance':<34}" + "".join(f"{short.get(name, name):>14}" for name in head))
    for case in result["cases"]:
        cells = [f"{case['best_known_s']:.4f} s", *(_percent(case["excess"], name) for name in METHODS)]
        cells += [_percent(case["excess_worst"], name) for name in METHODS[:3]]
        cells += [f"{100 * case['excess_of_communication']:.1f}"]
        print(
            f"{case['name']:<34}" + "".join(f"{cell:>14}" for cell in cells) + ("" if case["not_worse"] else "  WORSE")
        )


def _percent(excess: dict[str, float], name: str) -> str:
    return f"{100 * excess[name]:.2f}" if name in excess else "-"


if __name__ == "__main__":
    sys.exit(main())
