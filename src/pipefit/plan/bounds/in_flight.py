"""Activations that the lanes of a schedule hold at once, read from the order of its actions.

They are exact where the closed forms of `plan/bounds/step_bounds.py` treat all stages of a lane alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from pipefit.cost.types import CostTable, Ints
from pipefit.errors import ScheduleError
from pipefit.plan.bounds.step_bounds import order_floor_bytes
from pipefit.schedule.actions import Schedule
from pipefit.schedule.families import FAMILIES, ScheduleFamily
from pipefit.schedule.problem import ScheduleProblem

PERIODS = 4
"""Microbatches per lane after which all in-flight patterns have occurred; more only repeat the steady state."""


def in_flight_bytes(
    schedule: str,
    placement: Sequence[int],
    microbatches: int,
    saved_bytes: Sequence[float],
    pending_bytes: Sequence[float] = (),
) -> list[float]:
    """Return the peak bytes that each lane keeps for backward passes. Each stage keeps `saved_bytes` per microbatch
    from F to B or I, and `pending_bytes` from I to W (nothing by default).

    Zero if the schedule cannot be built; building it raises the error.
    """
    lanes = max(placement) + 1
    peaks = in_flight_peaks(FAMILIES[schedule], tuple(placement), min(microbatches, PERIODS * lanes))
    if peaks is None:
        return [0.0] * lanes
    bytes_of_stage = np.stack([np.asarray(saved_bytes), np.asarray(pending_bytes or np.zeros(len(placement)))])
    return [
        float((counts * bytes_of_stage[:, np.asarray(placement) == lane].ravel()).sum(axis=1).max())
        for lane, counts in enumerate(peaks)
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
    """Return, for each lane, the maximal counts of microbatches held at one time: [moment, column].

    The first columns are the microbatches of every stage of the lane between F and B or I, the others those between I
    and W. At every other moment no column holds more than in one of these rows. None if the schedule cannot be built.
    """
    try:
        order = family(ScheduleProblem(placement=placement, microbatches=microbatches))
    except ScheduleError:
        return None
    peaks = []
    for lane, actions in enumerate(order.lanes):
        stages = [stage for stage, stage_lane in enumerate(placement) if stage_lane == lane]
        column, count = {stage: number for number, stage in enumerate(stages)}, len(stages)
        held = [0] * (2 * count)
        seen = {tuple(held)}
        for action in actions:
            index = column[action.stage]
            if action.kind == "F":
                held[index] += 1
                seen.add(tuple(held))
            elif action.kind == "W":
                held[count + index] -= 1
            else:
                held[index] -= 1
                if action.kind == "I":
                    held[count + index] += 1
                    seen.add(tuple(held))
        peaks.append(_maximal_rows(np.array(sorted(seen), dtype=np.int64)))
    return tuple(peaks)


def _maximal_rows(rows: Ints) -> Ints:
    """Return the rows that are not below another row in every column."""
    maximal: list[Ints] = []
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not any(bool((larger >= row).all()) for larger in maximal):
            maximal.append(row)
    return np.array(maximal)
