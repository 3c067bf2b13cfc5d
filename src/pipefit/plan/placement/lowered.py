"""The placement search with the order of transfers updated: the best placement in one order need not be best in
another.

`search.search_placement` keeps the order of the given candidate and gets a part of the budget here. Then, several
times, the best placement is lowered again for its own times, and annealing continues from it in that order. Placements
are compared by their times in their own order.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pipefit.plan.placement.search import (
    ANNEALING_BUDGET,
    AnnealingRun,
    Clock,
    PlacementBudget,
    PlacementResult,
    PlacementSearch,
    search_placement,
    starting_placements,
)
from pipefit.plan.placement.shape import PlacementProblem
from pipefit.simulate import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringBudget:
    """The parts of a placement's budget before and after its order is lowered again."""

    first_part: float = 0.75
    "Fraction of the budget for the search in the given order."
    later_heats: tuple[float, ...] = (0.5, 0.2)
    """Initial temperatures of the later annealings relative to the usual one. Each gets an equal part of the remaining
    budget."""
    min_s: float = 5.0
    "Least budget for which lowering again is worth its time (a tenth to a fifth of a second for 128 devices)."
    max_slots: int = 256
    "Maximum number of slots whose order is lowered again."


LOWERING_BUDGET = LoweringBudget()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredPlacement:
    """A placement whose actions were ordered for its own times."""

    question: PlacementProblem
    timeline: Timeline
    step_s: float
    "The simulated step."


def place_lowered(
    given: LoweredPlacement,
    lower: Callable[[tuple[int, ...]], LoweredPlacement],
    budget: PlacementBudget,
    *,
    compiled: bool | None = None,
    clock: Clock = time.perf_counter,
) -> PlacementResult:
    """Return the best placement found, each in its own order as returned by `lower`; never slower than the given one.

    `lower` takes the device of every slot. Deterministic as `search_placement` is, which alone is used for short
    budgets and many devices.
    """
    began = clock()
    if compiled is None:
        compiled = budget.moves >= ANNEALING_BUDGET.compiled_moves or "numba" in sys.modules
    slots, too_short = given.question.shape.slots, budget.seconds is not None and budget.seconds < LOWERING_BUDGET.min_s
    if not given.question.has_choice or slots > LOWERING_BUDGET.max_slots or too_short:
        return search_placement(given.question, given.timeline, budget, compiled=compiled, clock=clock)
    seconds = None if budget.seconds is None else LOWERING_BUDGET.first_part * budget.seconds
    first = replace(budget, moves=int(LOWERING_BUDGET.first_part * budget.moves), seconds=seconds)
    placed = search_placement(given.question, given.timeline, first, compiled=compiled, clock=clock)
    searched = clock()
    best = min((given, lower(placed.devices)), key=lambda one: one.step_s)
    once_s = clock() - searched
    moves, simulated, cuts = placed.moves, placed.simulated, placed.cuts
    racks = starting_placements(given.question)[1]
    random = np.array([54321 + budget.seed, 98765 + 7 * budget.seed], dtype=np.int64)
    for number, heat in enumerate(LOWERING_BUDGET.later_heats):
        searcher = PlacementSearch(best.question, best.timeline, compiled)
        start = best.question.devices
        start_s = searcher.simulate_placement(start)
        searcher.probe_entries(start)
        parts = len(LOWERING_BUDGET.later_heats) - number
        left = None if budget.seconds is None else budget.seconds - (clock() - began) - parts * once_s
        course = AnnealingRun(
            moves=(budget.moves - first.moves) // len(LOWERING_BUDGET.later_heats),
            heat=heat * searcher.way.hot,
            random=random,
            seconds=None if left is None else max(0.0, left) / parts,
            clock=clock,
        )
        searcher.run_annealing(start, start_s, racks, course)
        again = lower(tuple(searcher.best[:slots].tolist()))
        best = min((best, again), key=lambda one: one.step_s)
        moves, simulated, cuts = moves + searcher.moves, simulated + len(searcher.step_s), cuts + len(searcher.known)
    return PlacementResult(
        devices=tuple(best.question.devices[:slots].tolist()),
        step_s=best.step_s,
        given_s=given.step_s,
        moves=moves,
        simulated=simulated,
        cuts=cuts,
    )
