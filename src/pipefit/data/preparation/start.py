"""Workers by name: which kind a run was asked for."""

from __future__ import annotations

from typing import Literal

from pipefit.data.preparation.dispatch import Limits
from pipefit.data.preparation.executor import Executor, Maker
from pipefit.data.preparation.pool import Pool
from pipefit.data.preparation.processes import Processes
from pipefit.data.preparation.ray_workers import RayWorkers

Workers = Literal["processes", "ray"]


def start_pool(maker: Maker, count: int, kind: Workers = "processes", limits: Limits | None = None) -> Pool | None:
    """A pool of `count` workers: processes of this host, or actors of the Ray cluster that this environment names.
    None for none: whoever asks prepares by itself. Raises DataError if Ray is asked for and not there."""
    if not count:
        return None
    executor: Executor = RayWorkers(maker, count) if kind == "ray" else Processes(maker, count)
    return Pool(executor, limits)
