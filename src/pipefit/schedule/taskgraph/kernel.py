"""The two inner loops of the evaluator, written once for plain Python and for numba.

Both work on compressed rows: task t waits for `after[pointer[t]:pointer[t + 1]]`. A task waits for **moments**: 2 p is
the stop of task p, 2 p + 1 the arrival of the transfer p. Times are only added and compared, in one order and without
fast-math, so that plain and compiled code give the same bits.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from pipefit.schedule.taskgraph.compile_notice import watch_numba

COMPILED_ENTRIES = 60_000
"""Number of predecessor entries from which importing numba (about half a second) pays."""


def sweep_tasks(pointer: Any, after: Any, duration: Any, transit: Any, start: Any, moment: Any) -> float:
    """Fill `start` with the earliest start of every task, and `moment` with its stop and its arrival.

    Tasks are numbered so that predecessors come first. A task starts at the last moment that it waits for, or at 0. It
    stops `duration` later, and a transfer arrives `transit` after its start. Returns the latest moment.
    """
    latest = 0.0
    for task in range(len(pointer) - 1):
        time = 0.0
        for entry in range(pointer[task], pointer[task + 1]):
            ready = moment[after[entry]]
            if ready > time:
                time = ready
        start[task] = time
        stop = time + duration[task]
        arrival = time + transit[task]
        moment[2 * task] = stop
        moment[2 * task + 1] = arrival
        latest = max(latest, stop, arrival)
    return latest


def topological_order(pointer: Any, after: Any, order: Any, cursor: Any, stack: Any) -> int:
    """Fill `order` with the tasks, predecessors first; depth first, so that neighbours stay near each other.

    `cursor` (-1 everywhere) and `stack` are scratch space with an entry per task. Returns the number of ordered tasks:
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
            before = after[entry] // 2
            if cursor[before] < 0:
                cursor[before] = pointer[before]
                depth += 1
                stack[depth] = before
            elif cursor[before] <= pointer[before + 1]:
                return done
    return done


def pays_to_compile(entries: int, compiled: bool | None = None) -> bool:
    """Return `compiled`, or if it is None whether compiling pays for this number of predecessor entries."""
    if compiled is None:
        return entries >= COMPILED_ENTRIES or (entries >= 2_000 and "numba" in sys.modules)
    return compiled


def choose_loop(function: Callable[..., Any], entries: int, compiled: bool | None = None) -> Callable[..., Any]:
    """Return `function`, compiled if requested, or if that pays for this number of predecessor entries."""
    return _compile_loop(function) if pays_to_compile(entries, compiled) else function


@lru_cache(maxsize=32)
def _compile_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    watch_numba()
    compiled: Callable[..., Any] = numba.njit(cache=True, no_cfunc_wrapper=True)(function)
    return compiled


@lru_cache(maxsize=4)
def compile_modules(
    modules: tuple[ModuleType, ...], entries: Collection[str], inlined: Collection[str] = (), allocates: bool = False
) -> Mapping[str, Callable[..., Any]]:
    """Return the compiled `entries` of the modules by name: copies that call each other's compiled copies.

    Only `entries` can be called from Python, because wrappers for Python are slow to compile. A module may call
    functions of earlier ones. numba caches by the name and file of a function. The name contains a digest of all files,
    because a function includes others, and of the entries. Unless `allocates`, no function may allocate or copy a
    slice: without reference counts (`_nrt`) on the arrays passed in each call, they run twice as fast. The functions in
    `inlined` are inlined: for them, a call that passes many arrays costs more than their work.
    """
    import numba

    watch_numba()
    text = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    digest = hashlib.sha256(text + repr(sorted(entries)).encode()).hexdigest()[:12]
    compiled: dict[str, Callable[..., Any]] = {}
    for module in modules:
        space: dict[str, Any] = {**module.__dict__, **compiled}
        for name, function in vars(module).items():
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                copy = FunctionType(function.__code__, space, name)
                copy.__module__, copy.__qualname__ = module.__name__, f"{name}_{digest}"
                inline = "always" if name in inlined else "never"
                compiled[name] = space[name] = numba.njit(
                    cache=True,
                    inline=inline,
                    _nrt=allocates,
                    no_cfunc_wrapper=True,
                    no_cpython_wrapper=name not in entries,
                )(copy)
    return {name: compiled[name] for name in entries}
