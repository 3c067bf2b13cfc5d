"""Slices on real arithmetic: two processes as two stages, two sequences, nothing emulated.

A Llama whose layers compute for seconds; every plan is run by the same two processes, the plans in turn and in changing
order, so that a slow phase of the machine meets all of them; where the user may, they go before other work. A ratio is
that of steps of one round: the best schedule without slices over a sliced one, with the 95 % confidence interval of its
mean. Slices are cut to equal FLOPs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import TextTable
from benchmarks.processes.fixed_machine import FIXED_MACHINE
from benchmarks.processes.paced import be_punctual
from benchmarks.processes.ranks import in_ranks, join_group
from benchmarks.processes.ratios import paired_ratio
from benchmarks.token_slices.targets import at_least
from pipefit.cluster import local_cluster
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Model
from pipefit.model.registry import describe_config
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.slicing.cuts import equal_cost
from pipefit.plan.types import Job, Plan
from pipefit.schedule.problem import looped_placement as looped

STAGES = SEQUENCES = 2
LIMIT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Size:
    """Of a run."""

    width: int
    layers: int
    sequence: int
    rounds: int
    slices: tuple[int, ...]
    "Counts of slices that are tried."
    grain: int = 64


FULL = Size(width=256, layers=8, sequence=2048, rounds=6, slices=(2, 4, 8))
QUICK = Size(width=128, layers=4, sequence=512, rounds=3, slices=(4,))


def measure(quick: bool = False) -> dict[str, Any]:
    """The whole section."""
    os.environ["OMP_NUM_THREADS"] = "1"
    size = QUICK if quick else FULL
    model = model_of(size)
    plans = plans_of(size, model, quick)
    seconds, cpu_s, losses = in_ranks(rank_main, STAGES, model, plans, size, limit_s=LIMIT_S)
    table = dict(zip(plans, seconds, strict=True))
    whole_s = dict(zip(plans, cpu_s, strict=True))["1f1b"]
    unsliced = [name for name in plans if "slices" not in name]
    base = min(unsliced, key=lambda name: statistics.median(table[name]))
    rows = [
        {
            "plan": name,
            "slices": list(plan.order.slices),
            "median_s": statistics.median(table[name]),
            "limit": 1.0 if name in unsliced else limit(len(plan.order.slices)),
            **dict(zip(("ratio", "ratio_95"), paired_ratio(table[name], table[base]), strict=True)),
            "cpu_s": own_s,
            "slice_overhead_s": (own_s - whole_s) / (STAGES * SEQUENCES * max(1, len(plan.order.slices) - 1)),
            "loss": loss,
        }
        for (name, plan), own_s, loss in zip(plans.items(), cpu_s, losses, strict=True)
    ]
    best = max((row for row in rows if row["plan"] not in unsliced), key=lambda row: row["ratio"])
    spread = max(losses) / min(losses) - 1
    return {
        "size": {name: getattr(size, name) for name in Size.__dataclass_fields__},
        "baseline": base,
        "rows": rows,
        "best": best["plan"],
        "loss_spread": spread,
        "targets": [
            at_least(f"real arithmetic, {best['plan']} over {base}: low end of the ratio", best["ratio_95"][0], 1.0)
        ],
    }


def limit(slices: int) -> float:
    """What slices can give at most: (m + K - 1) / (m + (K - 1) / s)."""
    return (SEQUENCES + STAGES - 1) / (SEQUENCES + (STAGES - 1) / slices)


def model_of(size: Size) -> Model:
    """A Llama without a large vocabulary: its layers are what is timed."""
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": size.width, "intermediate_size": 3 * size.width,
        "num_hidden_layers": size.layers, "num_attention_heads": size.width // 32,
        "num_key_value_heads": size.width // 32, "max_position_embeddings": size.sequence,
        "tie_word_embeddings": False,
    }  # fmt: skip
    described = describe_config(config, "real", "benchmark")
    return capture_family(described.family, described.config)


def plans_of(size: Size, model: Model, quick: bool) -> dict[str, Plan]:
    """By name: the schedules without slices, and slice-1F1B with every count."""
    job = Job(batch=SEQUENCES, sequence=size.sequence, precision="float32")
    blocks = size.layers // STAGES
    cuts = (1 + blocks,)
    halves = tuple(1 + blocks // 2 * stage for stage in range(1, 2 * STAGES))
    build = partial(build_plan, model, local_cluster(STAGES, FIXED_MACHINE), job)
    each: dict[str, ParallelConfig] = {}
    for name in ("1f1b",) if quick else ("gpipe", "1f1b"):
        each[name] = ParallelConfig(stages=STAGES, cuts=cuts, microbatches=SEQUENCES, schedule=name)
    if not quick:
        each["interleaved-1f1b"] = ParallelConfig(
            stages=2 * STAGES, cuts=halves, placement=looped(STAGES), microbatches=SEQUENCES,
            schedule="interleaved-1f1b",
        )  # fmt: skip
    for count in size.slices:
        slices = equal_cost(size.sequence, count, partial(flops, size), size.grain)
        each[f"1f1b, {count} slices"] = ParallelConfig(
            stages=STAGES, cuts=cuts, microbatches=SEQUENCES, schedule="1f1b", slices=slices
        )
    return {name: build(decisions) for name, decisions in each.items()}


def flops(size: Size, tokens: Any, past: Any) -> Any:
    """Of a slice's forward in one layer, in units of the width squared: products, and attention's two below the
    diagonal."""
    return tokens * 2 * (4 + 9) + 4 * tokens * (past + tokens / 2) / size.width


def rank_main(
    rank: int, count: int, port: int, model: Model, plans: Mapping[str, Plan], size: Size, results: Any
) -> None:
    """One process: a worker for every plan, steps in turn."""
    import torch.distributed as dist

    from pipefit.run.transfers.comms import CommGroups

    be_punctual()
    join_group(rank, count, port)
    comms = CommGroups()
    sides = [Side(plan, model, comms) for plan in plans.values()]
    for side in sides:
        side.step()
    seconds: list[list[float]] = [[] for _ in sides]
    cpu_s = [0.0 for _ in sides]
    for turn in range(size.rounds):
        order = range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides)))
        for index in order:
            wall_s, own_s = timed(sides[index])
            seconds[index].append(wall_s)
            cpu_s[index] += own_s / size.rounds
    losses = [side.loss for side in sides]
    if rank == 0:
        results.put((seconds, cpu_s, losses))
    dist.barrier()
    dist.destroy_process_group()


def timed(side: Side) -> tuple[float, float]:
    """Of a step that both processes begin together: (seconds of the slower one, CPU seconds of both together)."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    began, before = time.perf_counter(), time.process_time()
    side.step()
    taken = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    used = torch.tensor([time.process_time() - before], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return float(taken), float(used)


class Side:
    """One plan's worker, always with the same rows. The learning rate is nothing, so that the loss stays."""

    def __init__(self, plan: Plan, model: Model, comms: Any) -> None:
        import torch

        from pipefit.data.stepplan import StepPlan, batch_shape
        from pipefit.run.inputs.feeds import make_inputs
        from pipefit.run.update.optimizer import OptimizerConfig
        from pipefit.run.worker.build import build_worker

        device = torch.device("cpu")
        still = OptimizerConfig(lr=1e-30, weight_decay=0.0)  # changes no value
        self.worker = build_worker(plan, model, comms, device, still)
        self.divisor = plan.job.batch * plan.job.sequence
        step_plan = StepPlan(step=0, rows=np.arange(plan.job.batch), divisor=self.divisor, shape=batch_shape(plan))
        self.feeds = make_inputs(plan, self.worker.device, Rows(plan), step_plan, device)
        self.loss = 0.0

    def step(self) -> None:
        self.loss = float(self.worker.run_step(self.feeds, 0, self.divisor).read_values()[0])


class Rows:
    """Rows of random tokens."""

    def __init__(self, plan: Plan) -> None:
        shape = (plan.job.batch, plan.job.sequence + 1)
        self.rows = np.random.default_rng(0).integers(0, plan.model.config["vocab_size"], shape)

    def row(self, index: int) -> np.ndarray:
        return self.rows[index]


def show(found: Mapping[str, Any]) -> None:
    """The table."""
    size = found["size"]
    print(
        f"real arithmetic: {STAGES} processes, {SEQUENCES} sequences of {size['sequence']} tokens, width "
        f"{size['width']}, {size['layers']} layers; ratios to {found['baseline']}"
    )
    table = TextTable(
        ("plan", "<20"), ("median", ">9"), ("ratio", ">8"), ("95 %", ">13"), ("limit", ">7"), ("CPU", ">9"),
        ("each slice", ">13"), indent="  ",
    )  # fmt: skip
    table.print_head()
    rows: Sequence[Mapping[str, Any]] = found["rows"]
    for row in rows:
        low, high = row["ratio_95"]
        ratios = f"{row['ratio']:.3f}", f"{low:.3f}-{high:.3f}", f"{row['limit']:.2f}"
        slice_ms = 1e3 * row["slice_overhead_s"]
        table.print_row(row["plan"], f"{row['median_s']:.3f} s", *ratios, f"{row['cpu_s']:.3f} s", f"{slice_ms:.2f} ms")
    print(f"  losses differ by {found['loss_spread']:.1e}")
