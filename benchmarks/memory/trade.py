"""The planner's choice of schedule against fixed ones, in measured paced runs: short and long sequences, tight memory.

Each case is an 8B model on four emulated devices as the lanes of one pipeline. Sequences stay uncut (for slices see
`token_slices/sections.py`). The planner chooses freely, and once for each fixed schedule with that one pinned
(microbatches, recomputation and cuts its own); plans that do not fit are left out. Four real processes then run every
plan's own lanes over gloo: a small model with as many layers does real arithmetic and real messages, and every action
sleeps until the emulated device would be done (`processes/paced_links.py`), by the plan's own cost table, scaled so
that a step takes about a second. The plans take turns, in changing order; a ratio is a fixed schedule's step time over
the choice's, so above 1 the choice is faster; each step time is the slowest rank's.

    python -m benchmarks.memory.trade [--quick] [--json PATH]
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.harness import Outcome, TextTable, benchmark_parser, run_benchmark
from benchmarks.processes.fixed_machine import FIXED_MACHINE
from benchmarks.processes.paced import be_punctual
from benchmarks.processes.paced_links import LinkedPace, stamps
from benchmarks.processes.ranks import in_ranks, join_group
from benchmarks.processes.ratios import paired_ratio
from pipefit.plan.request.constraints import Constraints

FIXED = ("1f1b", "interleaved-1f1b", "zb-v", "v-half", "v-min")
MODEL, LANES = "llama-3-8b", 4
STEP_S, QUICK_STEP_S = 1.2, 0.5
"""What a step of the chosen plan is scaled to."""
LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Case:
    """One job."""

    name: str
    sequence: int
    memory_bytes: float = 0.0
    "Of a device; 0: as its data sheet says."
    batch: int = 16


CASES = (
    Case("short sequences", 1024),
    Case("long sequences", 8192),
    Case("tight memory", 4096, memory_bytes=50e9),
)

QUICK = CASES[::2]

TABLE = TextTable(
    ("schedule", "<18"), ("microbatches", ">13"), ("recompute", ">11"), ("predicted", ">11"), ("measured", ">10"),
    ("ratio", ">8"), ("95 %", ">13"), indent="  ",
)  # fmt: skip


def main() -> int:
    parser = benchmark_parser(__doc__, quick="three short rounds of two fixed schedules")
    parser.add_argument("--rounds", type=int, default=12, help="steps of every plan")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Run the choice and the fixed schedules of every case."""
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds, step_s = (3, QUICK_STEP_S) if arguments.quick else (arguments.rounds, STEP_S)
    cases, fixed = (QUICK, FIXED[1:3]) if arguments.quick else (CASES, FIXED)
    plans = [make_plans(case, fixed) for case in cases]
    scales = [step_s / each["chosen"]["predicted_s"] for each in plans]
    found = run([list(each.values()) for each in plans], rounds, scales)
    results = [
        summary(case, each, fixed, scale, one)
        for case, each, scale, one in zip(cases, plans, scales, found, strict=True)
    ]
    for result in results:
        print_case(result)
    passed = all(row["ratio_95"][1] >= 1.0 for case in results for row in case["fixed"])
    return Outcome({"lanes": LANES, "rounds": rounds, "cases": results}, passed)


def summary(
    case: Case, plans: dict[str, dict[str, Any]], fixed: tuple[str, ...], scale: float, found: dict[str, Any]
) -> dict[str, Any]:
    """The figures of a case; times are those of the emulated devices."""
    chosen = plans["chosen"]
    seconds = {name: [value / scale for value in each] for name, each in zip(plans, found["seconds"], strict=True)}
    return {
        "name": case.name,
        "sequence": case.sequence,
        "batch": case.batch,
        "limit_bytes": chosen["limit_bytes"],
        "scale": scale,
        "chosen": {**facts(chosen), "measured_s": statistics.median(seconds["chosen"])},
        "fixed": [
            {**facts(plans[name]), **compare(seconds["chosen"], seconds[name])} for name in plans if name != "chosen"
        ],
        "do_not_fit": [name for name in fixed if name not in plans],
        "late_share": found["late_share"],
    }


def facts(plan: dict[str, Any]) -> dict[str, Any]:
    return {key: plan[key] for key in ("schedule", "microbatches", "recompute", "predicted_s", "peak_bytes")}


def compare(chosen: list[float], other: list[float]) -> dict[str, Any]:
    """The ratio of paired steps, with its 95 % confidence interval, and the median of the other's."""
    ratio, ratio_95 = paired_ratio(chosen, other)
    return {"ratio": ratio, "ratio_95": ratio_95, "measured_s": statistics.median(other)}


def make_plans(case: Case, fixed: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The planner's free choice, and its best plan for each fixed schedule that fits, ready to be run small."""
    from pipefit.cluster import parse_spec
    from pipefit.model.registry import open_model
    from pipefit.plan.evaluate.planner_context import PlannerContext
    from pipefit.plan.passes.fitted_orders import best_plans
    from pipefit.plan.types import Job

    cluster = parse_spec(f"{LANES}xA100-80")
    if case.memory_bytes:
        kinds = {name: replace(kind, memory_bytes=int(case.memory_bytes)) for name, kind in cluster.kinds.items()}
        cluster = replace(cluster, kinds=kinds)
    context = PlannerContext(open_model(MODEL), cluster)
    job = Job(batch=case.batch, sequence=case.sequence, precision="bfloat16")
    found: dict[str, dict[str, Any]] = {}
    for name in ("chosen", *fixed):
        constraints = Constraints(
            replicas=(1,), shards=(1,), devices=LANES, slices=1, schedule=None if name == "chosen" else name
        )
        fitting = best_plans(context, job, constraints).fitting
        if fitting:
            found[name] = emulated(fitting[0], case)
    return found


def emulated(best: Any, case: Case) -> dict[str, Any]:
    """What the ranks need of a plan: its decisions, lanes and costs."""
    decisions, simulation = best.decisions, best.simulation
    return {
        "schedule": decisions.schedule,
        "microbatches": decisions.microbatches,
        "recompute": list(decisions.recompute),
        "predicted_s": best.step_s,
        "peak_bytes": best.peak_bytes,
        "limit_bytes": best.limit_bytes,
        "batch": case.batch,
        "decisions": decisions,
        "lanes": simulation.timeline.schedule,
        "costs": simulation.costs,
    }


def run(cases: list[list[dict[str, Any]]], rounds: int, scales: list[float]) -> list[dict[str, Any]]:
    """Of every case the step times of each plan by round, from four processes."""
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    boards = [[context.RawArray("d", stamps(plan["costs"], plan["microbatches"])) for plan in plans] for plans in cases]
    found: list[dict[str, Any]] = in_ranks(rank_main, LANES, blocks(), cases, boards, rounds, scales, limit_s=LIMIT_S)
    return found


def rank_main(
    rank: int, count: int, port: int, blocks: int, cases: Any, boards: Any, rounds: int, scales: Any, results: Any
) -> None:
    """One rank: builds a worker for every plan of a case, then steps them in turn, case by case."""
    import torch.distributed as dist

    from pipefit.run.transfers.comms import CommGroups

    be_punctual()
    join_group(rank, count, port)
    comms, model, found = CommGroups(), small_model(blocks), []
    for plans, own_boards, scale in zip(cases, boards, scales, strict=True):
        sides = [Side(plan, model, comms, board, scale) for plan, board in zip(plans, own_boards, strict=True)]
        found.append(take_turns(sides, rounds))
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def take_turns(sides: list[Side], rounds: int) -> dict[str, Any]:
    """The steps of all plans of a case, in turns of changing order, after one that warms up."""
    import torch
    import torch.distributed as dist

    for side in sides:
        timed(side)
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds):
        order = range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides)))
        for index in order:
            seconds[index].append(timed(sides[index]))
    late = torch.tensor([sum(s.pace.late for s in sides), sum(s.pace.actions for s in sides)], dtype=torch.float64)
    dist.all_reduce(late)
    return {"seconds": seconds, "late_share": float(late[0] / late[1])}


def timed(side: Side) -> float:
    """Seconds of the slowest rank, of a step that all begin together."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    side.step()
    taken = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


class Side:
    """One plan, run small: its cuts, placement and lanes on the small model."""

    def __init__(self, plan: dict[str, Any], model: Any, comms: Any, board: Any, scale: float) -> None:
        import torch

        from pipefit.cluster import local_cluster
        from pipefit.data.stepplan import StepPlan, batch_shape
        from pipefit.plan.evaluate.planner_context import PlannerContext
        from pipefit.plan.types import Job
        from pipefit.run.inputs.feeds import make_inputs
        from pipefit.run.update.optimizer import OptimizerConfig
        from pipefit.run.worker.build import build_worker

        decisions = replace(plan["decisions"], recompute=("none",), devices=())
        context = PlannerContext(model, local_cluster(LANES, FIXED_MACHINE))
        parts = context.make_skeleton(Job(batch=plan["batch"], sequence=8, precision="float32"), decisions)
        small = context.assemble_plan(parts, decisions, plan["lanes"])
        device = torch.device("cpu")
        self.worker = build_worker(small, model, comms, device, OptimizerConfig())
        self.divisor = small.job.batch * small.job.sequence
        rows = np.arange(small.job.batch)
        step_plan = StepPlan(step=0, rows=rows, divisor=self.divisor, shape=batch_shape(small))
        self.feeds = make_inputs(small, self.worker.device, Rows(small), step_plan, device)
        self.pace = LinkedPace(plan["costs"], small.order.placement, small.order.microbatches, board, scale)
        self.pace.attach(self.worker)

    def step(self) -> None:
        self.worker.run_step(self.feeds, 0, self.divisor)


class Rows:
    """Rows of random tokens."""

    def __init__(self, plan: Any) -> None:
        shape = (plan.job.batch, plan.job.sequence + 1)
        self.rows = np.random.default_rng(0).integers(0, plan.model.config["vocab_size"], shape)

    def row(self, index: int) -> np.ndarray:
        return self.rows[index]


def blocks() -> int:
    """Of the emulated model."""
    from pipefit.model.registry import open_model

    return int(open_model(MODEL).config["num_hidden_layers"])


def small_model(blocks: int) -> Any:
    """As many layers as the emulated model, each tiny."""
    from pipefit.model.capture.layers import capture_family
    from pipefit.model.registry import describe_config

    config = {
        "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": blocks, "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    described = describe_config(config, "small", "benchmark")
    return capture_family(described.family, described.config)


def print_case(case: dict[str, Any]) -> None:
    chosen = case["chosen"]
    print(
        f"{case['name']}: batch {case['batch']} x {case['sequence']}, {case['limit_bytes'] / 1e9:.1f} GB a device; "
        f"chosen {chosen['schedule']}, {chosen['microbatches']} microbatches, recompute {','.join(chosen['recompute'])}"
    )
    TABLE.print_head()
    for row in ({**chosen, "schedule": "the choice", "ratio": 1.0, "ratio_95": None}, *case["fixed"]):
        low_high = "" if row["ratio_95"] is None else f"{row['ratio_95'][0]:.3f}-{row['ratio_95'][1]:.3f}"
        recompute = row["recompute"][0] if len(set(row["recompute"])) == 1 else "by stage"
        steps = f"{row['predicted_s']:.3f} s", f"{row['measured_s']:.3f} s"
        TABLE.print_row(row["schedule"], row["microbatches"], recompute, *steps, f"{row['ratio']:.3f}", low_high)
    if case["do_not_fit"]:
        print(f"  does not fit: {', '.join(case['do_not_fit'])}")
    print(f"  actions whose arithmetic was too slow for the pace: {case['late_share']:.2%}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
