"""Estimated step times of schedules on even stages, within memory: they set the order in which candidates are
simulated.

The lower bounds are far below the real times. Ordered by them, the search would try thousands of candidates that do not
fit or have large bubbles. The estimates guide the search and never exclude a candidate.

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
"""(lanes, F, I, W of one stage in seconds) -> idle seconds of the busiest lane."""

IDLE: Mapping[str, Idle] = {
    "zb-h1": lambda lanes, f, i, w: (lanes - 1) * np.maximum(0.0, f + i - w),
    "zb-h2": lambda lanes, f, i, w: (lanes - 1) * np.maximum(0.0, f + i - 2 * w),
}

OVER = 4.0
"""Penalty of a candidate that exceeds memory: its estimate grows by this times the relative excess."""

WEIGHT_SHARE = 0.4
"""Assumed share of W in a backward pass without recomputation; used for the search order only."""


def idle_s(schedule: str, lanes: int | Array, held: Array, f: Array, i: Array, w: Array) -> Array:
    """Return the estimated idle time of the busiest lane. For a V it depends on the stage-microbatches `held` on the
    fullest lane."""
    if schedule in IDLE:
        return IDLE[schedule](lanes, f, i, w)
    if schedule_facts(schedule).fused:
        return (lanes - 1) * (f + i + w)
    return np.maximum(0, 6 * lanes - 3 * held - 1) * (f + i + w) / 3


def peak_in_flight(schedule: str, placement: tuple[int, ...], microbatches: int) -> int:
    """Return a lower bound of the stage-microbatches on the fullest lane."""
    rule, lanes = schedule_facts(schedule).in_flight, max(placement) + 1
    return max(rule(lane, lanes, placement.count(lane), microbatches) for lane in (0, lanes - 1))


def sliced_guess_s(forward_s: Array, backward_s: Array, decisions: ParallelConfig) -> float:
    """Return the estimated step time of a candidate with slices and cuts, without transfers.

    Arrays [slice, stage], as in `plan/bounds/sliced_bounds.py`. The estimate is the work of the busiest lane plus its
    bubble, in units of the mean slice of a stage.
    """
    lanes, count, units = decisions.lane_of_stage, decisions.microbatches, decisions.unit_count
    load, ahead = np.bincount(lanes, (forward_s + backward_s).sum(axis=0)), np.bincount(lanes, forward_s.sum(axis=0))
    lane = int(load.argmax())
    lane_units = lanes.count(lane) * len(decisions.slices)
    f, back = ahead[lane] / lane_units, (load[lane] - ahead[lane]) / lane_units
    w = min(WEIGHT_SHARE * back, f)
    held = np.asarray(peak_in_flight(decisions.schedule, lanes, units), dtype=float)
    idle = idle_s(decisions.schedule, decisions.lane_count, held, *map(np.asarray, (f, back - w, w)))
    return count * float(load[lane]) + float(idle)
