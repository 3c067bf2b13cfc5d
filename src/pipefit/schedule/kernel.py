"""The two inner loops of the evaluator, written once so that they run as plain Python and, compiled, under numba.

Both work on the predecessor lists of a task graph in compressed rows: the predecessors of task t are
`source[pointer[t]:pointer[t + 1]]`. Only additions and maxima are done on times, in one order, without fast-math,
so that both ways give the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

COMPILED_FROM = 60_000
"""Predecessor entries from which it pays to import numba (about half a second) when it is not yet imported."""


def sweep(pointer: Any, source: Any, lag: Any, start: Any) -> float:
    """Fill `start` with the earliest start of every task; tasks are numbered so that predecessors come first.

    A task starts at the latest `start[p] + lag` over its predecessors p, and at 0 without any. Returns the latest
    start.
    """
    latest = 0.0
    for task in range(len(pointer) - 1):
        time = 0.0
        for entry in range(pointer[task], pointer[task + 1]):
            ready = start[source[entry]] + lag[entry]
            if ready > time:
                time = ready
        start[task] = time
        if time > latest:
            latest = time
    return latest


def topological_order(pointer: Any, source: Any, order: Any, cursor: Any, stack: Any) -> int:
    """Fill `order` with the tasks, predecessors first; depth first, so that neighbours stay near each other.

    `cursor` (-1 everywhere) and `stack` are scratch space with an entry a task. Returns how many tasks were ordered:
    fewer than all means that the lists hold a cycle.
    """
    done = 0
    tasks = len(pointer) - 1
    for root in range(tasks):
        if cursor[root] >= 0:
            continue
        depth = 0
        stack[0] = root
        cursor[root] = pointer[root]
        while depth >= 0:
            task = stack[depth]
            entry = cursor[task]
            if entry == pointer[task + 1]:
                order[done] = task
                done += 1
                cursor[task] = entry + 1  # one beyond: finished
                depth -= 1
                continue
            cursor[task] = entry + 1
            before = source[entry]
            if cursor[before] < 0:
                cursor[before] = pointer[before]
                depth += 1
                stack[depth] = before
            elif cursor[before] <= pointer[before + 1]:
                return done
    return done


def choose(function: Callable[..., Any], entries: int, compiled: bool | None = None) -> Callable[..., Any]:
    """`function`, compiled if asked for, or if it is worth it for that many predecessor entries."""
    if compiled is None:
        compiled = entries >= COMPILED_FROM or (entries >= 2_000 and "numba" in sys.modules)
    return _compile(function) if compiled else function


@lru_cache(maxsize=8)
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    compiled: Callable[..., Any] = numba.njit(cache=True)(function)
    return compiled
