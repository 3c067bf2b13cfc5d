"""How long the planner searches: 64 devices with an 8B model, 1,024 devices with a 70B model, everything it can choose.

Each case runs in a process of its own. Capturing the model's operator graphs (with torch, once a model) is timed
apart. Finding the plan, fitted orders included, is bounded by 10 s on two cores for the large case; what follows is
timed apart: the sensitivity to a better cluster, and the curve of memory against time on the plan's layout. Both wall
clock and CPU time stand in the result: on a machine that does other work they differ, and the CPU time is what the
search needs (it runs on one core).

    python benchmarks/planning.py [--quick] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from pipefit.cluster import open_cluster
from pipefit.model.registry import open_model
from pipefit.plan import make
from pipefit.plan.types import Job
from pipefit.units import format_seconds
from provenance import provenance, write_result

LIMIT_S = 10.0
CASES = {
    "64 devices, 8B": ("llama-3-8b", "8x8xH100:400Gbit/s", Job(batch=256, sequence=4096, precision="bfloat16")),
    "1024 devices, 70B": ("llama-3-70b", "128x8xH100:400Gbit/s", Job(batch=1024, sequence=4096, precision="bfloat16")),
}
LARGE = "1024 devices, 70B"
AFTERWARDS = ("sensitivity", "trade")
"""Parts of making a plan that come after the search."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small case only, once")
    parser.add_argument("--repeat", type=int, default=3, help="runs of every case")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(*CASES[arguments.case])))
        return 0
    names = list(CASES)[:1] if arguments.quick else list(CASES)
    cases = {name: repeated(name, 1 if arguments.quick else arguments.repeat) for name in names}
    result = {"limit_s": LIMIT_S, "cases": cases, "provenance": provenance()}
    write_result(arguments.json, result)
    for name, case in cases.items():
        print_case(name, case)
    return 0 if LARGE not in cases or min(cases[LARGE]["search_cpu_s"]) <= LIMIT_S else 1


def repeated(name: str, count: int) -> dict[str, Any]:
    """The case in `count` fresh processes: figures of all of them, facts of the first."""
    runs = []
    for _ in range(count):
        words = [sys.executable, __file__, "--case", name]
        runs.append(json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
    times = [key for key in runs[0] if key.endswith("_s")]
    return {**runs[0], **{key: [run[key] for run in runs] for key in times}}


def measure(model_name: str, cluster_text: str, job: Job) -> dict[str, Any]:
    """One search in this process."""
    began = time.perf_counter()
    model = open_model(model_name)
    capture_s = time.perf_counter() - began
    cluster = open_cluster(cluster_text)
    inside = {part: {"wall": 0.0, "cpu": 0.0} for part in AFTERWARDS}
    for part in AFTERWARDS:
        setattr(make, part, timed(getattr(make, part), inside[part]))
    wall, cpu = time.perf_counter(), time.process_time()
    plan = make.make_plan(model, cluster, job, name=model_name, cluster_source=cluster_text)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert plan.prediction is not None
    return {
        "model": model_name,
        "cluster": cluster_text,
        "batch": job.batch,
        "sequence": job.sequence,
        "search_wall_s": wall - sum(each["wall"] for each in inside.values()),
        "search_cpu_s": cpu - sum(each["cpu"] for each in inside.values()),
        **{f"{part}_{clock}_s": value for part, each in inside.items() for clock, value in each.items()},
        "capture_wall_s": capture_s,
        "search": plan.prediction.assumptions[-1],
        "decisions": dict(plan.decisions),
        "predicted_step": plan.prediction.step_s,
        "lower_bound": plan.prediction.lower_bound_s,
        "sensitivity": {one.change: one.step_s for one in plan.prediction.sensitivity},
    }


def timed(function: Callable[..., Any], seconds: dict[str, float]) -> Callable[..., Any]:
    """The function, which notes how long it took."""

    def call(*arguments: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        found = function(*arguments)
        seconds["wall"], seconds["cpu"] = time.perf_counter() - wall, time.process_time() - cpu
        return found

    return call


def print_case(name: str, case: dict[str, Any]) -> None:
    step, bound = case["predicted_step"], case["lower_bound"]
    chosen = ", ".join(f"{key} {case['decisions'][key]}" for key in ("replicas", "stages", "microbatches", "schedule"))
    print(f"{name}: {case['model']} on {case['cluster']}, batch {case['batch']} x {case['sequence']}")
    for part in ("search", *AFTERWARDS, "capture"):
        for clock in ("wall", "cpu"):
            if (key := f"{part}_{clock}_s") in case:
                print(f"  {part + ', ' + clock:<18} {', '.join(f'{value:.2f}' for value in case[key])} s")
    print(f"  {case['search']}")
    print(f"  {chosen}, recompute {case['decisions']['recompute']}")
    print(f"  predicted {format_seconds(step)}, bound {format_seconds(bound)}, {step / bound - 1:.1%} above it")


if __name__ == "__main__":
    sys.exit(main())
