"""Assign preparation tasks to workers: a state machine over events, without a clock, processes or threads.

Tasks start in order while their bytes fit into the credits. A finished task keeps its credits until its result is
taken, so memory is bounded. A task whose worker dies is done again. A task that takes much longer than usual is also
given to a second worker, and the first result counts (hedging: Dean and Barroso, "The tail at scale", CACM 2013). A
worker beyond the time limit is killed, also during its start. All of that is safe because tasks are pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipefit.data.preparation.executor import (
    TaskFinished,
    TaskKey,
    WorkerDied,
    WorkerEvent,
    WorkerReady,
    WorkerStarting,
)
from pipefit.errors import DataError, PipefitError

_REMEMBERED = 64
"""Number of recent durations whose median is the expected duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    """Limits of memory, attempts and time."""

    credit_bytes: int = 1 << 30
    "Bytes of results in preparation or waiting to be taken. One task is always admitted, whatever its size."
    attempts: int = 3
    "Attempts at a task before it is an error. Failed worker starts in a row may reach this number times the workers."
    hedge_factor: float = 4.0
    "A task is given to a second, idle worker after this multiple of the duration expected from its bytes."
    hedge_after_s: float = 0.5
    "But not earlier than this."
    timeout_s: float = 300.0
    "A worker that takes longer for one task is killed."
    start_timeout_s: float = 300.0
    "A worker that takes longer to start is killed."


@dataclass(frozen=True, slots=True)
class StartTask:
    """Instruction: give this task to this worker."""

    worker: int
    key: TaskKey
    request: Any


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Instruction: end this worker."""

    worker: int


Instruction = StartTask | KillWorker


@dataclass(slots=True)
class _PreparationTask:
    key: TaskKey
    request: Any
    size_bytes: int
    kind: str
    attempts: int = 0
    runs: set[int] = field(default_factory=set)
    "The workers that are doing it."
    result: Any = None
    error: Exception | None = None
    done: bool = False


@dataclass(slots=True, kw_only=True)
class TaskCounts:
    """Counts of events, for reports."""

    done: int = 0
    retried: int = 0
    hedged: int = 0
    died: int = 0
    killed: int = 0


class TaskDispatcher:
    """Tasks and workers. `handle_event` and `add_task` change the state; `next_instructions` returns the next
    actions."""

    def __init__(self, limits: DispatchLimits, workers: int) -> None:
        """`workers`: the number of workers when none is being replaced."""
        self.limits, self.counts, self._workers = limits, TaskCounts(), workers
        self._tasks: dict[TaskKey, _PreparationTask] = {}
        self._waiting: deque[_PreparationTask] = deque()
        self._idle: list[int] = []
        self._busy: dict[int, _PreparationTask | None] = {}
        "The task of each busy worker; None for a task that was forgotten."
        self._began_s: dict[int, float] = {}
        "Start time of each busy worker's task."
        self._starting_s: dict[int, float] = {}
        "Time at which each starting worker began to start."
        self._overdue: dict[int, str] = {}
        "Reasons for which workers are killed."
        self._used_bytes = 0
        self._rates_s: dict[str, deque[float]] = {}
        "Kind of task -> seconds per byte of its latest tasks."
        self._deaths = 0
        "Deaths since a worker last became ready or finished a task."

    def add_task(self, key: TaskKey, request: Any, size_bytes: int, kind: str = "") -> None:
        """Append a task. Its duration is predicted from earlier tasks of its `kind`."""
        assert key not in self._tasks, f"task {key} twice"
        task = _PreparationTask(key, request, size_bytes, kind)
        self._tasks[key] = task
        self._waiting.append(task)

    def is_done(self, key: TaskKey) -> bool:
        return self._tasks[key].done

    def take_result(self, key: TaskKey) -> Any:
        """Return the result of a finished task and free its credits. Raises the task's error."""
        task = self._tasks.pop(key)
        assert task.done, f"task {key} is not done"
        self._used_bytes -= task.size_bytes
        if task.error is not None:
            raise task.error
        return task.result

    def forget_tasks(self) -> None:
        """Forget all tasks. Busy workers finish their tasks, and the results are dropped."""
        self._tasks.clear()
        self._waiting.clear()
        self._busy = dict.fromkeys(self._busy)
        self._used_bytes = 0

    def handle_event(self, event: WorkerEvent, now_s: float) -> None:
        """Update the state with an event."""
        if isinstance(event, WorkerStarting):
            self._starting_s[event.worker] = now_s
            return
        self._starting_s.pop(event.worker, None)
        if isinstance(event, WorkerReady):
            self._idle.append(event.worker)
            self._deaths = 0
            return
        task, began_s = self._busy.pop(event.worker, None), self._began_s.pop(event.worker, now_s)
        if task is not None:
            task.runs.discard(event.worker)
        if isinstance(event, WorkerDied):
            self._after_death(event, task)
            return
        self._idle.append(event.worker)
        self._deaths = 0
        if task is None:
            return
        if isinstance(event, TaskFinished):
            if not task.done:
                rates_s = self._rates_s.setdefault(task.kind, deque(maxlen=_REMEMBERED))
                rates_s.append((now_s - began_s) / max(1, task.size_bytes))
                self.counts.done += 1
                self._finish_task(task, event.result, None)
        elif isinstance(event.error, PipefitError):
            self._finish_task(task, None, event.error)
        else:
            self._retry_task(task, _failing_task_error(task.key, event.error, self.limits))

    def next_instructions(self, now_s: float) -> list[Instruction]:
        """Return the next actions: tasks to start, in order, second attempts, workers to kill."""
        instructions: list[Instruction] = [
            *self._kill_overdue(self._starting_s, self.limits.start_timeout_s, "not ready", now_s),
            *self._kill_overdue(self._began_s, self.limits.timeout_s, "not done", now_s),
        ]
        while self._idle and self._waiting and self._has_credits(self._waiting[0]):
            task = self._waiting.popleft()
            if task.done:
                continue
            if not task.attempts:
                self._used_bytes += task.size_bytes
            instructions.append(self._start_task(task, now_s))
        while self._idle:
            late = self._most_overdue(now_s)
            if late is None:
                break
            self.counts.hedged += 1
            instructions.append(self._start_task(late, now_s))
        return instructions

    @property
    def used_bytes(self) -> int:
        """Credits in use."""
        return self._used_bytes

    def _kill_overdue(self, since_s: dict[int, float], limit_s: float, what: str, now_s: float) -> list[KillWorker]:
        """Kill the workers that exceed a limit, and again after the same time if one is still alive."""
        late_ones = [worker for worker, began_s in since_s.items() if now_s - began_s > limit_s]
        since_s |= dict.fromkeys(late_ones, now_s)
        self._overdue |= dict.fromkeys(late_ones, f"killed: {what} after {limit_s:g} s")
        self.counts.killed += len(late_ones)
        return [KillWorker(worker) for worker in late_ones]

    def _has_credits(self, task: _PreparationTask) -> bool:
        return task.attempts > 0 or not self._used_bytes or self._used_bytes + task.size_bytes <= (
            self.limits.credit_bytes
        )  # fmt: skip

    def _start_task(self, task: _PreparationTask, now_s: float) -> StartTask:
        worker = self._idle.pop()
        task.attempts += 1
        task.runs.add(worker)
        self._busy[worker], self._began_s[worker] = task, now_s
        return StartTask(worker, task.key, task.request)

    def _most_overdue(self, now_s: float) -> _PreparationTask | None:
        """Return the task that exceeds its patience and has run longest on a single worker."""
        late = []
        for task in self._tasks.values():
            if not task.done and len(task.runs) == 1 and task.attempts < self.limits.attempts:
                took_s = now_s - self._began_s[next(iter(task.runs))]
                if took_s > self._patience_s(task):
                    late.append((took_s, task))
        return max(late, key=lambda each: each[0])[1] if late else None

    def _patience_s(self, task: _PreparationTask) -> float:
        """Return the seconds that a task may run before it is given to a second worker."""
        rates_s = self._rates_s.get(task.kind)
        if not rates_s:
            return self.limits.timeout_s / 2  # no task of this kind has finished yet
        expected_s = float(np.median(rates_s)) * max(1, task.size_bytes)
        return max(self.limits.hedge_after_s, self.limits.hedge_factor * expected_s)

    def _after_death(self, event: WorkerDied, task: _PreparationTask | None) -> None:
        self.counts.died += 1
        self._deaths += 1
        reason = self._overdue.pop(event.worker, event.reason)
        if event.worker in self._idle:
            self._idle.remove(event.worker)
        if task is not None:
            self._retry_task(task, _lost_worker_error(task.key, reason, self.limits))
        elif self._deaths > self.limits.attempts * self._workers and not self._busy and not self._idle:
            for pending in self._tasks.values():
                self._finish_task(pending, None, _no_workers_error(reason, self._deaths, self.limits))

    def _retry_task(self, task: _PreparationTask, error: Exception) -> None:
        """Retry a task before all others, unless it is done or out of attempts."""
        if task.done or task.runs:
            return
        if task.attempts >= self.limits.attempts:
            self._finish_task(task, None, error)
        else:
            self.counts.retried += 1
            self._waiting.appendleft(task)

    def _finish_task(self, task: _PreparationTask, result: Any, error: Exception | None) -> None:
        if not task.done:
            if not task.attempts:
                self._used_bytes += task.size_bytes
            task.done, task.result, task.error = True, result, error


def _lost_worker_error(key: TaskKey, reason: str, limits: DispatchLimits) -> DataError:
    return DataError(
        "A preparation task has lost its worker every time.",
        where=_describe_key(key),
        seen=f"{limits.attempts} workers, the last one: {reason}",
        allowed=f"a worker that finishes the task within {limits.timeout_s:g} s",
        next_step="look for a shortage of memory on the host (fewer --workers need less), for storage that"
        " hangs, or for a file that crashes its decoder: --workers 0 shows where",
    )


def _failing_task_error(key: TaskKey, error: Exception, limits: DispatchLimits) -> DataError:
    return DataError(
        "A preparation task fails every time.",
        where=_describe_key(key),
        seen=f"{type(error).__name__}: {error}",
        allowed=f"one success in {limits.attempts} attempts",
        next_step="if it is about files, see whether the workers' host can read them; otherwise run with --workers 0,"
        " which shows the line that fails",
    )


def _no_workers_error(reason: str, deaths: int, limits: DispatchLimits) -> DataError:
    return DataError(
        "Preparation workers die before they have done anything.",
        where=f"the {deaths} workers that were started last",
        seen=reason,
        allowed=f"a worker that is ready within {limits.start_timeout_s:g} s",
        next_step="start one by hand to see why: python -P -m pipefit.data.preparation.worker; or run with --workers 0",
    )


def _describe_key(key: TaskKey) -> str:
    """Describe a task for messages; the keys of `ahead` contain the step."""
    match key:
        case ("step", int(step)):
            return f"step {step + 1}, the order of its samples"
        case ("feed", int(step), stage, microbatch):
            return f"step {step + 1}, the arrays of stage {stage}, microbatch {microbatch}"
    return f"task {key}"
