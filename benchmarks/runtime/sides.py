"""The two sides of `throughput.py`: one small model, run by our worker and by torch.distributed.pipelining.

The model is an embedding, residual linear layers in float64 (so that I and W differ) and a cross-entropy. Both sides
start from the same values and train on the same rows; neither reduces gradients nor updates parameters.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes.fixed_machine import FIXED_MACHINE
from benchmarks.processes.paced import Pace, Times
from pipefit.schedule import FAMILIES, ScheduleProblem
from pipefit.schedule.actions import Schedule
from pipefit.schedule.lowering.lower import lower_schedule
from pipefit.schedule.text.csv_io import to_csv

WIDTH, TOKENS = 64, 256
MESSAGE_BYTES = TOKENS * WIDTH * 8
"""Of the hidden state of a microbatch, and of its gradient: float64."""

Step = Callable[[], float]
"""A training step; gives this rank's part of the mean loss."""


def computed(name: str, devices: int, microbatches: int) -> Schedule:
    """A family's schedule on its own placement."""
    family = FAMILIES[name]
    return family(ScheduleProblem(placement=family.placement(devices), microbatches=microbatches))


def our_lowering(schedule: Schedule, times: Times, transfer_s: float) -> Schedule:
    """The schedule with its transfers where we put them, knowing the times."""
    costs = times.costs(schedule.placement, transfer_s)
    return lower_schedule(schedule, costs=costs, reductions=(), optimizer=False)


@cache
def make_model(chunks: int) -> Any:
    """embed, `chunks` times x + W x, loss."""
    from pipefit.model.graph import Graph, Layer, Model, ModelModule, Operator, ParameterSpec, TensorSpec

    shape = ("B", "T", WIDTH)
    x, y = TensorSpec(name="x", shape=shape), TensorSpec(name="y", shape=shape)
    tokens = TensorSpec(name="tokens", shape=("B", "T"), dtype="int64", role="tokens")
    labels = TensorSpec(name="labels", shape=("B", "T"), dtype="int64", role="labels")
    weight = ParameterSpec(name="weight", shape=(WIDTH, WIDTH))
    graphs = {
        "embed": Graph(
            inputs=(tokens,), outputs=("y",), parameters=(weight,), tensors=(y,),
            operators=(Operator(kind="embedding", inputs=("tokens", "weight"), outputs=("y",)),),
        ),
        "chunk": Graph(
            inputs=(x,), outputs=("y",), parameters=(weight,), tensors=(TensorSpec(name="wx", shape=shape), y),
            operators=(
                Operator(kind="linear", inputs=("x", "weight", ""), outputs=("wx",)),
                Operator(kind="add", inputs=("x", "wx"), outputs=("y",)),
            ),
        ),
        "loss": Graph(
            inputs=(x, labels), outputs=("loss",), parameters=(),
            tensors=(TensorSpec(name="loss", shape=(), dtype="float32"),),
            operators=(
                Operator(
                    kind="cross_entropy", inputs=("x", "labels"), outputs=("loss",), attributes={"ignore_index": -100}
                ),
            ),
        ),
    }  # fmt: skip
    layers = [Layer(name="embed", graph="embed", parameters={"weight": "embed"})]
    layers += [Layer(name=f"chunk.{i}", graph="chunk", parameters={"weight": f"chunk.{i}"}) for i in range(chunks)]
    layers.append(Layer(name="loss", graph="loss", parameters={}))
    modules = (ModelModule(name="language", layers=tuple(layers)),)
    return Model(family="paced", config={"initializer_range": 0.1}, modules=modules, graphs=graphs)


def make_plan(schedule: Schedule, chunks: int, times: Times, transfer_s: float) -> Any:
    """The plan of a schedule: equal chunks per stage, its transfers put in by the paced times."""
    from pipefit.cluster import local_cluster
    from pipefit.plan.assemble.order import make_schedule_plan
    from pipefit.plan.evaluate.planner_context import build_plan
    from pipefit.plan.request.decisions import ParallelConfig
    from pipefit.plan.types import Job

    each = chunks // schedule.num_stages
    decisions = ParallelConfig(
        cuts=tuple(1 + each * stage for stage in range(1, schedule.num_stages)),
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        schedule="gpipe",
    )
    job = Job(batch=schedule.microbatches, sequence=TOKENS, precision="float64")
    plan = build_plan(make_model(chunks), local_cluster(len(schedule.lanes), FIXED_MACHINE), job, decisions)
    return replace(plan, order=make_schedule_plan(our_lowering(schedule, times, transfer_s), plan.order.slices))


class Rows:
    """Rows of random tokens, the same on every rank."""

    def __init__(self, batch: int) -> None:
        self.rows = np.random.default_rng(0).integers(0, WIDTH, (batch, TOKENS + 1))

    def row(self, index: int) -> np.ndarray:
        return self.rows[index]


class Ours:
    """Our worker on a plan."""

    def __init__(self, plan: Any, chunks: int, comms: Any, pace: Pace) -> None:
        import torch

        from pipefit.data.stepplan import StepPlan, batch_shape
        from pipefit.run.inputs.feeds import make_inputs
        from pipefit.run.update.optimizer import OptimizerConfig
        from pipefit.run.worker.build import build_worker

        device = torch.device("cpu")
        self.worker = build_worker(plan, make_model(chunks), comms, device, OptimizerConfig())
        self.divisor = plan.job.batch * TOKENS
        step_plan = StepPlan(step=0, rows=np.arange(plan.job.batch), divisor=self.divisor, shape=batch_shape(plan))
        self.feeds = make_inputs(plan, self.worker.device, Rows(plan.job.batch), step_plan, device)
        pace.ours(self.worker)

    def step(self) -> float:
        self.worker.run_step(self.feeds, 0, self.divisor)
        return float(self.worker.local_loss) / self.divisor

    def parameters(self) -> dict[str, Any]:
        programs = self.worker.programs.values()
        return {name: p.detach() for program in programs for name, p in program.parameters.items()}

    def gradients(self) -> dict[str, Any]:
        return {name: view for bucket in self.worker.buckets for name, view in bucket.views.items()}


class Stock:
    """PyTorch's pipelining on the same schedule: from its CSV, or the class that PyTorch has for it (`own_class`)."""

    def __init__(
        self, schedule: Schedule, chunks: int, rank: int, values: dict[str, Any], pace: Pace, own_class: str = ""
    ) -> None:
        import torch
        from torch.distributed.pipelining import PipelineStage

        each, count = chunks // schedule.num_stages, schedule.num_stages
        held = [stage for stage, lane in enumerate(schedule.placement) if lane == rank]
        self.modules = {stage: stage_module(stage, each, values) for stage in held}
        stages = [PipelineStage(self.modules[stage], stage, count, torch.device("cpu")) for stage in held]
        rows = torch.from_numpy(Rows(schedule.microbatches).rows)
        self.tokens, self.labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        self.first, self.last = 0 in held, count - 1 in held
        self.runtime = _stock_runtime(schedule, stages, self._loss, own_class)
        pace.stock(self.runtime, stages)

    def step(self) -> float:
        for module in self.modules.values():
            module.zero_grad(set_to_none=False)
        losses: list[Any] = []
        keywords = {"target": self.labels, "losses": losses} if self.last else {}
        self.runtime.step(*((self.tokens,) if self.first else ()), return_outputs=False, **keywords)
        return float(sum(loss.detach() for loss in losses)) if self.last else 0.0

    def gradients(self) -> dict[str, Any]:
        return {name: p.grad for module in self.modules.values() for name, p in module.global_names().items()}

    def _loss(self, logits: Any, target: Any) -> Any:
        from torch.nn import functional

        summed = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        return summed / self.labels.numel()


def _stock_runtime(schedule: Schedule, stages: list[Any], loss: Any, own_class: str) -> Any:
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    if own_class:
        made = getattr(pipelining, own_class)
        return made(stages[0], schedule.microbatches, loss_fn=loss, scale_grads=False)
    runtime = _PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=loss, scale_grads=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(to_csv(schedule))
        runtime._load_csv(str(path), format="compute_only")
    return runtime


def stage_module(stage: int, each: int, values: dict[str, Any]) -> Any:
    """The plain module of a stage with `each` chunks, starting from `values` by global name."""
    import torch
    from torch import nn

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Parameter(values["embed"].clone()) if stage == 0 else None
            names = [f"chunk.{stage * each + index}" for index in range(each)]
            self.names, self.weights = names, nn.ParameterList(values[name].clone() for name in names)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.embed is not None:
                x = nn.functional.embedding(x, self.embed)
            for weight in self.weights:
                x = x + nn.functional.linear(x, weight)
            return x

        def global_names(self) -> dict[str, nn.Parameter]:
            named = dict(zip(self.names, self.weights, strict=True))
            return named if self.embed is None else {**named, "embed": self.embed}

    return Stage()
