"""The pool: a thread that drives the dispatcher with an executor's events, and results by key for the trainer."""

from __future__ import annotations

import threading
import time
from typing import Any

from pipefit.data.preparation.dispatch import Counts, Dispatcher, Kill, Limits, Start
from pipefit.data.preparation.executor import Executor, Key

_TICK_S = 0.1
"""How often lateness is looked at when nothing happens."""


class Pool:
    """Tasks in, results out. Methods are safe from any thread."""

    def __init__(self, executor: Executor, limits: Limits | None = None) -> None:
        self._executor = executor
        self._dispatcher = Dispatcher(limits or Limits(), executor.count)
        self._changed = threading.Condition()
        self._closed = False
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="preparation", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counts:
        return self._dispatcher.counts

    def add(self, key: Key, request: Any, size_bytes: int, kind: str = "") -> None:
        """A task, behind all others. `size_bytes`: of its result, about."""
        with self._changed:
            self._dispatcher.add(key, request, size_bytes, kind)
        self._executor.wake()

    def is_done(self, key: Key) -> bool:
        """Whether `take` would not wait."""
        with self._changed:
            return self._dispatcher.is_done(key)

    def take(self, key: Key) -> Any:
        """The result of a task, waited for; once. Raises the task's error."""
        with self._changed:
            self._changed.wait_for(lambda: self._crash is not None or self._closed or self._dispatcher.is_done(key))
            if self._crash is not None:
                raise self._crash
            assert not self._closed, "the pool is closed"
            result = self._dispatcher.take(key)
        self._executor.wake()
        return result

    def clear(self) -> None:
        """Forget all tasks."""
        with self._changed:
            self._dispatcher.clear()

    def close(self) -> None:
        """End the thread and all workers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._executor.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn(self._executor.wait(_TICK_S))
        except BaseException as error:  # raised where results are waited for
            with self._changed:
                self._crash = error
                self._changed.notify_all()
        finally:
            self._executor.close()

    def _turn(self, events: list[Any]) -> None:
        with self._changed:
            now_s = time.monotonic()
            for event in events:
                self._dispatcher.handle(event, now_s)
            if events:
                self._changed.notify_all()
            instructions = self._dispatcher.instructions(now_s)
        for instruction in instructions:
            if isinstance(instruction, Start):
                self._executor.submit(instruction.worker, instruction.key, instruction.request)
            elif isinstance(instruction, Kill):
                self._executor.kill(instruction.worker)
