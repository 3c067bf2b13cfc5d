"""Planning without the cycle collector: it goes over millions of actions again and again, and finds nothing to free.

Schedules are tuples of named tuples, which hold no cycles; the collector follows each of them all the same, for a sixth
of the time of a large search.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def defer_collection() -> Iterator[None]:
    """No cycles are collected inside. Afterwards the collector is as it was before."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
