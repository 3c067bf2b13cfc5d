"""Planning without the cycle collector, which would scan millions of actions repeatedly and free none.

Schedules are tuples of named tuples and hold no cycles. Scanning them takes a sixth of the time of a large search.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def defer_collection() -> Iterator[None]:
    """Disable the cycle collector inside the context, and restore it afterwards."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
