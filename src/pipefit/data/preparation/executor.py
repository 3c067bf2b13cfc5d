"""The interface between the pool and its workers: workers by number, tasks in, events out."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

TaskKey = Hashable
"""The name of a task; tasks start in the order in which they were added."""


class HandlerFactory(Protocol):
    """The instructions that every worker receives once, by pickle: how to do any task."""

    def open(self) -> Callable[[Any], Any]:
        """Return the handler of requests; called once in every worker.

        Equal requests must give equal results on every worker and on every repetition.
        """
        ...


@dataclass(frozen=True, slots=True)
class WorkerStarting:
    """A worker was requested; `WorkerReady` or `WorkerDied` follows."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker is ready and idle."""

    worker: int


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """A worker has finished its task and is idle."""

    worker: int
    key: TaskKey
    result: Any


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A task raised an error; its worker is idle."""

    worker: int
    key: TaskKey
    error: Exception


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker has ended, and its task is lost. A new worker with a new number replaces it."""

    worker: int
    reason: str


WorkerEvent = WorkerStarting | WorkerReady | TaskFinished | TaskFailed | WorkerDied


class WorkerExecutor(Protocol):
    """Workers. All methods are called from one thread, `wake` from any."""

    count: int
    "The number of workers when none is being replaced."

    def submit(self, worker: int, key: TaskKey, request: Any) -> None:
        """Give an idle worker a task. Does not wait."""
        ...

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        """Return new events; an empty list after `timeout_s` at the latest, or when `wake` is called."""
        ...

    def wake(self) -> None:
        """Make `wait` return."""
        ...

    def kill(self, worker: int) -> None:
        """End a worker; `WorkerDied` follows."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...
