"""The whole of fitting: constructions, improvement, and the simulator's word on the winner."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pipefit.cost.types import CostTable
from pipefit.errors import ScheduleError
from pipefit.schedule.fit.bounds import honest, lower_bound
from pipefit.schedule.fit.instance import Floats, Instance, Objective
from pipefit.schedule.fit.kernels.arrays import PLAIN, Loops, compiled, state, tables
from pipefit.schedule.fit.kernels.sweep import Tables
from pipefit.schedule.fit.local.improve import Budget, improve, merge_neighbours, run
from pipefit.schedule.fit.options import Choice, Mixture, check_options, choices, chosen
from pipefit.schedule.fit.result import Fit
from pipefit.schedule.fit.starts.construct import (
    FEW_SPEEDS,
    Builder,
    all_starts,
    block_starts,
    fits,
    merge_choices,
    swept,
    wishes,
)
from pipefit.schedule.fit.starts.extend import extended, few, shortened
from pipefit.schedule.fit.starts.periodic import repeating, tuned
from pipefit.schedule.fit.starts.start import Start
from pipefit.schedule.fit.verify import Simulated, least_bytes, least_held, one_by_one
from pipefit.schedule.problem import Problem

MOVES = 100_000
"""Moves of the local search that are tried by default."""
REPAIRS = 8
"""Times that limits are tightened because of buffers before giving up."""
AFTERWARDS = 2.0
"""Of the time for the search, so many times what merging and the simulator took once are kept for the end."""
PIECES = 12
LEAST_PIECE = 500
"""Where buffers are in the way: so many searches from the best orders that fit, with so many moves at least."""
KEPT_CHOICES = 3
CHOICE_SHARE = 0.6
"""Of the moves, what goes into the choice of options: the best few, and the best uniform one."""
KEPT_STARTS = 3
"""Of the constructions for each uniform choice, so many are tried on all others."""
LOOK = 600
"""Moves that one choice of options is looked at with."""
TUNED = 4
TUNE_SHARE = 0.06
"""Of the moves, what goes into the tuning of each of the best starts."""
SHORTS = 3
SHORT_SHARE = 0.08
"""Where there are many microbatches: so many searches with few, each with this share of the moves."""


@dataclass(frozen=True, slots=True)
class Search:
    """What the parts of one call share."""

    problem: Problem
    instance: Instance
    loops: Loops
    budget: Budget
    seed: int
    exact_seconds: float
    simulated: Simulated
    bound_s: float

    @property
    def goal_s(self) -> float:
        """What proves itself to be the best."""
        return self.bound_s * (1 + 1e-9)


def fit(
    problem: Problem,
    *,
    moves: int = MOVES,
    seconds: float | None = None,
    exact_seconds: float = 0.0,
    seed: int = 0,
    objective: Objective = "makespan",
    options: Mapping[str, CostTable] | None = None,
    use_numba: bool = True,
) -> Fit:
    """The best schedule found for the true times of `problem.costs` within `problem.limit_bytes`.

    `options`: cost tables by the name of a recomputation choice, of which each stage takes one; they stand in place of
    `problem.costs`. The same `moves` and `seed` give the same schedule on every machine, with and without numba;
    `seconds` only stops the search earlier. `exact_seconds` go to the exact solver, where it is installed. Raises
    ScheduleError where the limit is below what any schedule needs, saying the least, and for times that are not
    positive.
    """
    budget = Budget(moves, math.inf if seconds is None else time.perf_counter() + seconds)
    loops = compiled() if use_numba else PLAIN
    choice: Choice = ()
    begin: list[Start] = []
    if options is not None:
        check_options(options)
        choice, begin = _choose(problem, options, objective, loops, budget, seed)
        problem = chosen(problem, options, choice)
    instance = Instance.of(problem, objective)
    bound_s = lower_bound(instance).time_s
    simulated = Simulated(problem, instance)
    search = Search(problem, instance, loops, budget, seed, exact_seconds, simulated, bound_s)
    best, proven_s = _within_limits(search, begin)
    return _result(search, best, max(proven_s, bound_s), choice)


def _within_limits(search: Search, begin: list[Start]) -> tuple[Start, float]:
    """The best orders found whose peaks, by the simulator, are within the limits, and a bound. The best start within
    them is the least that comes out. Where buffers take the search beyond the limits, it tries again with less.
    `begin`: what was searched already, and then all constructions, or nothing."""
    instance, budget = search.instance, search.budget
    limit, least = instance.limit_bytes.copy(), least_held(instance)
    moves = budget.moves
    safe: Start | None = None
    for repair in range(REPAIRS):
        tight = replace(instance, limit_bytes=limit)
        t = tables(tight)
        known = [*begin[:1], *([safe] if safe else [])]
        kept = [one for one in known if fits(t, swept(tight, t, search.loops, one.orders), one.orders)]
        fresh = _starts(search, tight, begin[1:] if repair == 0 else [])
        starts = sorted([*kept, *fresh], key=lambda start: start.time_s)
        if not starts:
            break
        if budget.until_s < math.inf:
            budget.kept_s = max(budget.kept_s, AFTERWARDS * _ending_s(search, tight, t, starts[0]))
        safe = _first_safe(search, starts, safe)
        over = search.simulated.excess(starts[0])
        if not over.any():
            alone = safe is None or safe.time_s >= starts[0].time_s
            part = budget if alone else _half(budget)
            found = improve(tight, t, search.loops, starts, part, search.seed, search.goal_s)
            found = merge_neighbours(tight, t, search.loops, found)
            over = search.simulated.excess(found)
            if not over.any() and alone:
                return _exactly(search, tight, found)
            if not over.any() and safe is not None:
                safe = min(safe, found, key=lambda start: start.time_s)
                break
            budget.moves = budget.spent + moves // 3
        limit = np.maximum(limit - over, np.minimum(limit, least))
    if safe is None:
        slow = [start for start in one_by_one(instance, search.loops) if not _exceeds(search, start)]
        if not slow:
            raise _too_tight(search.problem, instance, search.loops)
        safe = min(slow, key=lambda start: start.time_s)
    return _exactly(search, instance, _carefully(search, safe))


def _ending_s(search: Search, tight: Instance, t: Tables, start: Start) -> float:
    """What it takes to end a search: merging, and the simulator's word."""
    began = time.perf_counter()
    merge_neighbours(tight, t, search.loops, start)
    search.simulated.of(start)
    return time.perf_counter() - began


def _first_safe(search: Search, starts: list[Start], safe: Start | None) -> Start | None:
    """The quickest of `starts`, which are sorted by time, and `safe` that is within the limits by the simulator."""
    for start in starts:
        if safe is not None and start.time_s >= safe.time_s:
            break
        if not _exceeds(search, start):
            return start
    return safe


def _half(budget: Budget) -> Budget:
    """Half of what is left, which counts as spent."""
    half = budget.part(0.5)
    budget.spent += half.moves
    return half


def _carefully(search: Search, safe: Start) -> Start:
    """What the rest of the budget makes of orders within the limits, in pieces, each of which must stay within them: by
    turns with all of the memory, and with what the orders hold without buffers."""
    budget, instance = search.budget, search.instance
    length = max((budget.moves - budget.spent) // PIECES, LEAST_PIECE)
    for piece in range(PIECES):
        if not budget.take(1):
            break
        tight = instance if piece % 2 else replace(instance, limit_bytes=_held(search, safe))
        t = tables(tight)
        found = run(tight, t, search.loops, safe, budget, search.seed + piece, min(length, budget.take(length)))
        found = merge_neighbours(tight, t, search.loops, found)
        if found.time_s < safe.time_s and not _exceeds(search, found):
            safe = found
    return safe


def _held(search: Search, start: Start) -> Floats:
    """Per lane: what orders take without buffers."""
    t = tables(search.instance)
    s = swept(search.instance, t, search.loops, start.orders)
    return np.array([(s.level[lane, : len(one)] + t.need[one]).max() for lane, one in enumerate(start.orders)])


def _exceeds(search: Search, start: Start) -> bool:
    return bool(search.simulated.excess(start).any())


def _exactly(search: Search, tight: Instance, found: Start) -> tuple[Start, float]:
    """What the exact solver makes of orders, and the bound that it proves where no limit was tightened."""
    if not search.exact_seconds:
        return found, 0.0
    from pipefit.schedule.fit.exact import windows as exact

    made = exact.improve(tight, found.orders, search.exact_seconds, search.seed)
    better = replace(found, time_s=made.time_s, orders=made.orders, name=f"{found.name}, exact")
    better = merge_neighbours(tight, tables(tight), search.loops, better)
    if better.time_s < found.time_s and not _exceeds(search, better):
        found = better
    own = bool((tight.limit_bytes == search.instance.limit_bytes).all())
    return found, made.bound_s if own else 0.0


def _starts(search: Search, instance: Instance, known: list[Start]) -> list[Start]:
    """All constructions, which may be known, for many microbatches searches of fewer, extended, and the best ones
    tuned; best first."""
    problem, loops, budget = search.problem, search.loops, search.budget
    t = tables(instance)
    starts = known or all_starts(instance, problem, t, loops)
    if not starts or not budget.take(1) or starts[0].time_s <= search.goal_s:
        return starts
    microbatches = few(instance)
    if microbatches < instance.microbatches:
        short = shortened(instance, microbatches)
        short_t = tables(short)
        begin = all_starts(short, None, short_t, loops)
        begin = begin or all_starts(short, replace(problem, microbatches=microbatches), short_t, loops)
        for n in range(SHORTS if begin else 0):
            inner = budget.part(SHORT_SHARE)
            best = improve(short, short_t, loops, begin[n:] or begin, inner, search.seed + 10 * n)
            budget.spent += inner.spent
            starts += extended(instance, t, loops, short, short_t, best)
    repeated = repeating(instance, t, loops, budget, search.seed) if microbatches < instance.microbatches else []
    for n, one in enumerate([*repeated, *_different(starts)]):
        inner = budget.part(TUNE_SHARE)
        made = tuned(instance, t, loops, one, inner, search.seed + n)
        budget.spent += inner.spent
        starts += [] if made is None else [made]
    return sorted([*starts, *repeated], key=lambda start: start.time_s)


def _different(starts: list[Start]) -> list[Start]:
    """The best few with different names; patterns count as one."""
    by_name: dict[str, Start] = {}
    for start in sorted(starts, key=lambda start: start.time_s):
        by_name.setdefault("pattern" if start.name.startswith("pattern ") else start.name, start)
    return list(by_name.values())[:TUNED]


def _choose(
    problem: Problem, options: Mapping[str, CostTable], objective: Objective, loops: Loops, budget: Budget, seed: int
) -> tuple[Choice, list[Start]]:
    """One option for each stage, by what a short search reaches with it; the orders that it reached, and those of all
    constructions."""

    mixture = Mixture(problem, options, objective)
    known: list[tuple[Start, Floats]] = []
    for one in mixture.uniform:
        own = tables(one)
        best = all_starts(one, problem, own, loops)[:KEPT_STARTS]
        known += [(start, wishes(one, swept(one, own, loops, start.orders))) for start in best]

    def value(choice: Choice) -> float:
        instance, t = mixture.of(choice)
        made = list(block_starts(instance, t, loops, merge_choices(instance)[0], FEW_SPEEDS))
        builder = Builder(instance, t, loops, merge_choices(instance)[0])
        for start, wish in known:
            s = state(t, instance, start.orders)
            if loops.sweep(t, s) and fits(t, s, start.orders):
                made.append(Start(float(s.value[0]), start.name, start.orders))
            elif (time_s := builder.value(wish)) < math.inf:
                made.append(builder.start(time_s, start.name))
        if not made:
            return math.inf
        best = min(made, key=lambda start: start.time_s)
        return run(instance, t, loops, best, budget, seed, min(LOOK, 1 + budget.moves // 400)).time_s

    found = choices(problem.stages, tuple(options), value, lambda: time.perf_counter() < budget.until_s)
    if not found:
        raise _none_fits(problem, options, objective, loops)
    uniform = [choice for choice in found if len(set(choice)) == 1]
    racers = list(dict.fromkeys([*found[:KEPT_CHOICES], *uniform[:1]]))
    share = CHOICE_SHARE / len(racers)

    def searched(choice: Choice) -> tuple[Choice, list[Start]]:
        instance, t = mixture.of(choice)
        inner = budget.part(share)
        starts = all_starts(instance, problem, t, loops)
        start = improve(instance, t, loops, starts, inner, seed)
        budget.spent += inner.spent
        return choice, [start, *starts]

    return min(map(searched, racers), key=lambda one: one[1][0].time_s)


def _none_fits(problem: Problem, options: Mapping[str, CostTable], objective: Objective, loops: Loops) -> ScheduleError:
    """The error for the option that needs least."""
    uniform = [chosen(problem, options, (name,) * problem.stages) for name in options]
    instances = [Instance.of(one, objective) for one in uniform]
    needs = [least_bytes(one, instance, loops).max() for one, instance in zip(uniform, instances, strict=True)]
    least = int(np.argmin(needs))
    return _too_tight(uniform[least], instances[least], loops)


def _too_tight(problem: Problem, instance: Instance, loops: Loops) -> ScheduleError:
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


def _result(search: Search, best: Start, bound_s: float, choice: Choice) -> Fit:
    schedule, peak_bytes = search.simulated.of(best)
    return Fit(
        schedule=schedule,
        time_s=best.time_s,
        bound_s=honest(bound_s, best.time_s),
        bubble=1.0 - float(search.instance.work_s().max()) / best.time_s,
        recompute=choice,
        peak_bytes=tuple(peak_bytes.tolist()),
        how=best.name,
        moves=search.budget.spent,
    )
