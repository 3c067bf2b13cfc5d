"""What our interpreter costs: microseconds per action against torch.distributed.pipelining, same schedule, same run.

Both sides run 1F1B over gloo in the same processes, one step of ours and one of PyTorch's in turn (ours first in every
other pair), on the same computation: the stages of ours are operator graphs, PyTorch's are plain modules of the same
parameters in a `PipelineStage` under `Schedule1F1B`. Two kinds of stages: **empty** (one multiplication by a
vector, so that autograd has something to do; what is timed is the machinery) and **four-layer** (Llama blocks). The
first stage has an embedding, the last one the loss (and a head), on both sides; empty stages use our loss function on
both, four-layer stages PyTorch's on PyTorch's side. Neither side reduces gradients or updates parameters.

A pair's ratio is our step time over PyTorch's, each the slowest rank's. The bound is the upper end of the 95 %
confidence interval of the mean ratio (Student's t on the logarithms). The losses of both sides must agree.

    python -m benchmarks.runtime.overhead [--quick] [--json PATH]
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.harness import Outcome, TextTable, benchmark_parser, run_benchmark
from benchmarks.processes.fixed_machine import FIXED_MACHINE
from benchmarks.processes.ranks import in_ranks, join_group
from benchmarks.processes.ratios import paired_ratio

AIM = 1.05
CASES = (("empty", 2), ("empty", 4), ("four-layer", 2), ("four-layer", 4))

TABLE = TextTable(
    ("stages", "<12"), ("processes", ">10"), ("pairs", ">7"), ("ours", ">18"), ("torch", ">18"), ("ratio", ">8"),
    ("95% bound", ">11"),
)  # fmt: skip


def main() -> int:
    return run_benchmark(benchmark_parser(__doc__, quick="20 short pairs per case"), measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure all cases."""
    os.environ["OMP_NUM_THREADS"] = "1"
    print("microseconds per action, wall clock of the slowest rank; in brackets CPU time of a rank's main thread")
    TABLE.print_head()
    results = []
    for kind, processes in CASES:
        results.append(measure(kind, processes, arguments.quick))
        print_row(results[-1])
    passed = all(case["losses_agree"] and case["ratio_bound_95"] <= AIM for case in results)
    return Outcome({"aim": AIM, "cases": results}, passed)


def measure(kind: str, processes: int, quick: bool) -> dict[str, Any]:
    """One case: pairs of steps in `processes` ranks; times of the slowest rank."""
    pairs = 20 if quick else (150 if kind == "empty" else 40)
    found = in_ranks(rank_main, processes, kind, pairs)
    return summary(kind, processes, *found)


def summary(
    kind: str,
    processes: int,
    times: tuple[list[float], list[float]],
    cpu_s: tuple[float, float],
    actions: int,
    losses: tuple[float, float],
) -> dict[str, Any]:
    """The figures of a case from the step times of its pairs."""
    ours, theirs = times
    ratio, ratio_95 = paired_ratio(theirs, ours)
    return {
        "stages": kind,
        "processes": processes,
        "pairs": len(ours),
        "actions_per_rank": actions,
        "ours_us_per_action": 1e6 * statistics.median(ours) / actions,
        "torch_us_per_action": 1e6 * statistics.median(theirs) / actions,
        "ours_cpu_us_per_action": 1e6 * cpu_s[0] / actions,
        "torch_cpu_us_per_action": 1e6 * cpu_s[1] / actions,
        "ratio": ratio,
        "ratio_bound_95": ratio_95[1],
        "losses": losses,
        "losses_agree": math.isclose(*losses, rel_tol=1e-4),
    }


def rank_main(rank: int, processes: int, port: int, kind: str, pairs: int, queue: Any) -> None:
    """One rank: builds both sides, warms them up, times pairs."""
    import torch
    import torch.distributed as dist

    join_group(rank, processes, port)
    model, plan = make_plan(kind, processes)
    ours, actions, parameters = our_side(model, plan)
    theirs = torch_side(kind, model, plan, rank, parameters)

    def timed(step: Callable[[], float]) -> tuple[float, float, float]:
        """(seconds of the slowest rank, CPU seconds of this rank's main thread, this rank's loss)."""
        dist.barrier()
        began, cpu = time.perf_counter(), time.thread_time()
        loss = step()
        cpu = time.thread_time() - cpu
        taken = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken), cpu, loss

    for _ in range(5):
        losses = (timed(ours)[2], timed(theirs)[2])
    times: tuple[list[float], list[float]] = ([], [])
    cpu_s = torch.zeros(2, dtype=torch.float64)
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds, cpu, _ = timed((ours, theirs)[side])
            times[side].append(seconds)
            cpu_s[side] += cpu / pairs / processes
    dist.all_reduce(cpu_s)
    if rank == processes - 1:
        queue.put((times, tuple(cpu_s.tolist()), actions, losses))
    dist.barrier()
    dist.destroy_process_group()


def make_plan(kind: str, processes: int) -> tuple[Any, Any]:
    """The model and its 1F1B plan, without reductions and optimizer."""
    from pipefit.cluster import local_cluster
    from pipefit.model.capture.layers import capture_family
    from pipefit.model.registry import describe_config
    from pipefit.plan.evaluate.planner_context import build_plan
    from pipefit.plan.request.decisions import ParallelConfig
    from pipefit.plan.types import Job
    from pipefit.schedule.actions import Schedule, format_lanes

    microbatches = 8 * processes
    if kind == "empty":
        model = empty_model(processes)
        job = Job(batch=microbatches, sequence=8, precision="float32")
        cuts = tuple(range(2, processes + 1))
    else:
        config = {
            "model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 344,
            "num_hidden_layers": 4 * processes, "num_attention_heads": 4, "num_key_value_heads": 4,
        }  # fmt: skip
        described = describe_config(config, "four-layer", "benchmark")
        model = capture_family(described.family, described.config)
        job = Job(batch=microbatches, sequence=64, precision="float32")
        cuts = tuple(1 + 4 * stage for stage in range(1, processes))
    decisions = ParallelConfig(cuts=cuts, microbatches=microbatches, schedule="1f1b")
    plan = build_plan(model, local_cluster(processes, FIXED_MACHINE), job, decisions)
    schedule: Schedule = plan.order.to_schedule()
    lanes = tuple(tuple(a for a in lane if a.kind not in ("NORM", "STEP")) for lane in schedule.lanes)
    return model, replace(plan, order=replace(plan.order, lanes=format_lanes(lanes)))


def empty_model(stages: int, width: int = 16) -> Any:
    """embed, then one multiplication by a vector per stage, then the loss."""
    from pipefit.model.graph import Graph, Layer, Model, ModelModule, Operator, ParameterSpec, TensorSpec

    x, shape = TensorSpec(name="x", shape=("B", "T", width)), ("B", "T", width)
    tokens = TensorSpec(name="tokens", shape=("B", "T"), dtype="int64", role="tokens")
    labels = TensorSpec(name="labels", shape=("B", "T"), dtype="int64", role="labels")

    def graph(inputs: tuple[TensorSpec, ...], operator: Operator, out: TensorSpec, *parameters: ParameterSpec) -> Graph:
        return Graph(inputs=inputs, outputs=(out.name,), operators=(operator,), parameters=parameters, tensors=(out,))

    y = TensorSpec(name="y", shape=shape)
    graphs = {
        "embed": graph(
            (tokens,), Operator(kind="embedding", inputs=("tokens", "weight"), outputs=("y",)), y,
            ParameterSpec(name="weight", shape=(width, width)),
        ),
        "scale": graph(
            (x,), Operator(kind="mul", inputs=("x", "weight"), outputs=("y",)), y,
            ParameterSpec(name="weight", shape=(width,)),
        ),
        "loss": graph(
            (x, labels),
            Operator(
                kind="cross_entropy", inputs=("x", "labels"), outputs=("loss",), attributes={"ignore_index": -100}
            ),
            TensorSpec(name="loss", shape=(), dtype="float32"),
        ),
    }  # fmt: skip
    layers = [Layer(name="embed", graph="embed", parameters={"weight": "embed.weight"})]
    layers += [Layer(name=f"scale.{i}", graph="scale", parameters={"weight": f"scale.{i}"}) for i in range(stages)]
    layers.append(Layer(name="loss", graph="loss", parameters={}))
    return Model(
        family="empty", config={}, modules=(ModelModule(name="language", layers=tuple(layers)),), graphs=graphs
    )


def our_side(model: Any, plan: Any) -> tuple[Callable[[], float], int, dict[str, Any]]:
    """(a step that returns this rank's loss, actions of this rank's lane, parameters by global name)."""
    import torch

    from pipefit.data.stepplan import StepPlan, batch_shape
    from pipefit.run.inputs.feeds import make_inputs
    from pipefit.run.transfers.comms import CommGroups
    from pipefit.run.update.optimizer import OptimizerConfig
    from pipefit.run.worker.build import build_worker

    worker = build_worker(plan, model, CommGroups(), torch.device("cpu"), OptimizerConfig())
    step_plan = StepPlan(
        step=0, rows=np.arange(plan.job.batch), divisor=plan.job.batch * plan.job.sequence, shape=batch_shape(plan)
    )
    feeds = make_inputs(plan, worker.device, Text(plan), step_plan, torch.device("cpu"))

    def step() -> float:
        worker.run_step(feeds, 0, step_plan.divisor)
        return float(worker.local_loss) / step_plan.divisor

    parameters = {name: p for program in worker.programs.values() for name, p in program.parameters.items()}
    return step, len(worker.actions), parameters


class Text:
    """Rows of random tokens."""

    def __init__(self, plan: Any) -> None:
        vocabulary = plan.model.config.get("vocab_size", 16)
        self.rows = np.random.default_rng(0).integers(0, vocabulary, (plan.job.batch, plan.job.sequence + 1))

    def row(self, index: int) -> np.ndarray:
        return self.rows[index]


def torch_side(kind: str, model: Any, plan: Any, rank: int, parameters: dict[str, Any]) -> Callable[[], float]:
    """PyTorch's own pipeline on plain modules that start from the same values."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    module: nn.Module = EmptyStage(plan, rank) if kind == "empty" else layer_stage(plan, rank)
    for name, parameter in module.global_names().items():
        parameter.data.copy_(parameters[name])
    processes, microbatches = len(plan.stages), plan.order.microbatches
    stage = PipelineStage(module, rank, processes, torch.device("cpu"))
    rows = torch.from_numpy(Text(plan).rows)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    divisor = tokens.numel()

    def plain_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")

    loss_of = our_loss if kind == "empty" else plain_loss
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of, scale_grads=False)
    first, last = rank == 0, rank == processes - 1

    def step() -> float:
        module.zero_grad(set_to_none=False)
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if first else ()
        if last:
            schedule.step(*inputs, target=labels, losses=losses, return_outputs=False)
        else:
            schedule.step(*inputs, return_outputs=False)
        return float(torch.stack([loss.detach() for loss in losses]).sum()) / divisor if last else 0.0

    return step


def our_loss(logits: Any, target: Any) -> Any:
    """Our own cross-entropy: between empty stages the loss must not make the difference."""
    import torch

    from pipefit.run.ops.cross_entropy import _CrossEntropy

    return _CrossEntropy.apply(logits, target, -100, torch.float32)


def EmptyStage(plan: Any, rank: int) -> Any:
    """The plain module of an empty stage."""
    import torch
    from torch import nn

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 16) if rank == 0 else None
            self.scale = nn.Parameter(torch.empty(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x if self.embed is None else self.embed(x)) * self.scale

        def global_names(self) -> dict[str, nn.Parameter]:
            names = {f"scale.{rank}": self.scale}
            return names if self.embed is None else {**names, "embed.weight": self.embed.weight}

    return Stage()


def layer_stage(plan: Any, rank: int) -> Any:
    """The plain modules of a stage of Llama layers; the loss is the schedule's."""
    import torch
    from torch import nn

    from pipefit.model.registry import build_layers

    start, stop = plan.stages[rank].layers
    layers = build_layers(plan.model.family, plan.model.config, device="cpu", dtype=torch.float32)[start:stop]
    chosen = [layer for layer in layers if layer.layer_name != "loss"]

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(chosen)
            self.register_buffer("positions", torch.arange(plan.job.sequence)[None])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, self.positions) if layer.layer_name.startswith("layers.") else layer(x)
            return x

        def global_names(self) -> dict[str, nn.Parameter]:
            return {layer.parameter_names[k]: p for layer in self.layers for k, p in layer.named_parameters()}

    return Stage()


def print_row(case: dict[str, Any]) -> None:
    sides = (f"{case[f'{s}_us_per_action']:.1f} ({case[f'{s}_cpu_us_per_action']:.1f})" for s in ("ours", "torch"))
    note = "" if case["losses_agree"] else f"  losses differ: {case['losses']}"
    ratios = f"{case['ratio']:.3f}", f"{case['ratio_bound_95']:.3f}"
    TABLE.print_row(case["stages"], case["processes"], case["pairs"], *sides, *ratios, note=note)


if __name__ == "__main__":
    sys.exit(main())
