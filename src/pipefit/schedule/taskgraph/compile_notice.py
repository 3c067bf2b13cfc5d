"""Notice of compilations by numba of loops not in its cache on disk: some seconds, once on a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_callbacks: list[Callable[[], None]] = []


@contextmanager
def on_compilation(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` before every compilation by numba inside the block."""
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


@cache
def watch_numba() -> None:
    """Listen to numba's compilations from now on. numba is imported by then; functions read from its cache are not
    compiled."""
    from numba.core import event

    class CompileListener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: object) -> None:
            for callback in tuple(_callbacks):
                callback()

        def on_end(self, event: object) -> None:
            pass

    event.register("numba:compile", CompileListener())
