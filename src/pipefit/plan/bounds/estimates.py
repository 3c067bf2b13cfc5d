"""Estimated step times of schedules on even stages, within memory: they set the order in which candidates are
simulated.

The lower bounds are far below the real times. Ordered by them, the search would try thousands of candidates that do not
fit or have large bubbles. The estimates guide the search and never exclude a candidate.

The idle time of a family is `ScheduleFamily.idle_s`.
"""

from __future__ import annotations

import numpy as np

from pipefit.cost.types import Array
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.schedule.families import family_facts

OVER = 4.0
"""Penalty of a candidate that exceeds memory: its estimate grows by this times the relative excess."""

WEIGHT_SHARE = 0.4
"""Assumed share of W in a backward pass without recomputation; used for the search order only."""


def peak_in_flight(schedule: str, placement: tuple[int, ...], microbatches: int) -> int:
    """Return a lower bound of the stage-microbatches on the fullest lane."""
    rule, lanes = family_facts(schedule).in_flight, max(placement) + 1
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
    idle = family_facts(decisions.schedule).idle_s(decisions.lane_count, held, *map(np.asarray, (f, back - w, w)))
    return count * float(load[lane]) + float(idle)
