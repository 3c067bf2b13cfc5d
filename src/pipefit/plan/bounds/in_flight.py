"""What the lanes of a schedule hold at once, read off its own order: exact where the closed forms of
`plan/bounds/step_bounds.py` count a lane's stages alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from pipefit.cost.types import CostTable
from pipefit.errors import ScheduleError
from pipefit.plan.bounds.step_bounds import Ints, order_floor_bytes
from pipefit.schedule.actions import Schedule
from pipefit.schedule.families import FAMILIES
from pipefit.schedule.problem import ScheduleProblem

PERIODS = 4
"""After so many microbatches a lane, all patterns of what lanes hold have been seen; more repeat the steady state."""


def in_flight_bytes(
    schedule: str, placement: Sequence[int], microbatches: int, saved_bytes: Sequence[float]
) -> list[float]:
    """The most that every lane keeps at once for backwards, where a microbatch keeps `saved_bytes` on each stage.

    What a W that is put off keeps is not counted. Zero where the schedule cannot be made: its own error says why.
    """
    lanes = max(placement) + 1
    found = in_flight_peaks(schedule, tuple(placement), min(microbatches, PERIODS * lanes))
    if found is None:
        return [0.0] * lanes
    saved = np.asarray(saved_bytes)
    return [float((counts @ saved[np.asarray(placement) == lane]).max()) for lane, counts in enumerate(found)]


def order_needs(schedule: Schedule, costs: CostTable, least_bytes: Sequence[float]) -> list[tuple[float, float]]:
    """Of every lane the least memory under this order, and what there is of it: of its smallest device (`least_bytes`),
    or where kinds of devices hold different amounts, of the kind that is fullest for its own memory."""
    if not costs.kinds:
        return [*zip(order_floor_bytes(schedule, costs), least_bytes, strict=True)]
    kinds = [
        [*zip(order_floor_bytes(schedule, kind.table), kind.limit_bytes.tolist(), strict=True)] for kind in costs.kinds
    ]
    return [max(lane, key=lambda need: need[0] / need[1]) for lane in zip(*kinds, strict=True)]


@lru_cache(maxsize=4096)
def in_flight_peaks(schedule: str, placement: tuple[int, ...], microbatches: int) -> tuple[Ints, ...] | None:
    """For every lane the largest counts of microbatches that its stages hold at one time, [moment, stage of the lane]:
    every other moment holds no more of any stage than one of these. None where the schedule cannot be made."""
    try:
        made = FAMILIES[schedule](ScheduleProblem(placement=placement, microbatches=microbatches))
    except ScheduleError:
        return None
    found = []
    for lane, actions in enumerate(made.lanes):
        column = {stage: index for index, stage in enumerate(s for s, other in enumerate(placement) if other == lane)}
        held = [0] * len(column)
        seen = {tuple(held)}
        for action in actions:
            if action.kind == "F":
                held[column[action.stage]] += 1
                seen.add(tuple(held))
            elif action.kind in ("B", "I"):
                held[column[action.stage]] -= 1
        found.append(_maximal_rows(np.array(sorted(seen), dtype=np.int64)))
    return tuple(found)


def _maximal_rows(rows: Ints) -> Ints:
    """The rows that no other row reaches in every column."""
    kept: list[Ints] = []
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not any(bool((other >= row).all()) for other in kept):
            kept.append(row)
    return np.array(kept)
