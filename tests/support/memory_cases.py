"""What the pool's processes run for the memory tests: one audited step of a plan."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.support import worker_cases as cases

from pipefit.model.graph import Model
from pipefit.plan.types import Plan
from pipefit.run.inputs.feeds import make_inputs
from pipefit.run.stage.memory_audit import AllocationAudit, MemoryUsage
from pipefit.run.update.optimizer import OptimizerConfig

COLLECTIVES = ("all_reduce", "all_gather_single", "reduce_scatter_single")


def run_on_copies(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective on copies in memory of numpy, run by another thread. Gloo lets go of its tensors on a thread of its
    own, where the profiler does not see the release."""

    def run(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
        copies = [torch.from_numpy(a.numpy().copy()) if isinstance(a, torch.Tensor) else a for a in arguments]
        thread = Thread(target=collective, args=copies, kwargs=options)
        thread.start()
        thread.join()
        arguments[0].copy_(copies[0])
        return SimpleNamespace(wait=lambda: None)

    return run


def audited_step(plan: Plan, model: Model, vocabulary: int, detail: bool = False) -> tuple[int, int, list[MemoryUsage]]:
    """(peak, rest) in bytes of what this rank allocates during a step, from the CPU allocator's own record, and with
    `detail` the same of every action of the lane.

    A step before it has made everything that stays: parameters, gradients and optimizer state do not count.
    """
    worker = cases.build(plan, model, OptimizerConfig(lr=1e-3, max_norm=0.0, steps=0, weight_decay=0.0))
    cases.train(worker, plan, vocabulary, range(1))
    rows, step_plan = cases.ArrayRows(plan.job.sequence, vocabulary), cases.step_rows(plan, 1)
    feeds = make_inputs(plan, worker.device, rows, step_plan, torch.device("cpu"))
    if detail:
        pairs: list[Any] = list(zip(worker.actions, worker._operations, strict=True))
        worker._operations = [AllocationAudit.mark_phase(str(action), operation) for action, operation in pairs]
    calls = {name: run_on_copies(getattr(dist, name)) for name in COLLECTIVES}
    with mock.patch.multiple(dist, **calls), AllocationAudit() as audit:
        worker.run_step(feeds, 1, step_plan.divisor)
    return audit.peak_bytes, audit.after_bytes, audit.usage
