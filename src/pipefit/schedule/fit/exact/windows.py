"""Improving a schedule with CP-SAT (the extra `exact`): large-neighbourhood search over windows of it, and proofs.

A window frees some nodes, the first or the last ones, all that run in a piece of time, all of some microbatches, or
what some lanes do for a while; everything else keeps its order, and the solver finds the best order of the window. The
first and last windows, and half of the others, ask for a shorter schedule and nothing else, which is often refuted at
once; the rest may also end the lanes earlier at the same length, from where the next window starts. Windows of a kind
grow while they are solved to the end and shrink while they are not, and kinds are drawn by what they gained. From a
changed schedule a short local search (`improve.anneal_orders`) goes on. Where windows find nothing, a long and hot one
looks for another schedule as good, whose windows may have more to give.

The solver works in whole quanta (`exact_scale`) and without ports; what it returns counts only as the evaluator has it.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pipefit.errors import ScheduleError
from pipefit.schedule.fit.bounds import check_bound, lower_bound
from pipefit.schedule.fit.exact.model import build_model, orders_from_starts, read_starts
from pipefit.schedule.fit.exact.scale import (
    NodeSchedule,
    ScaledInstance,
    end_of,
    nodes_of,
    objective_of,
    orders_from,
    state_of,
)
from pipefit.schedule.fit.instance import B, FitInstance, I, Ints, W
from pipefit.schedule.fit.kernels.arrays import PLAIN, SearchLoops, compile_loops, make_state, make_tables
from pipefit.schedule.fit.kernels.sweep import InstanceTables
from pipefit.schedule.fit.local import improve as local
from pipefit.schedule.fit.starts.construct import fits_in_memory
from pipefit.schedule.fit.starts.start import TimedOrders

WORKERS = 2
SMALL = 260
"""Nodes up to which a third of the time goes into solving the whole instance, for a proof."""
FIRST_SIZE, LEAST_SIZE = 180.0, 30.0
"""Nodes of a window."""
EFFORT = 3.0
"""The most that is spent on one window, in the solver's own measure: about seconds of one thread on a quiet machine,
and the same on a busy one."""
ANYWHERE = 0.4
"""Of windows: those that need not contain an idle moment of the lane that takes longest."""
POLISH, LONG = 20_000, 300_000_000
"""Moves of the local search after a window that changed something; and, over the nodes, of a long one after every
second that did not: a tenth of a second, and about two."""
HOTTER = 3.5
"""What a long one begins with, in heats of a short one."""


class ExactResult(NamedTuple):
    """What the exact solver made of a schedule."""

    orders: list[Ints]
    time_s: float
    "The objective, by the evaluator."
    bound_s: float
    "No schedule takes less: what the solver proved, or what `bounds` say."
    windows: int


@dataclass(slots=True)
class WindowKind:
    """One kind of window, and what is known about it."""

    choose: Callable[[WindowSearch, int], set[int]]
    size: float
    gains: float = 1.0
    spent: float = 3.0
    "Of effort."
    strict: float = 0.5
    "How many of them ask for a shorter schedule and nothing else."


@dataclass(slots=True)
class WindowSearch:
    """The best schedule so far, in the evaluator's orders and as nodes."""

    instance: FitInstance
    t: InstanceTables
    loops: SearchLoops
    scaled: ScaledInstance
    state: NodeSchedule
    start: TimedOrders
    random: random.Random
    bound_s: float
    kinds: list[WindowKind]
    windows: int = 0


def improve_windows(instance: FitInstance, orders: Sequence[Ints], seconds: float, seed: int = 0) -> ExactResult:
    """The best orders found from `orders` in so many seconds, with a bound.

    Raises ScheduleError if OR-tools is not installed. `orders` must be a schedule of the instance within its limits.
    """
    require_solver()
    until = time.perf_counter() + seconds
    search = _begin_search(instance, orders, seed)
    nodes = sum(map(len, search.state.lanes))
    if nodes <= SMALL and not _is_best(search):
        _solve_whole(search, seconds / 3 if nodes > SMALL // 2 else seconds)
    while not _is_best(search) and time.perf_counter() < until - 0.05:
        _improve_window(search, until)
    bound_s = check_bound(search.bound_s, search.start.time_s)
    return ExactResult(search.start.orders, search.start.time_s, bound_s, search.windows)


def require_solver() -> None:
    """Raise ScheduleError if OR-tools cannot be imported."""
    if find_spec("ortools") is None:
        raise ScheduleError(
            "The exact solver is not installed.",
            where="exact_seconds",
            seen="no package ortools",
            allowed="0 seconds without it",
            next_step="pip install 'pipefit[exact]'",
        )


def _begin_search(instance: FitInstance, orders: Sequence[Ints], seed: int) -> WindowSearch:
    loops = compile_loops() if find_spec("numba") is not None else PLAIN
    t, scaled = make_tables(instance), ScaledInstance.from_instance(instance)
    orders = [order.copy() for order in orders]
    first = _evaluate_orders(instance, t, loops, orders)
    assert first is not None, "the schedule to improve does not run within its limits"
    parted = _evaluate_orders(instance, t, loops, split_backwards(instance, orders))
    start = parted if parted is not None and parted.time_s <= first.time_s * (1 + 1e-12) else first
    lanes, merged = nodes_of(scaled, start.orders)
    nodes = state_of(scaled, lanes, merged)
    assert nodes is not None
    return WindowSearch(
        instance=instance,
        t=t,
        loops=loops,
        scaled=scaled,
        state=nodes,
        start=first if start.time_s > first.time_s else start,
        random=random.Random(seed),
        bound_s=lower_bound(instance).time_s,
        kinds=[
            *(WindowKind(choose, FIRST_SIZE, gains=6.0, strict=1.0) for choose in (nodes_at_begin, nodes_at_end)),
            *(WindowKind(choose, FIRST_SIZE) for choose in (nodes_in_time, nodes_of_microbatches, nodes_of_lanes)),
        ],
    )


def split_backwards(instance: FitInstance, orders: Sequence[Ints]) -> list[Ints]:
    """The orders with every B as I and W on the stages where that takes no more time or memory: what a window may then
    part. Their W's keep the order of backwards."""
    parted = instance.may_split & instance.may_merge & ~instance.open_stages()
    turns = [iter(instance.backwards.tolist()) for _ in range(instance.num_stages)]
    found = []
    for order in orders:
        row: list[int] = []
        for operation in order.tolist():
            kind, stage, unit = instance.operation_parts(operation)
            for each in (I, W) if kind == B and parted[stage] else (kind,):
                turn = next(turns[stage]) if each == W and parted[stage] else unit
                row.append(instance.operation_number(each, stage, turn))
        found.append(np.array(row, dtype=np.int32))
    return found


def _evaluate_orders(
    instance: FitInstance, t: InstanceTables, loops: SearchLoops, orders: list[Ints], name: str = "exact"
) -> TimedOrders | None:
    """The orders with the evaluator's time; None if they hang or need more memory than there is."""
    s = make_state(t, instance, orders)
    if not loops.sweep(t, s) or not fits_in_memory(t, s, orders):
        return None
    return TimedOrders(float(s.value[0]), name, orders)


def _is_best(search: WindowSearch) -> bool:
    return search.start.time_s <= search.bound_s * (1 + 1e-9)


def nodes_in_time(search: WindowSearch, count: int) -> set[int]:
    """About `count` nodes that run at the same time, on all lanes; fewer at the beginning and at the end."""
    start = search.state.start
    ordered = sorted(start, key=lambda node: (start[node], node))
    first = _idle_moment(search, [start[node] for node in ordered], count)
    return set(ordered[max(0, first) : max(0, first + count)])


def nodes_at_begin(search: WindowSearch, count: int) -> set[int]:
    """The first `count` nodes: what all lanes do until the longest one works without a pause."""
    start = search.state.start
    return set(sorted(start, key=lambda node: (start[node], node))[:count])


def nodes_at_end(search: WindowSearch, count: int) -> set[int]:
    """The last `count` nodes."""
    start = search.state.start
    return set(sorted(start, key=lambda node: (start[node], node))[-count:])


def nodes_of_microbatches(search: WindowSearch, count: int) -> set[int]:
    """All nodes of consecutive units."""
    units = search.instance.num_units
    width = max(1, min(units, round(count / (3 * search.instance.num_stages))))
    middles = [0.0] * units
    for node, start in search.state.start.items():
        middles[search.scaled.node_parts(node)[2]] += start / (3 * search.instance.num_stages)
    first = min(max(_idle_moment(search, sorted(middles), width), 0), units - width)
    return {node for node in search.state.start if first <= search.scaled.node_parts(node)[2] < first + width}


def nodes_of_lanes(search: WindowSearch, count: int) -> set[int]:
    """What one to four neighbouring lanes do for a while."""
    width = search.random.randint(1, min(4, search.instance.lanes))
    first = search.random.randint(0, search.instance.lanes - width)
    start = search.state.start
    nodes = [node for lane in search.state.lanes[first : first + width] for node in lane]
    nodes.sort(key=lambda node: (start[node], node))
    place = _idle_moment(search, [start[node] for node in nodes], count)
    return set(nodes[max(0, place) : max(0, place + count)])


def _idle_moment(search: WindowSearch, starts: Sequence[float], count: int) -> int:
    """Where `count` of these ascending starts begin, so that a moment is among them in which the lane that takes
    longest idles: where it works without a pause there is nothing to gain."""
    lanes, start = search.state.lanes, search.state.start
    spans = [end_of(search.scaled, search.state, lane[-1]) - start[lane[0]] for lane in lanes]
    longest = [lane for lane, span in zip(lanes, spans, strict=True) if span == max(spans)]
    pauses = [
        (pause, start[after] - pause)
        for lane in longest
        for before, after in pairwise(lane)
        if (pause := end_of(search.scaled, search.state, before)) < start[after]
    ]
    if not pauses or search.random.random() < ANYWHERE:
        return search.random.randint(-count // 2, max(len(starts) - count // 2, 0))
    pause, length = search.random.choices(pauses, [length for _, length in pauses])[0]
    place = bisect(starts, pause + search.random.random() * length)
    return place - search.random.randint(count // 4, max(count - count // 4, 1))


def _improve_window(search: WindowSearch, until: float) -> None:
    """Choose a window, solve it, and take what it gives if it is no worse."""
    shares = [kind.gains / kind.spent for kind in search.kinds]
    kind = search.random.choices(search.kinds, shares)[0]
    free = kind.choose(search, int(kind.size))
    strict = search.random.random() < kind.strict
    search.windows += 1
    is_done, effort, found = _solve_window(search, free, strict, until - time.perf_counter())
    kind.spent += effort + 0.1
    if not is_done:
        kind.size = max(kind.size * 0.93, LEAST_SIZE)
    elif effort < EFFORT / 3:
        kind.size *= 1.12 if effort > EFFORT / 30 else 1.25
    if found is not None:
        before = search.start.time_s
        _accept_schedule(search, found)
        kind.gains += min(100.0 * (1 - search.start.time_s / before), 3.0)
    if found is not None:
        _polish_locally(search, POLISH, 1.0, until)
    elif search.windows % 2 == 0:
        _polish_locally(search, LONG // len(search.state.start), HOTTER, until)


def _accept_schedule(search: WindowSearch, found: NodeSchedule) -> None:
    """Make `found` the present schedule if it is no worse by the evaluator."""
    orders = orders_from(search.scaled, found.lanes, found.merged)
    fresh = _evaluate_orders(search.instance, search.t, search.loops, orders)
    if fresh is None or fresh.time_s > search.start.time_s:
        return
    search.start, search.state = fresh, found


def _polish_locally(search: WindowSearch, moves: int, hotter: float, until: float) -> None:
    """Go on from the present schedule by local search, to another one that is as good at least."""
    if not moves or search.loops is PLAIN or _is_best(search):
        return
    seed = search.random.randrange(1 << 16)
    budget = local.MoveBudget(moves, until)
    fresh = local.anneal_orders(search.instance, search.t, search.loops, search.start, budget, seed, hotter=hotter)
    if fresh is search.start or fresh.time_s > search.start.time_s:
        return
    lanes, merged = nodes_of(search.scaled, fresh.orders)
    found = state_of(search.scaled, lanes, merged)
    if found is not None:
        search.start, search.state = fresh, found


def _solve_window(
    search: WindowSearch, free: set[int], strict: bool, seconds: float
) -> tuple[bool, float, NodeSchedule | None]:
    """(whether nothing is left to find, effort, schedule) of a window: a shorter schedule, or, if not `strict`, one
    that ends some lanes earlier."""
    scaled = search.scaled
    best = objective_of(scaled, search.state)
    model = build_model(scaled, search.state, free, max(search.state.start.values()) + best // 4)
    model.cp.add(model.span <= best - strict)
    model.cp.add(model.span >= math.floor(search.bound_s / scaled.quantum_s * (1 - 1e-9)) - scaled.rounding_slack)
    ends = [model.end[lane[-1]] for lane in search.state.lanes if not isinstance(model.end[lane[-1]], int)]
    model.cp.minimize(model.span if strict else model.span * (4 * len(ends) + 4) + sum(ends))
    if not strict:
        _add_hint(model)
    solver = _make_solver(search, seconds)
    solver.parameters.max_deterministic_time = EFFORT
    status = str(solver.status_name(solver.solve(model.cp)))
    found = orders_from_starts(model, read_starts(model, solver)) if status in ("OPTIMAL", "FEASIBLE") else None
    return status in ("OPTIMAL", "INFEASIBLE"), float(solver.response_proto.deterministic_time), found


def _add_hint(model: Any) -> None:
    """Begin with the present schedule."""
    for node, begin in model.start.items():
        if not isinstance(begin, int) and node in model.state.start:
            model.cp.add_hint(begin, model.state.start[node])
    for (stage, unit), literal in model.merge.items():
        model.cp.add_hint(literal, model.merged(stage, unit))


def _make_solver(search: WindowSearch, seconds: float) -> Any:
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = WORKERS
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = search.random.randrange(1 << 30)
    return solver


def _solve_whole(search: WindowSearch, seconds: float) -> None:
    """Solve the whole instance, for a better schedule and a bound: times rounded down, so that it is true."""
    scaled = search.scaled if search.scaled.exact else ScaledInstance.from_instance(search.instance, down=True)
    present = state_of(scaled, search.state.lanes, search.state.merged)
    assert present is not None
    nodes = {scaled.node_number(kind, *pair) for kind in range(3) for pair in np.ndindex(*search.state.merged.shape)}
    free = {node for node in nodes if node in present.start or scaled.is_open[scaled.node_parts(node)[1]]}
    best = objective_of(scaled, present)
    model = build_model(scaled, present, free, best * (2 if search.instance.objective == "span" else 1))
    model.cp.add(model.span <= best)
    model.cp.add(model.span >= math.floor(search.bound_s / scaled.quantum_s * (1 - 1e-9)) - scaled.rounding_slack)
    model.cp.minimize(model.span)
    _add_hint(model)
    solver = _make_solver(search, seconds)
    status = str(solver.status_name(solver.solve(model.cp)))
    if status in ("OPTIMAL", "FEASIBLE"):
        found = orders_from_starts(model, read_starts(model, solver))
        if found is not None:
            orders = orders_from(scaled, found.lanes, found.merged)
            lanes, merged = nodes_of(search.scaled, orders)
            again = state_of(search.scaled, lanes, merged)
            if again is not None:
                _accept_schedule(search, again)
    if (search.instance.may_split & present.merged.any(axis=1) & ~scaled.is_open).any():
        return  # backwards that were B stayed B: no word on all schedules
    if status in ("OPTIMAL", "FEASIBLE", "UNKNOWN"):
        proven = (math.ceil(solver.best_objective_bound - 1e-6) - (0 if scaled.exact else 1)) * scaled.quantum_s
        search.bound_s = max(search.bound_s, proven)
