"""Workers by name: which kind a run was asked for."""

from __future__ import annotations

from typing import Literal

from pipefit.data.preparation.dispatch import DispatchLimits
from pipefit.data.preparation.executor import HandlerFactory, WorkerExecutor
from pipefit.data.preparation.pool import WorkerPool
from pipefit.data.preparation.processes import ProcessWorkers
from pipefit.data.preparation.ray_workers import RayWorkers

Workers = Literal["processes", "ray"]


def start_pool(
    maker: HandlerFactory, count: int, kind: Workers = "processes", limits: DispatchLimits | None = None
) -> WorkerPool | None:
    """A pool of `count` workers: processes of this host, or actors of the Ray cluster that this environment names.
    None for none: whoever asks prepares by itself. Raises DataError if Ray is asked for and not there."""
    if not count:
        return None
    executor: WorkerExecutor = RayWorkers(maker, count) if kind == "ray" else ProcessWorkers(maker, count)
    return WorkerPool(executor, limits)
