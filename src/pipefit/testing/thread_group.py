"""Ranks as threads of one process, and the collectives between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pipefit.errors import PipefitError

Result = TypeVar("Result")

BARRIER_S = 60.0
"""Longest wait of a thread in a collective."""


class UnmatchedCallError(PipefitError):
    """A thread waited in vain in a collective."""

    def __init__(self) -> None:
        PipefitError.__init__(self, "A thread waited in vain in a collective.")


class ThreadGroup:
    """A process group of threads."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=BARRIER_S)
        self.values: list[Any] = [None] * count

    def exchange_values(self, position: int, value: Any) -> list[Any]:
        """Return the values of all threads. Raises UnmatchedCallError if a thread does not call it."""
        self.values[position] = value
        self._await_threads()
        values = list(self.values)
        self._await_threads()
        return values

    def run_threads(self, call: Callable[[int], Result]) -> list[Result]:
        """Return the results of `call(position)`, run at the same time.

        Raises the first error of a thread; UnmatchedCallError only if there is no other error.
        """

        def call_or_abort(position: int) -> Result:
            try:
                return call(position)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.barrier.parties) as pool:
            futures = [pool.submit(call_or_abort, position) for position in range(self.barrier.parties)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, UnmatchedCallError)):
            raise error
        return [future.result() for future in futures]

    def _await_threads(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise UnmatchedCallError from error
