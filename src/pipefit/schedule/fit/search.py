"""The complete fitting of a schedule: constructions, improvement, and a final check by the simulator."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pipefit.cost.types import CostTable
from pipefit.errors import ScheduleError
from pipefit.schedule.fit.bounds import check_bound, lower_bound
from pipefit.schedule.fit.fit_budget import FIT_BUDGET
from pipefit.schedule.fit.instance import FitInstance, Floats, Objective
from pipefit.schedule.fit.kernels.arrays import PLAIN, SearchLoops, compile_loops, make_state, make_tables
from pipefit.schedule.fit.kernels.sweep import InstanceTables
from pipefit.schedule.fit.local.improve import anneal_orders, improve_orders, merge_neighbours
from pipefit.schedule.fit.move_budget import MoveBudget
from pipefit.schedule.fit.options import Choice, OptionMixture, check_options, problem_of_choice, search_choices
from pipefit.schedule.fit.result import FitResult
from pipefit.schedule.fit.starts.construct import (
    FEW_SPEEDS,
    OrderBuilder,
    all_starts,
    block_starts,
    fits_in_memory,
    merge_choices,
    sweep_orders,
    wished_starts,
)
from pipefit.schedule.fit.starts.extend import extend_starts, initial_microbatches, shorten_instance
from pipefit.schedule.fit.starts.periodic import steady_starts, tune_offsets
from pipefit.schedule.fit.starts.start import TimedOrders
from pipefit.schedule.fit.verify import SimulationMemo, least_bytes, least_held, sequential_orders
from pipefit.schedule.problem import ScheduleProblem


@dataclass(frozen=True, slots=True)
class FitSearch:
    """The data shared by the parts of one call."""

    problem: ScheduleProblem
    instance: FitInstance
    loops: SearchLoops
    budget: MoveBudget
    seed: int
    exact_seconds: float
    simulated: SimulationMemo
    bound_s: float

    @property
    def goal_s(self) -> float:
        """The time at which a schedule is proven optimal."""
        return self.bound_s * (1 + 1e-9)


def fit_schedule(
    problem: ScheduleProblem,
    *,
    moves: int = FIT_BUDGET.moves,
    seconds: float | None = None,
    exact_seconds: float = 0.0,
    seed: int = 0,
    objective: Objective = "makespan",
    options: Mapping[str, CostTable] | None = None,
    use_numba: bool = True,
) -> FitResult:
    """Return the best schedule found for the times of `problem.costs` within `problem.limit_bytes`.

    `options` are cost tables by the name of a recomputation choice, of which each stage takes one; they replace
    `problem.costs`. The same `moves` and `seed` give the same schedule on every machine, with and without numba;
    `seconds` only stops the search earlier. `exact_seconds` are spent in the exact solver, if it is installed. Raises
    ScheduleError if no schedule fits in the limit, with the minimum, and for times that are not positive.
    """
    budget = MoveBudget(moves, math.inf if seconds is None else time.perf_counter() + seconds)
    loops = compile_loops() if use_numba else PLAIN
    choice: Choice = ()
    begin: list[TimedOrders] = []
    if options is not None:
        check_options(options)
        choice, begin = _choose_options(problem, options, objective, loops, budget, seed)
        problem = problem_of_choice(problem, options, choice)
    instance = FitInstance.from_problem(problem, objective)
    bound_s = lower_bound(instance).time_s
    simulated = SimulationMemo(problem, instance)
    search = FitSearch(problem, instance, loops, budget, seed, exact_seconds, simulated, bound_s)
    best, proven_s = _within_limits(search, begin)
    return _make_result(search, best, max(proven_s, bound_s), choice)


def _within_limits(search: FitSearch, begin: list[TimedOrders]) -> tuple[TimedOrders, float]:
    """Return the best orders found whose simulated peaks are within the limits, and a bound.

    The result is never slower than the best start within the limits. If buffers exceed the limits, the search is
    repeated with tighter limits. `begin` is the result of an earlier search followed by all constructions, or empty.
    """
    instance, budget = search.instance, search.budget
    limit, least = instance.limit_bytes.copy(), least_held(instance)
    moves = budget.moves
    safe: TimedOrders | None = None
    for tightening in range(FIT_BUDGET.tightenings):
        tight = replace(instance, limit_bytes=limit)
        t = make_tables(tight)
        known = [*begin[:1], *([safe] if safe else [])]
        still_fitting = [
            candidate
            for candidate in known
            if fits_in_memory(t, sweep_orders(tight, t, search.loops, candidate.orders), candidate.orders)
        ]
        fresh = _collect_starts(search, tight, begin[1:] if tightening == 0 else [])
        starts = sorted([*still_fitting, *fresh], key=lambda start: start.time_s)
        if not starts:
            break
        if budget.until_s < math.inf:
            budget.kept_s = max(budget.kept_s, FIT_BUDGET.finishing_factor * _finishing_s(search, tight, t, starts[0]))
        safe = _first_safe(search, starts, safe)
        over = search.simulated.excess_bytes(starts[0])
        if not over.any():
            alone = safe is None or safe.time_s >= starts[0].time_s
            part = budget if alone else _spend_half(budget)
            improved = improve_orders(tight, t, search.loops, starts, part, search.seed, search.goal_s)
            improved = merge_neighbours(tight, t, search.loops, improved)
            over = search.simulated.excess_bytes(improved)
            if not over.any() and alone:
                return _improve_exactly(search, tight, improved)
            if not over.any() and safe is not None:
                safe = min(safe, improved, key=lambda start: start.time_s)
                break
            budget.moves = budget.spent + moves // 3
        limit = np.maximum(limit - over, np.minimum(limit, least))
    if safe is None:
        slow = [start for start in sequential_orders(instance, search.loops) if not _exceeds_limits(search, start)]
        if not slow:
            raise _limit_error(search.problem, instance, search.loops)
        safe = min(slow, key=lambda start: start.time_s)
    return _improve_exactly(search, instance, _improve_safely(search, safe))


def _finishing_s(search: FitSearch, tight: FitInstance, t: InstanceTables, start: TimedOrders) -> float:
    """Return the measured time of the end of a search: merging and simulation."""
    began = time.perf_counter()
    merge_neighbours(tight, t, search.loops, start)
    search.simulated.simulate_start(start)
    return time.perf_counter() - began


def _first_safe(search: FitSearch, starts: list[TimedOrders], safe: TimedOrders | None) -> TimedOrders | None:
    """Return the quickest of `safe` and `starts`, which are sorted by time, that is within the limits by the
    simulator."""
    for start in starts:
        if safe is not None and start.time_s >= safe.time_s:
            break
        if not _exceeds_limits(search, start):
            return start
    return safe


def _spend_half(budget: MoveBudget) -> MoveBudget:
    """Return half of the remaining budget, which then counts as spent."""
    half = budget.moves_share(0.5)
    budget.spent += half.moves
    return half


def _improve_safely(search: FitSearch, safe: TimedOrders) -> TimedOrders:
    """Improve orders that are within the limits with the rest of the budget.

    The search is divided into pieces, and the result of each must stay within the limits. The pieces alternate between
    the full memory limit and the memory that the orders hold without buffers.
    """
    budget, instance = search.budget, search.instance
    length = max((budget.moves - budget.spent) // FIT_BUDGET.safe_searches, FIT_BUDGET.least_safe_moves)
    for piece in range(FIT_BUDGET.safe_searches):
        if not budget.take_moves(1):
            break
        tight = instance if piece % 2 else replace(instance, limit_bytes=_bytes_held(search, safe))
        t = make_tables(tight)
        improved = anneal_orders(
            tight, t, search.loops, safe, budget, search.seed + piece, min(length, budget.take_moves(length))
        )
        improved = merge_neighbours(tight, t, search.loops, improved)
        if improved.time_s < safe.time_s and not _exceeds_limits(search, improved):
            safe = improved
    return safe


def _bytes_held(search: FitSearch, start: TimedOrders) -> Floats:
    """Return, by lane, the peak memory of orders without buffers."""
    t = make_tables(search.instance)
    s = sweep_orders(search.instance, t, search.loops, start.orders)
    return np.array([(s.level[lane, : len(order)] + t.need[order]).max() for lane, order in enumerate(start.orders)])


def _exceeds_limits(search: FitSearch, start: TimedOrders) -> bool:
    return bool(search.simulated.excess_bytes(start).any())


def _improve_exactly(search: FitSearch, tight: FitInstance, found: TimedOrders) -> tuple[TimedOrders, float]:
    """Improve orders with the exact solver. Also returns the bound that it proves, if no limit was tightened."""
    if not search.exact_seconds:
        return found, 0.0
    from pipefit.schedule.fit.exact import windows as exact

    solution = exact.improve_windows(tight, found.orders, search.exact_seconds, search.seed)
    better = replace(found, time_s=solution.time_s, orders=solution.orders, name=f"{found.name}, exact")
    better = merge_neighbours(tight, make_tables(tight), search.loops, better)
    if better.time_s < found.time_s and not _exceeds_limits(search, better):
        found = better
    same_limits = bool((tight.limit_bytes == search.instance.limit_bytes).all())
    return found, solution.bound_s if same_limits else 0.0


def _collect_starts(search: FitSearch, instance: FitInstance, known: list[TimedOrders]) -> list[TimedOrders]:
    """Return all constructions, best first. `known` are the constructions if they were computed before.

    With many microbatches, extended results of searches with fewer microbatches are added. The best starts are also
    tuned.
    """
    problem, loops, budget = search.problem, search.loops, search.budget
    t = make_tables(instance)
    starts = known or all_starts(instance, problem, t, loops)
    if not starts or not budget.take_moves(1) or starts[0].time_s <= search.goal_s:
        return starts
    microbatches = initial_microbatches(instance)
    if microbatches < instance.microbatches:
        short = shorten_instance(instance, microbatches)
        short_t = make_tables(short)
        begin = all_starts(short, None, short_t, loops)
        begin = begin or all_starts(short, replace(problem, microbatches=microbatches), short_t, loops)
        for n in range(FIT_BUDGET.short_searches if begin else 0):
            inner = budget.moves_share(FIT_BUDGET.short_share)
            best = improve_orders(short, short_t, loops, begin[n:] or begin, inner, search.seed + 10 * n)
            budget.spent += inner.spent
            starts += extend_starts(instance, t, loops, short, short_t, best)
    repeated = steady_starts(instance, t, loops, budget, search.seed) if microbatches < instance.microbatches else []
    for n, untuned in enumerate([*repeated, *_distinct_starts(starts)]):
        inner = budget.moves_share(FIT_BUDGET.tuning_share)
        tuned = tune_offsets(instance, t, loops, untuned, inner, search.seed + n)
        budget.spent += inner.spent
        starts += [] if tuned is None else [tuned]
    return sorted([*starts, *repeated], key=lambda start: start.time_s)


def _distinct_starts(starts: list[TimedOrders]) -> list[TimedOrders]:
    """Return the best few starts with different names; patterns count as one."""
    by_name: dict[str, TimedOrders] = {}
    for start in sorted(starts, key=lambda start: start.time_s):
        by_name.setdefault("pattern" if start.name.startswith("pattern ") else start.name, start)
    return list(by_name.values())[: FIT_BUDGET.tuned_starts]


def _choose_options(
    problem: ScheduleProblem,
    options: Mapping[str, CostTable],
    objective: Objective,
    loops: SearchLoops,
    budget: MoveBudget,
    seed: int,
) -> tuple[Choice, list[TimedOrders]]:
    """Return one option for each stage, chosen by short searches, with the resulting orders and those of all
    constructions."""

    mixture = OptionMixture(problem, options, objective)
    known: list[tuple[TimedOrders, Floats]] = []
    for uniform_instance in mixture.uniform:
        uniform_t = make_tables(uniform_instance)
        best = all_starts(uniform_instance, problem, uniform_t, loops)[: FIT_BUDGET.choice_starts]
        known += [
            (start, wished_starts(uniform_instance, sweep_orders(uniform_instance, uniform_t, loops, start.orders)))
            for start in best
        ]

    def choice_value(choice: Choice) -> float:
        instance, t = mixture.mixed_instance(choice)
        candidates = list(block_starts(instance, t, loops, merge_choices(instance)[0], FEW_SPEEDS))
        builder = OrderBuilder(instance, t, loops, merge_choices(instance)[0])
        for start, wish in known:
            s = make_state(t, instance, start.orders)
            if loops.sweep(t, s) and fits_in_memory(t, s, start.orders):
                candidates.append(TimedOrders(float(s.value[0]), start.name, start.orders))
            elif (time_s := builder.wish_objective(wish)) < math.inf:
                candidates.append(builder.valued_start(time_s, start.name))
        if not candidates:
            return math.inf
        best = min(candidates, key=lambda start: start.time_s)
        return anneal_orders(
            instance, t, loops, best, budget, seed, min(FIT_BUDGET.choice_moves, 1 + budget.moves // 400)
        ).time_s

    choices = search_choices(
        problem.num_stages, tuple(options), choice_value, lambda: time.perf_counter() < budget.until_s
    )
    if not choices:
        raise _no_option_fits(problem, options, objective, loops)
    uniform = [choice for choice in choices if len(set(choice)) == 1]
    racers = list(dict.fromkeys([*choices[: FIT_BUDGET.raced_choices], *uniform[:1]]))
    share = FIT_BUDGET.choices_share / len(racers)

    def search_choice(choice: Choice) -> tuple[Choice, list[TimedOrders]]:
        instance, t = mixture.mixed_instance(choice)
        inner = budget.moves_share(share)
        starts = all_starts(instance, problem, t, loops)
        start = improve_orders(instance, t, loops, starts, inner, seed)
        budget.spent += inner.spent
        return choice, [start, *starts]

    return min(map(search_choice, racers), key=lambda outcome: outcome[1][0].time_s)


def _no_option_fits(
    problem: ScheduleProblem, options: Mapping[str, CostTable], objective: Objective, loops: SearchLoops
) -> ScheduleError:
    """Return the error for the option that needs the least memory."""
    uniform = [problem_of_choice(problem, options, (name,) * problem.num_stages) for name in options]
    instances = [FitInstance.from_problem(option_problem, objective) for option_problem in uniform]
    needs = [
        least_bytes(option_problem, instance, loops).max()
        for option_problem, instance in zip(uniform, instances, strict=True)
    ]
    least = int(np.argmin(needs))
    return _limit_error(uniform[least], instances[least], loops)


def _limit_error(problem: ScheduleProblem, instance: FitInstance, loops: SearchLoops) -> ScheduleError:
    least = least_bytes(problem, instance, loops)
    assert problem.limit_bytes is not None
    lane = int(np.argmax(least - np.array(problem.limit_bytes)))
    return ScheduleError(
        "No schedule fits in the memory limit: one microbatch alone needs more.",
        where=f"lane {lane}",
        seen=f"{problem.limit_bytes[lane]:.6g} bytes",
        allowed=f"{least[lane]:.6g} bytes or more; by lane: {', '.join(f'{value:.6g}' for value in least)}",
        next_step="raise the limit, make microbatches smaller, or recompute activations",
    )


def _make_result(search: FitSearch, best: TimedOrders, bound_s: float, choice: Choice) -> FitResult:
    schedule, peak_bytes = search.simulated.simulate_start(best)
    return FitResult(
        schedule=schedule,
        time_s=best.time_s,
        bound_s=check_bound(bound_s, best.time_s),
        bubble=1.0 - float(search.instance.work_s().max()) / best.time_s,
        recompute=choice,
        peak_bytes=tuple(peak_bytes.tolist()),
        how=best.name,
        moves=search.budget.spent,
    )
