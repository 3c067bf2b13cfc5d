"""Who does which preparation task when: a state machine over events, without a clock, processes or threads.

Tasks start in order as long as their bytes fit into the credits; what is done and not yet taken keeps its credits, so
memory is bounded. A task whose worker dies is done again; one that takes much longer than others is given to a second
worker as well, and whoever is first counts (hedging: Dean and Barroso, "The tail at scale", CACM 2013); a worker
beyond the time limit is killed, one that is starting, too. All of that is safe since tasks are pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipefit.data.preparation.executor import Event, Key, TaskFinished, WorkerDied, WorkerReady, WorkerStarting
from pipefit.errors import DataError, PipefitError

_REMEMBERED = 64
"""Durations that the expected one is the median of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    """How much and how long."""

    credit_bytes: int = 1 << 30
    "Of results that are being made or wait to be taken. One task is always let through, however large."
    attempts: int = 3
    "Times that a task is tried before it is an error; of all workers together, that they are started in vain."
    hedge_factor: float = 4.0
    "A task is given to a second, idle worker when it takes so many times as long as its bytes let expect."
    hedge_after_s: float = 0.5
    "But not before this."
    timeout_s: float = 300.0
    "A worker that takes longer over one task is killed."
    start_timeout_s: float = 300.0
    "And one that takes longer to be there."


@dataclass(frozen=True, slots=True)
class StartTask:
    """Give this worker this task."""

    worker: int
    key: Key
    request: Any


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End this worker."""

    worker: int


Instruction = StartTask | KillWorker


@dataclass(slots=True)
class _PreparationTask:
    key: Key
    request: Any
    size_bytes: int
    kind: str
    attempts: int = 0
    runs: set[int] = field(default_factory=set)
    "The workers that do it now."
    result: Any = None
    error: Exception | None = None
    done: bool = False


@dataclass(slots=True, kw_only=True)
class TaskCounts:
    """What happened, for reports."""

    done: int = 0
    retried: int = 0
    hedged: int = 0
    died: int = 0
    killed: int = 0


class TaskDispatcher:
    """Tasks and workers. `handle_event` and `add_task` change the state; `next_instructions` says what is to be done
    next."""

    def __init__(self, limits: DispatchLimits, workers: int) -> None:
        """`workers`: how many there are when none is being replaced."""
        self.limits, self.counts, self._workers = limits, TaskCounts(), workers
        self._tasks: dict[Key, _PreparationTask] = {}
        self._waiting: deque[_PreparationTask] = deque()
        self._idle: list[int] = []
        self._busy: dict[int, _PreparationTask | None] = {}
        "What each worker does; None for a task that nobody wants any more."
        self._began_s: dict[int, float] = {}
        "When each worker began what it does."
        self._starting_s: dict[int, float] = {}
        "Since when each worker has been starting."
        self._overdue: dict[int, str] = {}
        "Why workers are killed."
        self._used_bytes = 0
        self._rates_s: dict[str, deque[float]] = {}
        "Of each kind of task: seconds a byte of the last ones."
        self._deaths = 0
        "Since a worker was last there, or did a task."

    def add_task(self, key: Key, request: Any, size_bytes: int, kind: str = "") -> None:
        """A task, behind all others. What a task takes is expected from others of its kind."""
        assert key not in self._tasks, f"task {key} twice"
        task = _PreparationTask(key, request, size_bytes, kind)
        self._tasks[key] = task
        self._waiting.append(task)

    def is_done(self, key: Key) -> bool:
        return self._tasks[key].done

    def take_result(self, key: Key) -> Any:
        """The result of a task that is done, whose credits are free again. Raises the task's error."""
        task = self._tasks.pop(key)
        assert task.done, f"task {key} is not done"
        self._used_bytes -= task.size_bytes
        if task.error is not None:
            raise task.error
        return task.result

    def forget_tasks(self) -> None:
        """Forget all tasks. Workers that are busy finish what they do, for nobody."""
        self._tasks.clear()
        self._waiting.clear()
        self._busy = dict.fromkeys(self._busy)
        self._used_bytes = 0

    def handle_event(self, event: Event, now_s: float) -> None:
        """Take up what happened."""
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
        """What is to be done now: tasks to start, in order, second tries, workers to end."""
        found: list[Instruction] = [
            *self._kill_overdue(self._starting_s, self.limits.start_timeout_s, "not there", now_s),
            *self._kill_overdue(self._began_s, self.limits.timeout_s, "not done", now_s),
        ]
        while self._idle and self._waiting and self._has_credits(self._waiting[0]):
            task = self._waiting.popleft()
            if task.done:
                continue
            if not task.attempts:
                self._used_bytes += task.size_bytes
            found.append(self._start_task(task, now_s))
        while self._idle:
            late = self._most_overdue(now_s)
            if late is None:
                break
            self.counts.hedged += 1
            found.append(self._start_task(late, now_s))
        return found

    @property
    def used_bytes(self) -> int:
        """Credits in use."""
        return self._used_bytes

    def _kill_overdue(self, since_s: dict[int, float], limit_s: float, what: str, now_s: float) -> list[KillWorker]:
        """Those who are beyond a limit: killed once, and again if that did not help."""
        late_ones = [worker for worker, began_s in since_s.items() if now_s - began_s > limit_s]
        since_s |= dict.fromkeys(late_ones, now_s)
        self._overdue |= dict.fromkeys(late_ones, f"killed, for it was {what} after {limit_s:g} s")
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
        """The task that has been running alone for the longest beyond its time."""
        late = []
        for task in self._tasks.values():
            if not task.done and len(task.runs) == 1 and task.attempts < self.limits.attempts:
                took_s = now_s - self._began_s[next(iter(task.runs))]
                if took_s > self._patience_s(task):
                    late.append((took_s, task))
        return max(late, key=lambda each: each[0])[1] if late else None

    def _patience_s(self, task: _PreparationTask) -> float:
        """How long a task may run before it is given to a second worker."""
        rates_s = self._rates_s.get(task.kind)
        if not rates_s:
            return self.limits.timeout_s / 2  # nothing is known of its kind
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
            for other in self._tasks.values():
                self._finish_task(other, None, _no_workers_error(reason, self._deaths, self.limits))

    def _retry_task(self, task: _PreparationTask, error: Exception) -> None:
        """Try a task again, in front of all others, unless it is done or has been tried often enough."""
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


def _lost_worker_error(key: Key, reason: str, limits: DispatchLimits) -> DataError:
    return DataError(
        "A preparation task has lost its worker every time.",
        where=_describe_key(key),
        seen=f"{limits.attempts} workers, the last one: {reason}",
        allowed=f"a worker that lives and has done it within {limits.timeout_s:g} s",
        next_step="look for a shortage of memory on the host (fewer --workers need less), for storage that stands"
        " still, or for a file that crashes its decoder: --workers 0 shows where",
    )


def _failing_task_error(key: Key, error: Exception, limits: DispatchLimits) -> DataError:
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
        allowed=f"one that is there within {limits.start_timeout_s:g} s",
        next_step="start one by hand to see why: python -P -m pipefit.data.preparation.worker; or run with --workers 0",
    )


def _describe_key(key: Key) -> str:
    """A task for people: the keys of `ahead` tell the step."""
    match key:
        case ("step", int(step)):
            return f"step {step + 1}, its order of samples"
        case ("feed", int(step), stage, microbatch):
            return f"step {step + 1}, the arrays of stage {stage}, microbatch {microbatch}"
    return f"task {key}"
