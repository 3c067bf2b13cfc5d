"""Activations that the lanes of a schedule hold at once, read from the order of its actions.

They are exact where the closed forms of `plan/bounds/step_bounds.py` treat all stages of a lane alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from pipefit.cost.types import CostTable
from pipefit.errors import ScheduleError
from pipefit.plan.bounds.step_bounds import Ints, order_floor_bytes
from pipefit.schedule.actions import Schedule
from pipefit.schedule.families import FAMILIES, ScheduleFamily
from pipefit.schedule.problem import ScheduleProblem

PERIODS = 4
"""Microbatches per lane after which all in-flight patterns have occurred; more only repeat the steady state."""


def in_flight_bytes(
    schedule: str, placement: Sequence[int], microbatches: int, saved_bytes: Sequence[float]
) -> list[float]:
    """Return the peak bytes that each lane keeps for backward passes, with `saved_bytes` per microbatch on each stage.

    Memory kept by a postponed W is not counted. Zero if the schedule cannot be built; building it raises the error.
    """
    lanes = max(placement) + 1
    peaks = in_flight_peaks(FAMILIES[schedule], tuple(placement), min(microbatches, PERIODS * lanes))
    if peaks is None:
        return [0.0] * lanes
    saved = np.asarray(saved_bytes)
    return [
        float((counts * saved[np.asarray(placement) == lane]).sum(axis=1).max()) for lane, counts in enumerate(peaks)
    ]


def order_needs(schedule: Schedule, costs: CostTable, least_bytes: Sequence[float]) -> list[tuple[float, float]]:
    """Return, for each lane, (least memory under this order, memory of its smallest device in `least_bytes`).

    If device kinds hold different amounts, they are those of the kind that is fullest relative to its memory.
    """
    if not costs.kinds:
        return [*zip(order_floor_bytes(schedule, costs), least_bytes, strict=True)]
    kinds = [
        [*zip(order_floor_bytes(schedule, kind.table), kind.limit_bytes.tolist(), strict=True)] for kind in costs.kinds
    ]
    return [max(lane, key=lambda need: need[0] / need[1]) for lane in zip(*kinds, strict=True)]


@lru_cache(maxsize=4096)
def in_flight_peaks(family: ScheduleFamily, placement: tuple[int, ...], microbatches: int) -> tuple[Ints, ...] | None:
    """Return, for each lane, the maximal counts of microbatches held at one time, [moment, stage of the lane].

    At every other moment no stage holds more than in one of these rows. None if the schedule cannot be built.
    """
    try:
        order = family(ScheduleProblem(placement=placement, microbatches=microbatches))
    except ScheduleError:
        return None
    peaks = []
    for lane, actions in enumerate(order.lanes):
        column = {
            stage: index
            for index, stage in enumerate(s for s, stage_lane in enumerate(placement) if stage_lane == lane)
        }
        held = [0] * len(column)
        seen = {tuple(held)}
        for action in actions:
            if action.kind == "F":
                held[column[action.stage]] += 1
                seen.add(tuple(held))
            elif action.kind in ("B", "I"):
                held[column[action.stage]] -= 1
        peaks.append(_maximal_rows(np.array(sorted(seen), dtype=np.int64)))
    return tuple(peaks)


def _maximal_rows(rows: Ints) -> Ints:
    """Return the rows that are not below another row in every column."""
    maximal: list[Ints] = []
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not any(bool((larger >= row).all()) for larger in maximal):
            maximal.append(row)
    return np.array(maximal)
