"""What the pool's processes run for the memory tests: one audited step of a plan."""

from __future__ import annotations

from typing import Any

import torch
from tests.support import worker_cases as cases
from tests.support.verify_cases import patient_collectives

from pipefit.model.graph import Model
from pipefit.plan.types import Plan
from pipefit.run.inputs.feeds import make_inputs
from pipefit.run.stage.memory_audit import AllocationAudit, MemoryUsage
from pipefit.run.update.optimizer import OptimizerConfig


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
    with patient_collectives(), AllocationAudit() as audit:
        worker.run_step(feeds, 1, step_plan.divisor)
    return audit.peak_bytes, audit.after_bytes, audit.usage
