"""Start a worker pool of the requested kind."""

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
    """Start a pool of `count` workers: processes of this host, or actors of the Ray cluster in this environment.

    Returns None for 0 workers: the caller then prepares data itself. Raises DataError if Ray is requested but
    unavailable.
    """
    if not count:
        return None
    executor: WorkerExecutor = RayWorkers(maker, count) if kind == "ray" else ProcessWorkers(maker, count)
    return WorkerPool(executor, limits)
