"""The steady state of a schedule as a modulo schedule: what every lane repeats, once a microbatch, with a real period.

One microbatch's operations get real offsets; every other microbatch does the same a whole number of periods later. A
building block (`schedule.block`) is the special case of whole slots; with real times it wastes what rounding to slots
wastes, in every period. Here the period is as short as the orders allow, to the last digit. Methods: annealing over
orders (`modulo_kernel`), and CP-SAT on a period given in quanta, from which orders are read and made exact.

A period is that of one unit, stages' mean times over units. A pattern that repeats only every second unit can be
quicker, so `bound_s` bounds steady states of this kind, not all schedules.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.schedule.fit import modulo_kernel
from pipefit.schedule.fit.instance import B, F, Floats, I, Instance, W

STARTS = 12
STRETCHES = (1.0, 1.1, 1.3, 1.0, 1.6, 1e9)
"""Periods that annealing starts from, in multiples of the least; the last is one microbatch after the other."""
HEAT = 0.1
"""What a move may cost in the beginning, in periods."""


class Steady(NamedTuple):
    """A steady state: unit u runs operation `kind` of stage s at offset_s[kind, s] + u * period_s."""

    period_s: float
    offset_s: Floats
    "[F, I, W; stage]: seconds, the earliest is 0. Where I and W are merged, W starts when B would end."
    merged: NDArray[np.bool_]
    "Per stage: whether its backward runs as B."
    bound_s: float
    "No steady state with one unit a period has a shorter one."


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """What the search needs of an instance: operations as nodes F, I, W of every stage, in units of `scale_s`."""

    time: Floats
    "[node], node = kind * stages + stage; a merged W takes no time and is not in any order."
    held: Floats
    most: Floats
    "[node]: what it needs above the level before it."
    edges: NDArray[np.int64]
    "[place, (source, target)]: the data's first, then room for the orders'."
    weight: Floats
    fixed: int
    "How many of the edges are the data's."
    lane: NDArray[np.int64]
    "[node]."
    limit: Floats
    present: NDArray[np.bool_]
    "[node]: false for a W that is merged."
    low: float
    "No period is shorter: the work of the busiest lane, and what memory allows."
    scale_s: float
    merged: NDArray[np.bool_]


def offsets(instance: Instance, *, moves: int = 6000, seconds: float = 0.0, seed: int = 0) -> Steady | None:
    """The shortest steady state found; None where none was found within the limits.

    `moves` are tried by annealing from each of several starts; with `seconds` above 0 and OR-tools installed, CP-SAT
    continues for that long. Where B is quicker than I and W, both are tried.
    """
    found: list[Steady] = []
    for merged in _choices(instance):
        cycle = cycle_of(instance, merged)
        if cycle is None:
            continue
        best = _anneal(cycle, moves, np.random.default_rng(seed))
        if seconds > 0 and find_spec("ortools") is not None:
            from pipefit.schedule.fit.modulo_exact import shorten

            best = shorten(cycle, best, seconds / len(_choices(instance)), seed)
        if best is not None:
            found.append(steady(cycle, *best))
    return min(found, key=lambda one: (one.period_s, float(one.offset_s.max())), default=None)


Orders = tuple[NDArray[np.int64], NDArray[np.int64], float]
"""(nodes lane after lane in cyclic order, turn of every node, a bound on the period in the cycle's units)."""


def _choices(instance: Instance) -> list[NDArray[np.bool_]]:
    """Per stage whether to merge I and W: nowhere it is not needed, and everywhere it is quicker."""
    apart = instance.time_s[I].mean(axis=1) + instance.time_s[W].mean(axis=1)
    quicker = instance.may_merge & (instance.time_s[B].mean(axis=1) < apart * (1 - 1e-9))
    choices = [~instance.may_split]
    if (quicker & instance.may_split).any():
        choices.append(~instance.may_split | quicker)
    return choices


def cycle_of(instance: Instance, merged: NDArray[np.bool_]) -> Cycle | None:
    """The graph of one unit, times and memory averaged over units. None if a unit leaves memory behind."""
    stages = instance.stages
    time, held, passing = (each.mean(axis=2) for each in (instance.time_s, instance.held_bytes, instance.passing_bytes))
    time, held, passing = (
        np.stack([each[F], np.where(merged, each[B], each[I]), np.where(merged, 0.0, each[W])])
        for each in (time, held, passing)
    )
    left = np.abs(held.sum(axis=0))
    if (left > 1e-6 * np.abs(held).max(initial=0.0) + 1e-12).any():
        return None
    pairs, weight = [], []
    scale = float(instance.work_s().max()) / instance.units
    for stage in range(stages):
        pairs += [(stage, stages + stage), (stages + stage, 2 * stages + stage)]
        weight += [time[F, stage], time[I, stage]]
    ahead, back = instance.forward_s.mean(axis=1), instance.backward_s.mean(axis=1)
    for edge, (source, target) in enumerate(zip(instance.source.tolist(), instance.target.tolist(), strict=True)):
        pairs += [(source, target), (stages + target, stages + source)]
        weight += [time[F, source] + ahead[edge], time[I, target] + back[edge]]
    room = 3 * stages
    present = np.concatenate([np.ones(2 * stages, dtype=np.bool_), ~merged])
    lane = np.tile(instance.placement.astype(np.int64), 3)
    flat = time.ravel() / scale
    work = np.bincount(lane, weights=flat, minlength=instance.lanes)
    cycle = Cycle(
        time=flat,
        held=held.ravel(),
        most=(np.maximum(held, 0.0) + passing).ravel(),
        edges=np.array(pairs + [(0, 0)] * room, dtype=np.int64),
        weight=np.array([*(w / scale for w in weight), *([0.0] * room)]),
        fixed=len(pairs),
        lane=lane,
        limit=instance.limit_bytes,
        present=present,
        low=float(work.max()),
        scale_s=scale,
        merged=merged,
    )
    return replace(cycle, low=max(cycle.low, _memory_period(cycle, stages)))


def _memory_period(cycle: Cycle, stages: int) -> float:
    """Little's law: what a lane's stages hold of a unit, times how long they must hold it, is at most limit * period.

    A stage holds what F allocates from F's start to I's end at least, and what is then left to W's end; both times are
    longest paths, and the level's mean over a period is at most its peak.
    """
    longest = _longest(cycle)
    low = 0.0
    for lane in range(len(cycle.limit)):
        area = 0.0
        for stage in np.flatnonzero(cycle.lane[:stages] == lane).tolist():
            f, i, w = stage, stages + stage, 2 * stages + stage
            until_i = longest[f, i] + cycle.time[i]
            kept = cycle.held[f] + min(cycle.held[i], 0.0)
            area += cycle.held[f] * until_i if kept < 0 else (cycle.held[f] - kept) * until_i
            if kept > 0:
                area += kept * (until_i + cycle.time[w])
            if cycle.held[i] > 0:
                area += cycle.held[i] * (cycle.time[i] + cycle.time[w])
        if np.isfinite(cycle.limit[lane]) and cycle.limit[lane] > 0:
            low = max(low, area / float(cycle.limit[lane]))
    return low


def _longest(cycle: Cycle) -> Floats:
    """[node, node]: the longest path of data from start to start, -inf where there is none."""
    nodes = len(cycle.time)
    longest: Floats = np.full((nodes, nodes), -np.inf)
    np.fill_diagonal(longest, 0.0)
    for source, target, weight in zip(*cycle.edges[: cycle.fixed].T, cycle.weight, strict=False):
        longest[source, target] = max(longest[source, target], weight)
    for middle in range(nodes):
        longest = np.maximum(longest, longest[:, middle, None] + longest[None, middle])
    return longest


def _anneal(cycle: Cycle, moves: int, random: np.random.Generator) -> Orders | None:
    """The best of several annealings, from orders that an unlimited number of devices would run in if hops took longer
    than they need."""
    run = _compiled()
    size = len(cycle.time)
    best: Orders | None = None
    best_cost = np.inf
    for attempt in range(STARTS):
        slower = random.uniform(1.0, 2.6, 4) if attempt % 2 else np.ones(4)
        stretch = STRETCHES[attempt // 2 % len(STRETCHES)]
        order, first, turn = _start(cycle, _slowed(cycle, slower), cycle.low * stretch)
        kept = np.zeros_like(order), np.zeros_like(turn)
        cost = run(
            order, first, turn, cycle.time, cycle.held, cycle.most, cycle.limit, cycle.edges.copy(),
            cycle.weight.copy(), np.zeros(len(cycle.edges), dtype=np.int64), cycle.fixed, cycle.low,
            size // 3, random.random((moves, 4)), HEAT, np.zeros(size), np.zeros(size, dtype=np.int64), *kept,
        )  # fmt: skip
        if 0 <= cost < best_cost:
            best_cost, best = cost, (*kept, cycle.low)
    return best


def _slowed(cycle: Cycle, slower: Floats) -> Floats:
    """[node]: earliest starts when hops take so many times as long: forwards and backwards, on a lane's even and odd
    stages."""
    stages = len(cycle.time) // 3
    seen: dict[int, int] = {}
    leg = np.zeros(stages, dtype=np.int64)
    for stage in range(stages):
        leg[stage] = seen.get(int(cycle.lane[stage]), 0) % 2
        seen[int(cycle.lane[stage])] = leg[stage] + 1
    source, target = cycle.edges[: cycle.fixed].T
    hops = source // stages == target // stages
    factor = np.where(hops, slower[2 * (source // stages % 2) + leg[source % stages]], 1.0)
    weight = cycle.weight[: cycle.fixed] * factor
    x: Floats = np.zeros(len(cycle.time))
    for _ in range(2 * stages):
        np.maximum.at(x, target, x[source] + weight)
    return x


def _start(cycle: Cycle, x: Floats, period: float) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(order, first, turn) of a lane's nodes by where they would stand in the period."""
    turn = np.floor(x / period).astype(np.int64)
    order = np.lexsort((x, x - turn * period, cycle.lane))
    order = order[cycle.present[order]]
    first = np.searchsorted(cycle.lane[order], np.arange(len(cycle.limit) + 1))
    return order, first, turn


def least(cycle: Cycle, order: NDArray[np.int64], turn: NDArray[np.int64], x: Floats | None = None) -> float | None:
    """The least period of these orders, in the cycle's units; None if no period will do, or memory does not. Fills `x`
    with the earliest starts."""
    size = len(cycle.time)
    first = np.searchsorted(cycle.lane[order], np.arange(len(cycle.limit) + 1))
    if not modulo_kernel.fits(order, first, turn, cycle.held, cycle.most, cycle.limit):
        return None
    edges, weight = cycle.edges.copy(), cycle.weight.copy()
    turns = np.zeros(len(edges), dtype=np.int64)
    count = modulo_kernel.write_edges(order, first, turn, cycle.time, edges, weight, turns, cycle.fixed)
    x = np.zeros(size) if x is None else x
    period = modulo_kernel.least_period(edges, weight, turns, count, x, np.zeros(size, dtype=np.int64), cycle.low)
    return float(period) if period > 0 else None


def steady(cycle: Cycle, order: NDArray[np.int64], turn: NDArray[np.int64], bound: float) -> Steady:
    """The steady state of these orders at their least period, everything as early as it can be."""
    x = np.zeros(len(cycle.time))
    period = least(cycle, order, turn, x)
    assert period is not None, "orders without a period were kept"
    offset = (x - x.min()).reshape(3, -1) * cycle.scale_s
    return Steady(period * cycle.scale_s, offset, cycle.merged, bound * cycle.scale_s)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """The annealing compiled by numba: copies of the kernel's functions that call each other's compiled copies."""
    import numba

    space: dict[str, Any] = dict(modulo_kernel.__dict__)
    for name, function in vars(modulo_kernel).items():
        if isinstance(function, types.FunctionType):
            copy = types.FunctionType(function.__code__, space, name)
            copy.__module__, copy.__qualname__ = modulo_kernel.__name__, name
            space[name] = numba.njit(cache=True)(copy)
    return space["anneal"]
