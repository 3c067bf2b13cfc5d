"""What a schedule likely takes on even stages, within its memory: in which order to look at them.

Their bounds are far below what they reach, so the search would go through thousands of candidates that do not fit or
idle a lot before it meets a good one. The estimates here guide it; they decide nothing.

Idle times on d equal stages (Qi et al. 2023, arXiv 2401.10241, section 2; Qi et al. 2024, arXiv 2405.15362, appendix):
(d - 1)(F + I - W) of ZB-H1, (d - 1)(F + I - 2 W) of ZB-H2, max(0, 6 d - 3 k - 1) slots of a V that holds k
stage-microbatches; a slot is a third of a stage's F, I and W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pipefit.cost.types import Array
from pipefit.plan.bounds.step_bounds import schedule_facts
from pipefit.plan.request.decisions import ParallelConfig

Idle = Callable[[int | Array, Array, Array, Array], Array]
"""(lanes, F, I, W of one stage in seconds) -> seconds that the busiest lane idles."""

IDLE: Mapping[str, Idle] = {
    "zb-h1": lambda lanes, f, i, w: (lanes - 1) * np.maximum(0.0, f + i - w),
    "zb-h2": lambda lanes, f, i, w: (lanes - 1) * np.maximum(0.0, f + i - 2 * w),
}

OVER = 4.0
"""How much a candidate that lacks memory is put back: so many times its lack, as a part of its memory."""

WEIGHT_SHARE = 0.4
"""Of a backward without recomputation, the part that is W; assumed, for the order of looking only."""


def idle_s(schedule: str, lanes: int | Array, held: Array, f: Array, i: Array, w: Array) -> Array:
    """A guess at what the busiest lane idles: for a V by the stage-microbatches `held` on the fullest lane."""
    if schedule in IDLE:
        return IDLE[schedule](lanes, f, i, w)
    if schedule_facts(schedule).fused:
        return (lanes - 1) * (f + i + w)
    return np.maximum(0, 6 * lanes - 3 * held - 1) * (f + i + w) / 3


def peak_in_flight(schedule: str, placement: tuple[int, ...], microbatches: int) -> int:
    """Stage-microbatches on the fullest lane, at least."""
    rule, lanes = schedule_facts(schedule).in_flight, max(placement) + 1
    return max(rule(lane, lanes, placement.count(lane), microbatches) for lane in (0, lanes - 1))


def sliced_guess_s(forward_s: Array, backward_s: Array, decisions: ParallelConfig) -> float:
    """What a candidate with slices and cuts likely takes, transfers apart: arrays [slice, stage], as
    `plan/bounds/sliced_bounds.py` has them. The busiest lane's work, and what a lane like it idles, a mean slice of a
    stage being the unit."""
    lanes, count, units = decisions.lane_of_stage, decisions.microbatches, decisions.unit_count
    load, ahead = np.bincount(lanes, (forward_s + backward_s).sum(axis=0)), np.bincount(lanes, forward_s.sum(axis=0))
    lane = int(load.argmax())
    each = lanes.count(lane) * len(decisions.slices)
    f, back = ahead[lane] / each, (load[lane] - ahead[lane]) / each
    w = min(WEIGHT_SHARE * back, f)
    held = np.asarray(peak_in_flight(decisions.schedule, lanes, units), dtype=float)
    idle = idle_s(decisions.schedule, decisions.lane_count, held, *map(np.asarray, (f, back - w, w)))
    return count * float(load[lane]) + float(idle)
