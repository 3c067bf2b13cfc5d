"""How long the planner searches: 8 to 8,192 devices, models of 8B to 405B, everything to choose.

The devices are of one kind, or of two kinds with host matrices like measured ones (seeded lognormal factors, sigma 0.35
in bandwidth and 0.2 in latency). Each case runs in a process of its own. Capturing the model's operator graphs (with
torch, once a model) is timed apart, and so are the sensitivity to a better cluster and the curve of memory against
time. The search itself, fitted orders and placement included, has a limit for most cases; its time for device groups is
listed as well. The result holds wall clock and CPU time. On a machine that does other work they differ, and the CPU
time is the time that the search needs: it runs on one core.

    python -m benchmarks.planning.search_time [--quick] [--only CASE] [--json PATH]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import SUPPRESS, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.harness import Outcome, benchmark_parser, run_benchmark
from pipefit.cluster import Cluster, open_cluster
from pipefit.cluster.kinds import data_sheet_kind
from pipefit.cluster.topology import device_count
from pipefit.model.registry import open_model
from pipefit.plan import make
from pipefit.plan.explain import result
from pipefit.plan.types import Job, Plan
from pipefit.units import format_seconds
from pipefit.validate.published import read_published, write_model

SEED, BANDWIDTH_SIGMA, LATENCY_SIGMA = 1, 0.35, 0.2


@dataclass(frozen=True)
class Case:
    model: str
    cluster: str
    job: Job
    limit_s: float
    "Limit of the CPU time of the search."
    mixed: str = ""
    "Kind of the second half of the hosts; then the links differ, too."


CASES = {
    "8 devices, 8B": Case("llama-3-8b", "8xH100", Job(batch=64, sequence=8192, precision="bfloat16"), 2.0),
    "64 devices, 70B": Case(
        "llama-3-70b", "8x8xH100:3200Gbit/s", Job(batch=512, sequence=8192, precision="bfloat16"), 5.0
    ),
    "1024 devices, 405B": Case(
        "llama-3.1-405b", "128x8xH100:3200Gbit/s", Job(batch=2048, sequence=8192, precision="bfloat16"), 15.0
    ),
    "64 devices, 8B": Case(
        "llama-3-8b", "8x8xH100:400Gbit/s", Job(batch=256, sequence=4096, precision="bfloat16"), 5.0
    ),
    "1024 devices, 70B": Case(
        "llama-3-70b", "128x8xH100:400Gbit/s", Job(batch=1024, sequence=4096, precision="bfloat16"), 15.0
    ),
    "64 mixed devices, 8B": Case(
        "llama-3-8b", "8x8xH100:400Gbit/s", Job(batch=256, sequence=4096, precision="bfloat16"), 5.0, mixed="A100-80"
    ),
    "1024 mixed devices, 70B": Case(
        "llama-3-70b",
        "128x8xH100:400Gbit/s",
        Job(batch=1024, sequence=4096, precision="bfloat16"),
        15.0,
        mixed="A100-80",
    ),
    "8192 mixed devices, 70B": Case(
        "llama-3-70b",
        "1024x8xH100:400Gbit/s",
        Job(batch=4096, sequence=4096, precision="bfloat16"),
        60.0,
        mixed="A100-80",
    ),
}
QUICK = {
    "16 devices, 8B": Case("llama-3-8b", "4x4xH100:400Gbit/s", Job(batch=64, sequence=4096, precision="bfloat16"), 5.0),
    "16 mixed devices, 8B": Case(
        "llama-3-8b", "4x4xH100:400Gbit/s", Job(batch=64, sequence=4096, precision="bfloat16"), 5.0, mixed="A100-80"
    ),
}
"""Cases of `--quick`."""

AFTERWARDS = {"sensitivity": (result, "analyse_sensitivity"), "trade": (make, "trade_memory")}
"""Parts of making a plan that come after the search, with the modules and names of their functions."""

WITHIN = {"with_groups": (make, "search_groups")}
"""Parts of the search that are timed by themselves as well."""


def main() -> int:
    parser = benchmark_parser(__doc__, quick="two small cases, once")
    parser.add_argument("--only", choices=CASES, help="this case only")
    parser.add_argument("--repeat", type=int, default=3, help="runs of every case")
    parser.add_argument("--case", help=SUPPRESS)
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Plan every case in processes of its own; in such a process, measure one case.

    A full run must also keep the limits."""
    if arguments.case:
        print(json.dumps(measure((CASES | QUICK)[arguments.case])))
        return Outcome()
    known = QUICK if arguments.quick and not arguments.only else CASES
    names = [arguments.only] if arguments.only else list(known)
    cases = {name: repeated(name, 1 if arguments.quick else arguments.repeat) for name in names}
    for name, case in cases.items():
        print_case(name, case)
    fast = all(min(case["search_cpu_s"]) <= known[name].limit_s for name, case in cases.items())
    limits_s = {name: known[name].limit_s for name in cases}
    return Outcome({"limits_s": limits_s, "cases": cases}, passed=fast or arguments.quick)


def repeated(name: str, count: int) -> dict[str, Any]:
    """The case in `count` fresh processes: figures of all of them, facts of the first."""
    runs = []
    for _ in range(count):
        words = [sys.executable, "-m", "benchmarks.planning.search_time", "--case", name]
        runs.append(json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
    times = [key for key in runs[0] if key.endswith("_s")]
    return {**runs[0], **{key: [run[key] for run in runs] for key in times}}


def open_case(case: Case) -> Cluster:
    """The cluster of a case."""
    cluster = open_cluster(case.cluster)
    return skewed(cluster, case.mixed) if case.mixed else cluster


def skewed(cluster: Cluster, second: str) -> Cluster:
    """Every other host of another kind, and host matrices that differ as measured ones do."""
    kind, link = data_sheet_kind(second)
    count = len(cluster.hosts)
    hosts = tuple(
        replace(host, kind=kind.name, link=kind.name) if place % 2 else host for place, host in enumerate(cluster.hosts)
    )
    random = np.random.default_rng(SEED)
    rail = cluster.rails[0]

    def matrix(base: Sequence[Sequence[float]], sigma: float) -> tuple[tuple[float, ...], ...]:
        factor = np.exp(random.normal(-(sigma**2) / 2, sigma, (count, count)))
        return tuple(map(tuple, (np.array(base) * factor).tolist()))

    measured = replace(
        rail,
        bandwidth_bytes_per_s=matrix(rail.bandwidth_bytes_per_s, BANDWIDTH_SIGMA),
        latency_s=matrix(rail.latency_s, LATENCY_SIGMA),
    )
    return replace(
        cluster,
        name=f"{cluster.name}, every other host {second}, links skewed",
        kinds={**cluster.kinds, kind.name: kind},
        links={**cluster.links, kind.name: link},
        hosts=hosts,
        rails=(measured,),
    )


def measure(case: Case) -> dict[str, Any]:
    """One search in this process."""
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        sizes = read_published().models[case.model]
        model = open_model(write_model(case.model, sizes, case.job.sequence, Path(folder)))
    capture_s = time.perf_counter() - began
    cluster, job = open_case(case), case.job
    inside = {part: {"wall": 0.0, "cpu": 0.0} for part in (*WITHIN, *AFTERWARDS)}
    for part, (module, function) in (WITHIN | AFTERWARDS).items():
        setattr(module, function, timed(getattr(module, function), inside[part]))
    wall, cpu = time.perf_counter(), time.process_time()
    plan = make.make_plan(model, cluster, job, name=case.model, cluster_source=case.cluster)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert plan.prediction is not None
    return {
        "model": case.model,
        "cluster": cluster.name,
        "devices": device_count(cluster),
        "batch": job.batch,
        "sequence": job.sequence,
        "search_wall_s": wall - sum(inside[part]["wall"] for part in AFTERWARDS),
        "search_cpu_s": cpu - sum(inside[part]["cpu"] for part in AFTERWARDS),
        **{f"{part}_{clock}_s": value for part, each in inside.items() for clock, value in each.items()},
        "capture_wall_s": capture_s,
        "search": plan.prediction.assumptions[-1],
        "kinds": kinds_used(plan, cluster),
        "decisions": {key: value for key, value in plan.decisions.items() if key != "mapping"},
        "predicted_step": plan.prediction.step_s,
        "lower_bound": plan.prediction.lower_bound_s,
        "sensitivity": {one.change: one.step_s for one in plan.prediction.sensitivity},
    }


def kinds_used(plan: Plan, cluster: Cluster) -> dict[str, int]:
    """Devices of every kind in the plan."""
    kinds = [host.kind for host in cluster.hosts for _ in range(host.devices)]
    return dict(Counter(kinds[device] for device in plan.used_devices))


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
    for part in ("search", *WITHIN, *AFTERWARDS, "capture"):
        for clock in ("wall", "cpu"):
            if (key := f"{part}_{clock}_s") in case:
                print(f"  {part + ', ' + clock:<18} {', '.join(f'{value:.2f}' for value in case[key])} s")
    print(f"  {case['search']}")
    print(f"  {chosen}, recompute {case['decisions']['recompute']}")
    print(f"  predicted {format_seconds(step)}, bound {format_seconds(bound)}, {step / bound - 1:.1%} above it")


if __name__ == "__main__":
    sys.exit(main())
