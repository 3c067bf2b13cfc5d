"""Predicted beside measured: profiles this machine, plans, and really runs the chosen plan and five others.

    python -m benchmarks.predictions.local_runs [--quick] [--cluster FILE] [--json PATH]

1. `pipefit profile --local N --model tiny` in processes of its own (or `--cluster FILE`, a profile that stands).
2. The planner's choice on that cluster, and five plans that differ from it in replicas, stages, microbatches, schedule
   or recomputation. Nothing is fitted to any of the runs below.
3. All six are built by the same N processes as `pipefit train` builds them, and take steps in turn, in a new order
   each round, so that a slow phase of the machine meets all of them. A step is timed from a barrier until the last
   process has the loss; the first rounds are left out.

Four figures stand beside the prediction, because other work on the machine makes steps slower:

- the median step, by the clock on the wall;
- the fastest quarter;
- the median of the step without the time for which the processes were ready to run and had no core: each step's time,
  times the share CPU time / (CPU time + time in the run queue) of its main threads, as the kernel counts both
  (/proc, Linux only). On a quiet machine that share is 1, and this is the median step. Only where every process can
  have a core of its own: otherwise waiting for a core is part of what is predicted, and the share is taken as 1;
- the CPU time of a step over all processes, beside the predicted one (busy time x the cores that a process has).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Outcome, TextTable, benchmark_parser, run_benchmark
from pipefit.cluster import Cluster, load_cluster
from pipefit.model.registry import open_model
from pipefit.optimizers.sharded_state import ShardedState
from pipefit.plan.assemble.predict import add_prediction, simulate_plan
from pipefit.plan.check.rules import load_plan, save_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan
from pipefit.schedule.families import FAMILIES
from pipefit.units import format_seconds

MODEL = "tiny"
TARGET = 0.10
MEASURES = ("median_s", "fastest_quarter_s", "with_cores_s")


TABLE = TextTable(
    ("predicted", ">10"), ("median", ">11"), ("error", ">8"), ("quarter", ">11"), ("error", ">8"),
    ("with cores", ">11"), ("error", ">8"), ("had one", ">8"), ("spread", ">8"), ("CPU pred.", ">11"), ("CPU", ">11"),
    ("  plan", "<6"),
)  # fmt: skip


def main() -> int:
    parser = benchmark_parser(__doc__, quick="a quick profile and few rounds")
    parser.add_argument("--local", type=int, default=2, help="processes")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=0, help="rounds that count; 0: 20, with --quick 5")
    parser.add_argument("--cluster", help="a cluster file of this machine, instead of profiling")
    parser.add_argument("--rank-of", help=SUPPRESS)
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Profile, plan, run, and compare; or be one of the ranks."""
    if arguments.rank_of:
        run_rank(Path(arguments.rank_of))
        return Outcome()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rounds = arguments.rounds or (5 if arguments.quick else 20)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(arguments.cluster) if arguments.cluster else profile(Path(folder), arguments)
        job = Job(batch=arguments.batch, sequence=arguments.seq, precision="float32")
        cluster = load_cluster(file)
        plans = make_plans(cluster, job, arguments.local)
        before = os.getloadavg()[0]
        runs = measure(Path(folder), plans, arguments.local, rounds)
    rows = [compare(plan, run, arguments.local) for plan, run in zip(plans, runs, strict=True)]
    result = {
        "model": MODEL,
        "job": {"batch": job.batch, "sequence": job.sequence, "precision": job.precision},
        "processes": arguments.local,
        "rounds": rounds,
        "profile": profile_facts(cluster),
        "rows": rows,
        "mean_error": {key: mean_error(rows, key) for key in MEASURES},
        "mean_error_cpu": mean_error(rows, "cpu_s", "predicted_cpu_s"),
        "load_average_before": round(before, 1),
        "load_average_after": round(os.getloadavg()[0], 1),
        "target": TARGET,
    }
    print_table(result)
    return Outcome(result, passed=result["mean_error"]["with_cores_s"] <= TARGET)


def profile(folder: Path, arguments: Namespace) -> Path:
    """The cluster file of this machine, measured now."""
    file = folder / "cluster.json"
    words = ["profile", "--local", str(arguments.local), "--model", MODEL, "--sequence", str(arguments.seq)]
    words += ["--tokens", str(arguments.batch * arguments.seq), "-o", str(file), *(["--quick"] * arguments.quick)]
    subprocess.run([sys.executable, "-m", "pipefit", *words], check=True, stdout=subprocess.DEVNULL)
    return file


def profile_facts(cluster: Cluster) -> dict[str, Any]:
    measured = cluster.measured
    assert measured is not None, "a cluster that was profiled"
    return {
        "when": cluster.provenance.when,
        "seconds": round(measured.seconds, 1),
        "links": {name: vars_of(link) for name, link in cluster.links.items()},
        "collectives": {c.operation: [c.latency_factor, c.bandwidth_factor] for c in measured.collectives},
        "overhead_s": {kind: dict(each) for kind, each in measured.overhead_s.items()},
        "layers": {f"{c.name}, {c.setting}": c.fit_error for c in measured.layers},
    }


def vars_of(link: Any) -> dict[str, float]:
    return {"latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}


def make_plans(cluster: Cluster, job: Job, devices: int) -> list[Plan]:
    """The planner's choice on all devices, then five that differ from it and from each other."""
    model = open_model(MODEL)
    chosen = make_plan(model, cluster, job, Constraints(devices=devices), name=MODEL)
    plans = [chosen]
    seen = {words(chosen)}
    for decisions in others(devices):
        plan = build_plan(model, cluster, job, decisions, name=MODEL)
        plan = add_prediction(plan, model, simulate_plan(plan, model, cluster))
        if words(plan) not in seen and len(plans) < 6:
            seen.add(words(plan))
            plans.append(plan)
    return plans


def others(devices: int) -> list[ParallelConfig]:
    """Plans on all devices, from most to least worth looking at."""
    half = devices // 2
    every = (1,) * devices

    def staged(
        stages: int, schedule: str, microbatches: int, recompute: str = "none", sharded_state: ShardedState = "none"
    ) -> ParallelConfig:
        lanes = max(FAMILIES[schedule].placement(stages)) + 1
        placement = FAMILIES[schedule].placement(stages)
        return ParallelConfig(
            stages=len(placement), placement=placement, replicas=(1,) * (devices // lanes), schedule=schedule,
            microbatches=microbatches, recompute=(recompute,), sharded_state=sharded_state,
        )  # fmt: skip

    return [
        staged(devices, "1f1b", 8),
        ParallelConfig(stages=1, replicas=every, microbatches=4, sharded_state="optimizer"),
        staged(max(2, half), "gpipe", 4),
        staged(devices, "zb-h1", 8),
        staged(max(2, half), "interleaved-1f1b", 4, "full"),
        ParallelConfig(stages=1, replicas=every, microbatches=1, recompute=("selective",)),
        staged(devices, "1f1b", 4),
    ]


def words(plan: Plan) -> str:
    keys = ("replicas", "stages", "microbatches", "schedule", "recompute", "sharded_state")
    return ", ".join(f"{key} {plan.decisions[key]}" for key in keys)


def measure(folder: Path, plans: list[Plan], count: int, rounds: int) -> list[dict[str, Any]]:
    """Start the processes, let them run all plans in turn, and read what rank 0 wrote."""
    for index, plan in enumerate(plans):
        save_plan(replace(plan, cluster=""), folder / f"plan-{index}.json")
    (folder / "task.json").write_text(json.dumps({"plans": len(plans), "rounds": rounds}))
    script = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    subprocess.run([*script, "-m", "benchmarks.predictions.local_runs", "--rank-of", str(folder)], check=True)
    found: list[dict[str, Any]] = json.loads((folder / "measured.json").read_text())
    return found


def run_rank(folder: Path) -> None:
    """One process: build all plans, take steps in turn, and (rank 0) write the times."""
    import torch
    import torch.distributed as dist

    from pipefit.run.config import TrainConfig
    from pipefit.run.session.process_use import scheduled_s
    from pipefit.run.session.rendezvous import World
    from pipefit.run.session.train import TrainingRun

    torch.set_num_threads(1)
    task = json.loads((folder / "task.json").read_text())
    world = World(torch.device("cpu"))
    world.open_store()
    world.start_group(300.0, 600.0)
    runs = []
    for index in range(task["plans"]):
        file = folder / f"plan-{index}.json"
        runs.append(TrainingRun(load_plan(file), TrainConfig(plan=str(file), run_dir=str(folder), steps=1000), world))
    order = random.Random(0)
    warm, rounds = 2, task["rounds"]
    times = torch.zeros(len(runs), rounds, 4, dtype=torch.float64)
    for number in range(warm + rounds):
        for index in order.sample(range(len(runs)), len(runs)):
            dist.barrier()
            ran, queued = scheduled_s()
            began, used = time.perf_counter(), time.process_time()
            loss, _, _ = runs[index].run_step(number)
            float(loss)
            if number >= warm:
                times[index, number - warm, 0] = time.perf_counter() - began
                times[index, number - warm, 1] = time.process_time() - used
                then = scheduled_s()
                times[index, number - warm, 2] = then[0] - ran
                times[index, number - warm, 3] = then[1] - queued
    slowest, total = times[..., 0].clone(), times[..., 1:].clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    if world.rank == 0:
        facts = [
            {"step_s": slowest[i].tolist()}
            | {key: total[i, :, column].tolist() for column, key in enumerate(("cpu_s", "ran_s", "queued_s"))}
            for i in range(len(runs))
        ]
        (folder / "measured.json").write_text(json.dumps(facts))
    world.stop_group()


def compare(plan: Plan, run: dict[str, Any], count: int) -> dict[str, Any]:
    """One row: predicted, measured, and how far they are apart."""
    assert plan.prediction is not None
    steps = sorted(run["step_s"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = min(1.0, cores / count)
    devices = [len(plan.groups[plan.stages[plan.order.placement.index(lane)].group].devices)
               for lane in range(len(plan.order.lanes))]  # fmt: skip
    queued = run["queued_s"] if count <= cores else [0.0] * len(run["queued_s"])
    shares = [ran / (ran + wait) if ran else 1.0 for ran, wait in zip(run["ran_s"], queued, strict=True)]
    busy = sum(lane.busy_s * many for lane, many in zip(plan.prediction.lanes, devices, strict=True))
    return {
        "plan": words(plan),
        "cuts": plan.decisions["cuts"],
        "predicted_s": plan.prediction.step_s,
        "median_s": statistics.median(steps),
        "fastest_quarter_s": statistics.mean(steps[: max(1, len(steps) // 4)]),
        "with_cores_s": statistics.median(step * had for step, had in zip(run["step_s"], shares, strict=True)),
        "share_with_a_core": statistics.median(shares),
        "spread": (steps[-1] - steps[0]) / steps[0],
        "predicted_cpu_s": busy * share,
        "cpu_s": statistics.median(run["cpu_s"]),
        "step_s": run["step_s"],
    }


def mean_error(rows: list[dict[str, Any]], key: str, predicted: str = "predicted_s") -> float:
    return statistics.mean(abs(row[predicted] / row[key] - 1) for row in rows)


def print_table(result: dict[str, Any]) -> None:
    TABLE.print_head()
    for row in result["rows"]:
        cells = [format_seconds(row["predicted_s"])]
        for key in MEASURES:
            cells += [format_seconds(row[key]), f"{row['predicted_s'] / row[key] - 1:+.1%}"]
        cells += [f"{row['share_with_a_core']:.0%}", f"{row['spread']:.0%}"]
        cells += [format_seconds(row["predicted_cpu_s"]), format_seconds(row["cpu_s"])]
        TABLE.print_row(*cells, f"  {row['plan']}")
    error = result["mean_error"]
    print(f"mean error: {error['median_s']:.1%} of the median step, {error['fastest_quarter_s']:.1%} of the fastest "
          f"quarter, {error['with_cores_s']:.1%} of the step with cores (target {result['target']:.0%}), "
          f"{result['mean_error_cpu']:.1%} of CPU time; "
          f"load average {result['load_average_before']} to {result['load_average_after']}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
