"""Improvement of a schedule with CP-SAT (the extra `exact`): large-neighbourhood search over windows, and proofs.

A window frees some nodes: the first or the last ones, all nodes in a time interval, all nodes of some microbatches, or
those of some lanes for a while. All other nodes keep their order, and the solver finds the best order of the window.
The first and last windows, and half of the other ones, require a shorter schedule, which is often refuted at once. The
remaining ones may also end the lanes earlier at the same length, from which the next window starts.

Windows of a kind grow while they are solved to the end and shrink otherwise; kinds are drawn by their past gains. After
each change of the schedule a short local search (`improve.anneal_orders`) follows. If windows find nothing, a long and
hot local search looks for another equally good schedule, whose windows may gain more.

The solver works in whole quanta (`exact.scale`) and without ports; its results count only after evaluation.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pipefit.errors import ScheduleError
from pipefit.extras import install_command, is_installed
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
from pipefit.schedule.fit.move_budget import MoveBudget
from pipefit.schedule.fit.starts.construct import fits_in_memory
from pipefit.schedule.fit.starts.start import TimedOrders

WORKERS = 2
SMALL = 260
"""Number of nodes up to which a third of the time is spent on the complete instance, for a proof."""
FIRST_SIZE, LEAST_SIZE = 180.0, 30.0
"""Nodes of a window."""
EFFORT = 3.0
"""Maximum effort for one window, in the solver's deterministic time: about seconds of one thread on an idle machine,
and the same on a busy one."""
ANYWHERE = 0.4
"""Share of windows that need not contain an idle time of the slowest lane."""
POLISH, LONG = 20_000, 300_000_000
"""Moves of the local search after a window that changed the schedule; and, divided by the number of nodes, of a long
one after every second window that did not: a tenth of a second, and about two seconds."""
HOTTER = 3.5
"""Initial heat of a long local search, relative to a short one."""


class ExactResult(NamedTuple):
    """The result of the exact solver for a schedule."""

    orders: list[Ints]
    time_s: float
    "The objective, by the evaluator."
    bound_s: float
    "Lower bound on every schedule: proven by the solver, or from `bounds`."
    windows: int


@dataclass(slots=True)
class WindowKind:
    """One kind of window, with its statistics."""

    choose: Callable[[WindowSearch, int], set[int]]
    size: float
    gains: float = 1.0
    spent: float = 3.0
    "The total effort."
    strict: float = 0.5
    "Share of windows that require a shorter schedule."


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
    """Return the best orders found from `orders` within `seconds`, with a bound.

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
    if not is_installed("ortools"):
        raise ScheduleError(
            "The exact solver is not installed.",
            where="exact_seconds",
            seen="no package ortools",
            allowed="0 seconds without it",
            next_step=install_command("ortools"),
        )


def _begin_search(instance: FitInstance, orders: Sequence[Ints], seed: int) -> WindowSearch:
    loops = compile_loops() if is_installed("numba") else PLAIN
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
    """Split every B into I and W on the stages on which that takes no more time or memory, so that windows may separate
    them.

    The W's keep the order of backwards.
    """
    parted = instance.may_split & instance.may_merge & ~instance.open_stages()
    turns = [iter(instance.backwards.tolist()) for _ in range(instance.num_stages)]
    split_orders = []
    for order in orders:
        row: list[int] = []
        for operation in order.tolist():
            kind, stage, unit = instance.operation_parts(operation)
            for part in (I, W) if kind == B and parted[stage] else (kind,):
                turn = next(turns[stage]) if part == W and parted[stage] else unit
                row.append(instance.operation_number(part, stage, turn))
        split_orders.append(np.array(row, dtype=np.int32))
    return split_orders


def _evaluate_orders(
    instance: FitInstance, t: InstanceTables, loops: SearchLoops, orders: list[Ints], name: str = "exact"
) -> TimedOrders | None:
    """Return the orders with the evaluator's time; None if they hang or exceed the memory."""
    s = make_state(t, instance, orders)
    if not loops.sweep(t, s) or not fits_in_memory(t, s, orders):
        return None
    return TimedOrders(float(s.value[0]), name, orders)


def _is_best(search: WindowSearch) -> bool:
    return search.start.time_s <= search.bound_s * (1 + 1e-9)


def nodes_in_time(search: WindowSearch, count: int) -> set[int]:
    """Return about `count` nodes that run at the same time, on all lanes; fewer at the beginning and at the end."""
    start = search.state.start
    ordered = sorted(start, key=lambda node: (start[node], node))
    first = _idle_moment(search, [start[node] for node in ordered], count)
    return set(ordered[max(0, first) : max(0, first + count)])


def nodes_at_begin(search: WindowSearch, count: int) -> set[int]:
    """Return the first `count` nodes: all lanes until the slowest one works without a pause."""
    start = search.state.start
    return set(sorted(start, key=lambda node: (start[node], node))[:count])


def nodes_at_end(search: WindowSearch, count: int) -> set[int]:
    """Return the last `count` nodes."""
    start = search.state.start
    return set(sorted(start, key=lambda node: (start[node], node))[-count:])


def nodes_of_microbatches(search: WindowSearch, count: int) -> set[int]:
    """Return all nodes of consecutive units."""
    units = search.instance.num_units
    width = max(1, min(units, round(count / (3 * search.instance.num_stages))))
    middles = [0.0] * units
    for node, start in search.state.start.items():
        middles[search.scaled.node_parts(node)[2]] += start / (3 * search.instance.num_stages)
    first = min(max(_idle_moment(search, sorted(middles), width), 0), units - width)
    return {node for node in search.state.start if first <= search.scaled.node_parts(node)[2] < first + width}


def nodes_of_lanes(search: WindowSearch, count: int) -> set[int]:
    """Return the nodes of one to four neighbouring lanes during some time."""
    width = search.random.randint(1, min(4, search.instance.lanes))
    first = search.random.randint(0, search.instance.lanes - width)
    start = search.state.start
    nodes = [node for lane in search.state.lanes[first : first + width] for node in lane]
    nodes.sort(key=lambda node: (start[node], node))
    position = _idle_moment(search, [start[node] for node in nodes], count)
    return set(nodes[max(0, position) : max(0, position + count)])


def _idle_moment(search: WindowSearch, starts: Sequence[float], count: int) -> int:
    """Return the first index of `count` of these ascending starts, chosen to contain an idle time of the slowest lane.

    Where that lane works without a pause, nothing can be gained.
    """
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
    position = bisect(starts, pause + search.random.random() * length)
    return position - search.random.randint(count // 4, max(count - count // 4, 1))


def _improve_window(search: WindowSearch, until: float) -> None:
    """Choose a window, solve it, and accept the result if it is no worse."""
    shares = [kind.gains / kind.spent for kind in search.kinds]
    kind = search.random.choices(search.kinds, shares)[0]
    free = kind.choose(search, int(kind.size))
    strict = search.random.random() < kind.strict
    search.windows += 1
    is_done, effort, solution = _solve_window(search, free, strict, until - time.perf_counter())
    kind.spent += effort + 0.1
    if not is_done:
        kind.size = max(kind.size * 0.93, LEAST_SIZE)
    elif effort < EFFORT / 3:
        kind.size *= 1.12 if effort > EFFORT / 30 else 1.25
    if solution is not None:
        before = search.start.time_s
        _accept_schedule(search, solution)
        kind.gains += min(100.0 * (1 - search.start.time_s / before), 3.0)
    if solution is not None:
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
    """Continue from the present schedule by local search, to another one that is at least equally good."""
    if not moves or search.loops is PLAIN or _is_best(search):
        return
    seed = search.random.randrange(1 << 16)
    budget = MoveBudget(moves, until)
    fresh = local.anneal_orders(search.instance, search.t, search.loops, search.start, budget, seed, hotter=hotter)
    if fresh is search.start or fresh.time_s > search.start.time_s:
        return
    lanes, merged = nodes_of(search.scaled, fresh.orders)
    polished = state_of(search.scaled, lanes, merged)
    if polished is not None:
        search.start, search.state = fresh, polished


def _solve_window(
    search: WindowSearch, free: set[int], strict: bool, seconds: float
) -> tuple[bool, float, NodeSchedule | None]:
    """Return (whether the window is exhausted, effort, schedule) of a window.

    The schedule is shorter, or, if not `strict`, possibly one that ends some lanes earlier.
    """
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
    solution = orders_from_starts(model, read_starts(model, solver)) if status in ("OPTIMAL", "FEASIBLE") else None
    return status in ("OPTIMAL", "INFEASIBLE"), float(solver.response_proto.deterministic_time), solution


def _add_hint(model: Any) -> None:
    """Start the solver from the present schedule."""
    for node, begin in model.start.items():
        if not isinstance(begin, int) and node in model.state.start:
            model.cp.add_hint(begin, model.state.start[node])
    for (stage, unit), literal in model.merge.items():
        model.cp.add_hint(literal, model.is_merged(stage, unit))


def _make_solver(search: WindowSearch, seconds: float) -> Any:
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = WORKERS
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = search.random.randrange(1 << 30)
    return solver


def _solve_whole(search: WindowSearch, seconds: float) -> None:
    """Solve the complete instance, for a better schedule and a bound; times are rounded down so that the bound is
    valid."""
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
        solution = orders_from_starts(model, read_starts(model, solver))
        if solution is not None:
            orders = orders_from(scaled, solution.lanes, solution.merged)
            lanes, merged = nodes_of(search.scaled, orders)
            improved = state_of(search.scaled, lanes, merged)
            if improved is not None:
                _accept_schedule(search, improved)
    if (search.instance.may_split & present.merged.any(axis=1) & ~scaled.is_open).any():
        return  # backwards that were B stayed B: no bound on all schedules
    if status in ("OPTIMAL", "FEASIBLE", "UNKNOWN"):
        proven = (math.ceil(solver.best_objective_bound - 1e-6) - (0 if scaled.exact else 1)) * scaled.quantum_s
        search.bound_s = max(search.bound_s, proven)
