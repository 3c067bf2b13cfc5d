"""What the pool needs of whoever runs tasks: workers by number, tasks in, events out."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

Key = Hashable
"""The name of a task; tasks start in the order of their addition."""


class HandlerFactory(Protocol):
    """What workers are told once: how to do any task. It travels by pickle."""

    def open(self) -> Callable[[Any], Any]:
        """Called once in every worker; what it gives is called with each request. Equal requests must give equal
        results, whichever worker does them and however often."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerStarting:
    """A worker has been asked for; `WorkerReady` or `WorkerDied` follows."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker is there and idle."""

    worker: int


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """A worker has done its task and is idle."""

    worker: int
    key: Key
    result: Any


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A task raised an error; its worker is idle."""

    worker: int
    key: Key
    error: Exception


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker is gone, and what it did is lost. Another one, of another number, takes its place."""

    worker: int
    reason: str


Event = WorkerStarting | WorkerReady | TaskFinished | TaskFailed | WorkerDied


class WorkerExecutor(Protocol):
    """Workers. All methods are called from one thread, `wake` from any."""

    count: int
    "Of the workers that are there when none is being replaced."

    def submit(self, worker: int, key: Key, request: Any) -> None:
        """Give an idle worker a task. Does not wait."""
        ...

    def wait(self, timeout_s: float) -> list[Event]:
        """What has happened; at the latest after `timeout_s`, or when `wake` is called, an empty list."""
        ...

    def wake(self) -> None:
        """Let `wait` return."""
        ...

    def kill(self, worker: int) -> None:
        """End a worker; `WorkerDied` follows."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...
