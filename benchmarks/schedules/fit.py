"""Schedules under memory limits: `fit_schedule` beside the published adaptive search, every family that fits, and the
bounds.

Bubble = 1 - work of the busiest device / the longest time of a device from its first start to its last end, all of it
by pipefit's simulator on the true times. Gap = how far the time may be above the optimum, by the best lower bound that
`fit_schedule` gave. Compile time is excluded: every part of the search has run once on a small problem before the
first case. The adaptive search (benchmarks/schedules/adaptive.py) sees mean times and whole chunk units and is
replayed on the true ones; where a lane then exceeds the limit it is asked for less, one unit at a time.

    python -m benchmarks.schedules.fit --json benchmarks/results/schedules.json    about half an hour
    python -m benchmarks.schedules.fit --quick                                     small problems, under a minute
    python -m benchmarks.schedules.fit --only random                               one part anew; repeat for more
    python -m benchmarks.schedules.fit --keep-adaptive --json PATH                 `fit_schedule` anew; the adaptive
    search, which is slow and the same again, from PATH
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.harness import Outcome, benchmark_parser, earlier_result, run_benchmark, write_result
from benchmarks.provenance import provenance
from benchmarks.schedules import cases
from benchmarks.schedules.adaptive import Means, search
from benchmarks.schedules.cases import Case
from benchmarks.schedules.published import replay_published
from pipefit.errors import ScheduleError
from pipefit.schedule import FAMILIES, Schedule, check_schedule, linear_placement
from pipefit.schedule.fit.search import fit_schedule
from pipefit.simulate import simulate_schedule

UNBOUNDED = 10**9
"""Moves: the clock ends the search."""
SOLVER = importlib.util.find_spec("ortools") is not None
Record = dict[str, Any]
KEPT: dict[str, Record] = {}
"""Case name -> row of the adaptive search that is not measured again."""


def main() -> int:
    parser = benchmark_parser(__doc__, quick="small problems and little time")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="only this part; repeatable")
    parser.add_argument(
        "--keep-adaptive", action="store_true", help="take the rows of the adaptive search from the result in PATH"
    )
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure the parts, and write the result after each: every part has its own provenance."""
    if not SOLVER:
        print("ortools is not installed: the rows of the exact solver are left out (pip install 'pipefit[exact]')")
    warm_up()
    earlier = earlier_result(arguments.json)
    if arguments.keep_adaptive:
        KEPT.update(adaptive_rows(earlier))
    result = earlier if arguments.only else {}
    parts = result.get("provenance", {}).get("parts", {})
    result |= {"provenance": provenance() | {"parts": parts}, "solver": SOLVER, "quick": arguments.quick}
    for name in arguments.only or PARTS:
        print(f"\n== {name}", flush=True)
        origin = provenance()
        if arguments.keep_adaptive:
            origin["adaptive_search_of"] = adaptive_origin(parts.get(name, {}))
        result[name] = PARTS[name](arguments.quick)
        result["provenance"]["parts"][name] = origin
        write_result(arguments.json, result)
    return Outcome()


def adaptive_rows(result: Record) -> dict[str, Record]:
    """Case name -> row of the adaptive search, which is the same on every machine but for its clocks."""
    records = [record for part in PARTS for record in result.get(part, []) if part not in ("random", "published")]
    found = {
        record["name"]: row for record in records for row in record["methods"] if row["method"] == "adaptive search"
    }
    return found | {one["name"]: one["adaptive"] for one in result.get("random", {}).get("instances", [])}


def adaptive_origin(part: Record) -> Record | None:
    """Where the kept rows of a part were measured."""
    own = {key: part.get(key) for key in ("commit", "date")}
    kept: Record | None = part.get("adaptive_search_of", own if part else None)
    return kept


def warm_up() -> None:
    """Everything compiled, or loaded from where it was kept."""
    small = cases.case("warm-up", 2, 4, 4)
    for deltas in (cases.TEXTBOOK, (1.0, 0.5, -1.5)):
        fit_schedule(cases.case("warm-up", 2, 4, 5, deltas=deltas).problem(), seconds=0.2, objective="span")
    if SOLVER:
        fit_schedule(small.problem(), seconds=0.1, exact_seconds=0.5, objective="span")


def textbook(quick: bool) -> list[Record]:
    """d=8, m=16, the last stage 1.5x, memory +1, 0, -1."""
    if quick:
        return [compare(cases.case("d=4 m=8 last x1.5, limit 6", 4, 8, 6, last=1.5, best_known=5.0), (0.5,), 2.0)]
    return [compare(one, (2.0, 10.0), 60.0) for one in cases.slow_head()]


def runtime(quick: bool) -> list[Record]:
    """The same with what our runtime holds, for a layer kept whole and one recomputed selectively."""
    records = []
    model, tokens = ("tiny", 128) if quick else ("llama-3-8b", 4096)
    for recompute, deltas in cases.runtime_deltas(model, tokens).items():
        kind = f", {model} layer, recompute {recompute}: F {deltas[0]:+g} I {deltas[1]:+g} W {deltas[2]:+g}"
        if quick:
            records.append(
                compare(cases.case("d=4 m=8 last x1.5, limit 8" + kind, 4, 8, 8, last=1.5, deltas=deltas), (0.5,))
            )
        else:
            records += [compare(one, (2.0, 10.0)) for one in cases.slow_head(deltas, kind)]
    return records


def many_microbatches(quick: bool) -> list[Record]:
    """d=8, m=64, equal stages."""
    if quick:
        return [compare(one, (0.5,)) for one in cases.many_microbatches((10,), 16)]
    return [compare(one, (2.0, 10.0)) for one in cases.many_microbatches()]


def many_devices(quick: bool) -> list[Record]:
    """d=16, m=48: time to result, at most 5 s."""
    if quick:
        return []
    return [compare(one, (5.0,)) for one in cases.many_devices()]


def compare(case: Case, seconds: Sequence[float], solver_s: float = 0.0) -> Record:
    """All methods on one case, printed as they come."""
    print(f"\n{case.name}", flush=True)
    rows = [fitted(case, budget) for budget in seconds]
    if solver_s and SOLVER:
        rows.append(fitted(case, seconds[-1], solver_s))
    rows.append(adaptive(case))
    rows += families(case)
    bound = max((row["bound"] for row in rows if "bound" in row), default=0.0)
    for row in rows:
        if "time" in row:
            row["gap"] = (row["time"] - bound) / row["time"]
    print(f"  {'':<26}{'time':>9}{'bubble':>9}{'gap':>8}{'peak':>8}{'wall s':>9}{'CPU s':>8}")
    for row in rows:
        if "time" in row:
            told = f"{row['time']:>9.6g}{row['bubble']:>9.2%}{row['gap']:>8.1%}{row['peak']:>8.4g}"
            clock = f"{row['wall_s']:>9.2f}{row['cpu_s']:>8.2f}" if "wall_s" in row else ""
            print(f"  {row['method']:<26}{told}{clock}   {row.get('how', '')}".rstrip())
    print("  left out: " + ", ".join(f"{row['method']} ({row['nothing']})" for row in rows if "nothing" in row))
    print(f"  {'lower bound':<26}{bound:>9.6g}")
    known = {"best known": case.best_known, "adaptive, its authors' program": case.published}
    for name, bubble in known.items():
        if bubble is not None:
            print(f"  {name:<35}{bubble / 100:>9.1%}")
    return {
        "name": case.name,
        "devices": case.devices,
        "microbatches": case.microbatches,
        "limit": case.limit,
        "deltas": case.deltas,
        "bound": bound,
        "best_known_bubble": None if case.best_known is None else case.best_known / 100,
        "published_adaptive_bubble": None if case.published is None else case.published / 100,
        "methods": rows,
    }


def fitted(case: Case, seconds: float | None, solver_s: float = 0.0, moves: int = UNBOUNDED) -> Record:
    """`fit_schedule` within a budget: of seconds, or of moves, which give the same schedule on every machine."""
    name = f"fit {moves} moves" if seconds is None else f"fit {seconds:g} s"
    name += f" + solver {solver_s:g} s" if solver_s else ""
    problem = case.problem()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        found = fit_schedule(problem, moves=moves, seconds=seconds, exact_seconds=solver_s, seed=0, objective="span")
    except ScheduleError as error:
        return {"method": name, "nothing": error.what.splitlines()[0]}
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    row = {"method": name, **facts(found.schedule, case), "wall_s": wall, "cpu_s": cpu, "how": found.how}
    assert abs(row["time"] - found.time_s) <= 1e-6 * found.time_s, (row["time"], found.time_s)
    return row | {"bound": found.bound_s, "moves": found.moves}


def adaptive(case: Case) -> Record:
    """The published search, on mean times, replayed on the true ones."""
    if case.name in KEPT:
        return KEPT[case.name]
    wall, cpu = time.perf_counter(), time.process_time()
    row: Record = {"method": "adaptive search", "nothing": "no block fits"}
    for cap in range(min(2 * case.devices, int(case.limit)), 0, -1):
        found = search(case.devices, case.microbatches, cap, Means(*case.means()))
        if found is None:
            break
        told = facts(found.schedule, case)
        if told["peak"] <= case.limit + 1e-9:
            row = {"method": "adaptive search", **told, "asked_for": cap, "candidates": found.candidates}
            break
    return row | {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def families(case: Case) -> list[Record]:
    """Every family, on its own placement of the same 2 d stages, where it fits."""
    rows = []
    for name, made in FAMILIES.items():
        if name == "fit":
            continue
        placement = made.placement(case.devices)
        if case.microbatches < made.least_units(case.devices):
            rows.append({"method": name, "nothing": f"needs {made.least_units(case.devices)} microbatches"})
            continue
        told = facts(made(case.problem(placement)), case)
        if told["peak"] > case.limit + 1e-9:
            rows.append({"method": name, "nothing": f"holds {told['peak']:.4g}"})
        else:
            rows.append({"method": name, **told})
    return sorted(rows, key=lambda row: row.get("time", np.inf))


def facts(schedule: Schedule, case: Case) -> Record:
    """Time of the longest device, bubble and peak, by the simulator."""
    check_schedule(schedule)
    per = 2 * case.devices // schedule.num_stages
    costs = case.problem(schedule.placement if per == 1 else linear_placement(case.devices)).costs
    assert costs is not None
    timeline = simulate_schedule(schedule, costs)
    span = max(stop[-1] - start[0] for start, stop in zip(timeline.starts_s, timeline.stops_s, strict=True))
    peak = float(max(timeline.peak_bytes))
    return {"time": float(span), "bubble": float(1 - max(timeline.busy_s) / span), "peak": round(peak, 6)}


def random_instances(quick: bool) -> Record:
    """`fit_schedule` without the solver beside the adaptive search: how many points of bubble less."""
    seeds, moves = ((1, 2, 3), 20_000) if quick else (cases.SEEDS, 300_000)
    rows = []
    for seed in seeds:
        case = cases.random_instance(seed, most=6 if quick else 16)
        ours, theirs = fitted(case, None, moves=moves), adaptive(case)
        row: Record = {"seed": seed, "name": case.name, "limit": case.limit, "fit": ours, "adaptive": theirs}
        if "bubble" in ours and "bubble" in theirs:
            row["points"] = 100 * (theirs["bubble"] - ours["bubble"])
        rows.append(row)
        told = [f"{r['bubble']:.1%}" if "bubble" in r else "nothing" for r in (ours, theirs)]
        print(
            f"  {case.name:<40} fit {told[0]:>8}   adaptive {told[1]:>8}   "
            + (f"{row['points']:+6.2f} points" if "points" in row else ""),
            flush=True,
        )
    points = [row["points"] for row in rows if "points" in row]
    summary: Record = {
        "compared": len(points),
        "adaptive_finds_nothing": sum("nothing" in row["adaptive"] for row in rows),
        "fit_finds_nothing": sum("nothing" in row["fit"] for row in rows),
        "worse": sum(value < -1e-9 for value in points),
    }
    if points:
        summary |= {"mean_points": statistics.fmean(points), "worst_points": min(points), "best_points": max(points)}
        print(
            f"  {len(points)} instances: mean {summary['mean_points']:+.2f} points, worst {min(points):+.2f}; "
            f"on {summary['adaptive_finds_nothing']} more the adaptive search finds nothing, "
            f"on {summary['fit_finds_nothing']} fit"
        )
    return {"moves": moves, "instances": rows, "summary": summary}


PARTS: dict[str, Callable[[bool], Any]] = {
    "textbook": textbook,
    "runtime": runtime,
    "microbatches": many_microbatches,
    "devices": many_devices,
    "random": random_instances,
    "published": replay_published,
}

if __name__ == "__main__":
    sys.exit(main())
