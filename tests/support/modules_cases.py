"""What the pool's processes run for plans of several modules."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.support import modules_toys as toys
from tests.support.worker_cases import OPTIMIZER, comms, group_of

from pipefit.model.graph import Model
from pipefit.plan.types import Plan
from pipefit.run.checkpoint import checkpoint
from pipefit.run.checkpoint.gather import gather_full
from pipefit.run.update.optimizer import OptimizerConfig
from pipefit.run.worker.build import build_worker
from pipefit.run.worker.evaluation import LaneEvaluation
from pipefit.run.worker.state import all_pieces, gradient_pieces, model_pieces
from pipefit.run.worker.worker import Worker


def build(plan: Plan, model: Model, tagged: bool = True, optimizer: OptimizerConfig = OPTIMIZER) -> Worker:
    """A fresh worker of this rank."""
    return build_worker(plan, model, comms(tagged), torch.device("cpu"), optimizer)


def train(worker: Worker, steps: range) -> list[tuple[float, float]]:
    """(loss, gradient norm) of steps."""
    names, result = names_of(worker), []
    for step in steps:
        feeds = toys.feeds(worker.plan, names, worker.device, step)
        result.append(worker.run_step(feeds, step, toys.divisors(names, step), toys.images(names, step)).read_values())
    return result


def names_of(worker: Worker) -> tuple[str, ...]:
    """The modules of the worker's plan."""
    return tuple(dict.fromkeys(stage.module for stage in worker.plan.stages))


def run_steps(plan: Plan, model: Model, steps: int = 1, tagged: bool = True, first: int = 0) -> dict[str, Any]:
    """Losses and norms by step; the last gradients and the final parameters, on rank 0."""
    worker = build(plan, model, tagged)
    losses = train(worker, range(first, first + steps))
    group = group_of(worker)
    gradients = {n: t.numpy() for n, t in gather_full(gradient_pieces(worker), group=group) if t is not None}
    pieces = model_pieces(worker, saving=True)
    parameters = {n.partition("/")[2]: t.numpy() for n, t in gather_full(pieces, group=group) if t is not None}
    return {"steps": losses, "gradients": gradients, "parameters": parameters}


def evaluated(plan: Plan, model: Model) -> np.ndarray:
    """Summed losses by module of batch 0, before any training."""
    worker = build(plan, model)
    names = names_of(worker)
    return LaneEvaluation(worker).run_batch(toys.feeds(plan, names, worker.device, 0), toys.images(names, 0)).numpy()


def resumed(directory: str, first: Plan, second: Plan, model: Model) -> list[tuple[float, float]]:
    """(loss, gradient norm) of steps 2 and 3 under one plan, behind two steps and a checkpoint under another. Called on
    the ranks of the larger one."""
    if dist.get_rank() < len(first.used_devices):
        worker = build(first, model)
        train(worker, range(2))
        checkpoint.save_checkpoint(Path(directory), 2, all_pieces(worker, saving=True), {}, group=group_of(worker))
    if dist.get_rank() >= len(second.used_devices):
        return []
    worker = build(second, model)
    while (folder := checkpoint.latest_checkpoint(Path(directory))) is None:
        time.sleep(0.05)
    checkpoint.load_checkpoint(folder, all_pieces(worker, saving=False), group=group_of(worker))
    return train(worker, range(2, 4))
