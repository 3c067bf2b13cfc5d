"""What the pool's processes run for the worker's tests: a plan, some steps, and what came of them as numpy."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipefit.data.stepplan import StepPlan, batch_shape
from pipefit.model.graph import Model
from pipefit.optimizers import find_optimizer
from pipefit.plan.types import Plan
from pipefit.run.checkpoint import checkpoint
from pipefit.run.checkpoint.gather import gather_full
from pipefit.run.inputs.feeds import make_inputs
from pipefit.run.transfers.comms import CommGroups
from pipefit.run.update.optimizer import OptimizerConfig, optimizer_options
from pipefit.run.worker.build import build_worker, make_groups
from pipefit.run.worker.evaluation import LaneEvaluation
from pipefit.run.worker.state import all_pieces, gradient_pieces, model_pieces
from pipefit.run.worker.worker import Worker

_COMMS: list[CommGroups] = []
_ALONE: list[Any] = []

OPTIMIZER = OptimizerConfig(lr=1e-2, max_norm=0.0, steps=0, weight_decay=0.1)
ADAMW_OPTIONS: Any = optimizer_options(OPTIMIZER, find_optimizer("adamw"))


SEPARATOR = 7
"""Ends a document, where they are kept apart."""


class ArrayRows:
    """Rows of random tokens with some labels missing: row r is the same for every layout. Where documents are kept
    apart a row has one to four: some of one token, some ending with the row."""

    separator = SEPARATOR

    def __init__(self, sequence: int, vocabulary: int, documents: str = "joined") -> None:
        self.sequence, self.vocabulary, self.documents = sequence, vocabulary, documents

    def row(self, index: int) -> np.ndarray:
        row = np.random.default_rng(1000 + index).integers(0, self.vocabulary, self.sequence + 1)
        if self.documents == "apart":
            row[row == SEPARATOR] = SEPARATOR + 1
            row[[5, 2, (index * 5) % self.sequence][: index % 4]] = SEPARATOR
        if index % 3 == 0:
            row[-2:] = -100
        return row.astype(np.int64)


def step_rows(plan: Plan, step: int) -> StepPlan:
    """A step plan over ArrayRows: step k trains on the k-th batch of rows."""
    batch = plan.job.batch
    rows = np.arange(step * batch, (step + 1) * batch)
    labels = sum(plan.job.sequence - (1 if row % 3 == 0 else 0) * 2 for row in rows)
    return StepPlan(step=step, rows=rows, divisor=int(labels), shape=batch_shape(plan))


def comms(tagged: bool = True) -> CommGroups:
    """One of each kind per process: groups are kept between cases."""
    if not _COMMS:
        _COMMS.extend((CommGroups(tagged=False), CommGroups(tagged=True)))
    return _COMMS[tagged]


def prepare(plans: list[tuple[Plan, Model]], tagged: bool = True) -> None:
    """Make the process groups of plans, on all ranks of the world: also those that a plan leaves out."""
    if not _ALONE:
        _ALONE.extend(dist.new_group([rank]) for rank in range(dist.get_world_size()))
    for plan, model in plans:
        make_groups(plan, model, comms(tagged))


prepare.for_all = True  # type: ignore[attr-defined]


def forget_groups() -> None:
    """Destroy all process groups but the world. A gloo group has a thread that wakes a hundred times a second."""
    _ALONE.clear()
    _COMMS.clear()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def group_of(worker: Worker) -> Any:
    """The process group of a worker's ranks within the pool's world, also where it is one rank."""
    if worker.world is not None:
        return worker.world
    return _ALONE[dist.get_rank()]


def train(worker: Worker, plan: Plan, vocabulary: int, steps: range) -> list[tuple[float, float]]:
    """Run steps; (loss, gradient norm) of each."""
    rows = ArrayRows(plan.job.sequence, vocabulary, plan.job.documents)
    result = []
    for step in steps:
        step_plan = step_rows(plan, step)
        feeds = make_inputs(plan, worker.device, rows, step_plan, torch.device("cpu"))
        result.append(worker.run_step(feeds, step, step_plan.divisor).read_values())
    return result


def run_steps(
    plan: Plan,
    model: Model,
    vocabulary: int,
    steps: int = 1,
    tagged: bool = True,
    optimizer: OptimizerConfig = OPTIMIZER,
) -> dict[str, Any]:
    """Build, train, gather: losses and norms per step, the last gradients and the final parameters (on rank 0)."""
    worker = build_worker(plan, model, comms(tagged), torch.device("cpu"), optimizer)
    losses = train(worker, plan, vocabulary, range(steps))
    group = group_of(worker)
    gradients = {n: t.numpy() for n, t in gather_full(gradient_pieces(worker), group=group) if t is not None}
    pieces = model_pieces(worker, saving=True)
    parameters = {n.partition("/")[2]: t.numpy() for n, t in gather_full(pieces, group=group) if t is not None}
    return {"steps": losses, "gradients": gradients, "parameters": parameters}


def build(plan: Plan, model: Model, optimizer: OptimizerConfig = OPTIMIZER) -> Worker:
    """A fresh worker of this rank."""
    return build_worker(plan, model, comms(), torch.device("cpu"), optimizer)


def outcome(worker: Worker, losses: list[tuple[float, float]]) -> dict[str, Any]:
    """Losses and whole parameters."""
    pieces = model_pieces(worker, saving=True)
    whole = gather_full(pieces, group=group_of(worker))
    return {"steps": losses, "parameters": {n: t.double().numpy() for n, t in whole if t is not None}}


def interrupted(
    directory: str, first: Plan, second: Plan, model: Model, vocabulary: int, steps: tuple[int, int]
) -> dict[str, Any]:
    """Train under one plan, save, forget, load into a fresh worker under another plan, train on.

    Called on the ranks of the larger plan; ranks beyond a plan leave it to the others.
    """
    if dist.get_rank() < len(first.used_devices):
        worker = build(first, model)
        train(worker, first, vocabulary, range(steps[0]))
        checkpoint.save_checkpoint(
            Path(directory), steps[0], all_pieces(worker, saving=True), {}, group=group_of(worker)
        )
    if dist.get_rank() >= len(second.used_devices):
        return {}
    worker = build(second, model)
    while (folder := checkpoint.latest_checkpoint(Path(directory))) is None:
        time.sleep(0.05)
    checkpoint.load_checkpoint(folder, all_pieces(worker, saving=False), group=group_of(worker))
    return outcome(worker, train(worker, second, vocabulary, range(*steps)))


def uninterrupted(plan: Plan, model: Model, vocabulary: int, steps: tuple[int, int]) -> dict[str, Any]:
    """The same steps at a stretch; only what `interrupted` reports is reported."""
    worker = build(plan, model)
    losses = train(worker, plan, vocabulary, range(steps[1]))
    return outcome(worker, losses[steps[0] :])


def evaluate(plan: Plan, model: Model, vocabulary: int, train_first: bool) -> float:
    """The summed loss of an evaluation of batch 0, alone or after a training step with a learning rate of nothing."""
    worker = build(plan, model, OptimizerConfig(lr=1e-30, weight_decay=0.0))
    if train_first:
        train(worker, plan, vocabulary, range(1))
    feeds = make_inputs(
        plan,
        worker.device,
        ArrayRows(plan.job.sequence, vocabulary, plan.job.documents),
        step_rows(plan, 0),
        torch.device("cpu"),
    )
    evaluation = LaneEvaluation(worker)
    return [float(evaluation.run_batch(feeds)) for _ in range(2)][-1]


def traced(plan: Plan, model: Model, vocabulary: int, pause_s: float) -> tuple[list[Any], list[str]]:
    """(spans of the second step, actions that the pacing hook saw) of this rank; the hook sleeps after every F."""
    worker = build(plan, model)
    train(worker, plan, vocabulary, range(1))
    seen: list[str] = []

    def pace(action: Any, seconds: float) -> None:
        seen.append(str(action))
        assert seconds >= 0
        if action.kind == "F":
            time.sleep(pause_s)

    worker.tracing, worker.pace = True, pace
    train(worker, plan, vocabulary, range(1, 2))
    return [(span.lane, str(span.action), span.start_s, span.stop_s) for span in worker.trace], seen


def rows_of(plan: Plan, step: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(tokens, labels) of the whole batch of a step and its divisor: what one process sees."""
    step_plan = step_rows(plan, step)
    reader = ArrayRows(plan.job.sequence, vocabulary, plan.job.documents)
    block = torch.from_numpy(np.stack([reader.row(int(row)) for row in step_plan.rows]))
    tokens = block[:, :-1].clamp(min=0)
    return tokens, block[:, 1:].clone(), step_plan.divisor
