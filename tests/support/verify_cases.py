"""What the pool's processes run for the tests of `pipefit verify`: a rank of a real world, counted as verify counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support import worker_cases as cases

from pipefit.model.graph import Model
from pipefit.plan.types import Plan
from pipefit.run.stage import sharded_layers
from pipefit.run.transfers import comms
from pipefit.run.update import reduce
from pipefit.run.verify.verify import MeasuredMemory, count_on_cpu, work_phases


def counted_rank(plan: Plan, model: Model, steps: int = 2) -> MeasuredMemory:
    """Everything that this rank allocates from the first parameter on."""
    with patient_collectives():
        return count_on_cpu(work_phases(plan, model, torch.device("cpu"), steps, cases.comms()))


@contextmanager
def patient_collectives() -> Iterator[None]:
    """Let this thread be the last to let go of a collective: the profiler misses what gloo's threads free."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (comms, reduce, sharded_layers):
            patch.setattr(module, "all_gather", _patient(module.all_gather))
            patch.setattr(module, "reduce_scatter", _patient(module.reduce_scatter))
        patch.setattr(dist, "all_reduce", _patient_reduce(dist.all_reduce))
        yield


def _patient_reduce(call: Any) -> Any:
    def all_reduce(tensor: Any, async_op: bool = False, **options: Any) -> Any:
        work = _Work(call(tensor, async_op=True, **options))
        return work if async_op else work.wait()

    return all_reduce


def _patient(call: Any) -> Any:
    return lambda *arguments: _Work(call(*arguments))


class _Work:
    """A collective that this thread lets go of last."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        self.work.wait()
        time.sleep(0.005)
        self.work = None
