"""The worker pool: a thread that feeds an executor's events to the dispatcher, and results by key for the trainer."""

from __future__ import annotations

import threading
import time
from typing import Any

from pipefit.data.preparation.dispatch import DispatchLimits, KillWorker, StartTask, TaskCounts, TaskDispatcher
from pipefit.data.preparation.executor import TaskKey, WorkerExecutor

_TICK_S = 0.1
"""Interval of the checks for late workers when no event arrives."""


class WorkerPool:
    """Tasks in, results out. Methods are safe from any thread."""

    def __init__(self, executor: WorkerExecutor, limits: DispatchLimits | None = None) -> None:
        self._executor = executor
        self._dispatcher = TaskDispatcher(limits or DispatchLimits(), executor.count)
        self._changed = threading.Condition()
        self._closed = False
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run_loop, name="preparation", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> TaskCounts:
        return self._dispatcher.counts

    def add(self, key: TaskKey, request: Any, size_bytes: int, kind: str = "") -> None:
        """Append a task to the queue. `size_bytes`: approximate size of its result."""
        with self._changed:
            self._dispatcher.add_task(key, request, size_bytes, kind)
        self._executor.wake()

    def is_done(self, key: TaskKey) -> bool:
        """Return whether `take` would return without waiting."""
        with self._changed:
            return self._dispatcher.is_done(key)

    def take(self, key: TaskKey) -> Any:
        """Wait for the result of a task and return it, once. Raises the task's error."""
        with self._changed:
            self._changed.wait_for(lambda: self._crash is not None or self._closed or self._dispatcher.is_done(key))
            if self._crash is not None:
                raise self._crash
            assert not self._closed, "the pool is closed"
            result = self._dispatcher.take_result(key)
        self._executor.wake()
        return result

    def clear(self) -> None:
        """Forget all tasks."""
        with self._changed:
            self._dispatcher.forget_tasks()

    def close(self) -> None:
        """Stop the thread and all workers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._executor.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run_loop(self) -> None:
        try:
            while not self._closed:
                self._handle_events(self._executor.wait(_TICK_S))
        except BaseException as error:  # raised again in `take`
            with self._changed:
                self._crash = error
                self._changed.notify_all()
        finally:
            self._executor.close()

    def _handle_events(self, events: list[Any]) -> None:
        with self._changed:
            now_s = time.monotonic()
            for event in events:
                self._dispatcher.handle_event(event, now_s)
            if events:
                self._changed.notify_all()
            instructions = self._dispatcher.next_instructions(now_s)
        for instruction in instructions:
            if isinstance(instruction, StartTask):
                self._executor.submit(instruction.worker, instruction.key, instruction.request)
            elif isinstance(instruction, KillWorker):
                self._executor.kill(instruction.worker)
