"""What a schedule with split backwards likely takes on even stages, within its memory: in which order to look at them.

Their bounds are far below what they reach, so the search would go through thousands of candidates that do not fit or
idle a lot before it meets a good one. The estimates here guide it; they decide nothing.

Idle times on d equal stages (Qi et al. 2023, arXiv 2401.10241, section 2; Qi et al. 2024, arXiv 2405.15362, appendix):
(d - 1)(F + I - W) of ZB-H1, (d - 1)(F + I - 2 W) of ZB-H2, max(0, 6 d - 3 k - 1) slots of a V that holds k
stage-microbatches; a slot is a third of a stage's F, I and W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from pipefit.plan.bounds import facts_of
from pipefit.plan.cut import Cutter
from pipefit.plan.decisions import Decisions
from pipefit.plan.types import Job

Idle = Callable[[int, float, float, float], float]
"""(lanes, F, I, W of one stage in seconds) -> seconds that the busiest lane idles."""

IDLE: Mapping[str, Idle] = {
    "zb-h1": lambda lanes, f, i, w: (lanes - 1) * max(0.0, f + i - w),
    "zb-h2": lambda lanes, f, i, w: (lanes - 1) * max(0.0, f + i - 2 * w),
}

OVER = 4.0
"""How much a candidate that lacks memory is put back: so many times its lack, as a part of its memory."""

WEIGHT_SHARE = 0.4
"""Of a backward without recomputation, the part that is W; assumed, for the order of looking only."""


def estimate_s(cutter: Cutter, job: Job, decisions: Decisions, schedules: Iterable[str]) -> float:
    """A guess at the step with the best of these schedules, larger where the memory will hardly do."""
    forward_s, backward_s, _ = cutter.floor_s(job, decisions)
    static, saved, limit = cutter.floor_bytes(job, decisions)
    lanes, stages, count = decisions.lanes, decisions.stage_count, decisions.microbatches
    w = min(WEIGHT_SHARE * backward_s, forward_s)
    f, i, w = forward_s / stages, (backward_s - w) / stages, w / stages
    work_s = count * (forward_s + backward_s) / lanes
    best = float("inf")
    for schedule in schedules:
        held = most_held(schedule, lanes, stages, count)
        if schedule in IDLE:
            idle_s = IDLE[schedule](lanes, f, i, w)
        else:
            idle_s = max(0, 6 * lanes - 3 * held - 1) * (f + i + w) / 3
        lack = max(0.0, (static / lanes + held * saved / stages) / limit - 1.0)
        best = min(best, (work_s + idle_s) * (1 + OVER * lack))
    return best


@lru_cache(maxsize=65536)
def most_held(schedule: str, lanes: int, stages: int, microbatches: int) -> int:
    """Stage-microbatches on the fullest lane, at least, where every lane holds as many stages."""
    rule = facts_of(schedule).in_flight
    return max(rule(lane, lanes, stages // lanes, microbatches) for lane in (0, lanes - 1))
