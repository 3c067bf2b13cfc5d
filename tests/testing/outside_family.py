"""A schedule family from outside the package: breadth-first order of three stages per lane.

All forwards run stage by stage, then all input gradients in the opposite order (Lamy-Poirier 2022, arXiv 2211.05953),
and all weight gradients last, where they fill the end of the step.
"""

from __future__ import annotations

from pipefit.schedule import Action, Schedule, ScheduleFamily, ScheduleProblem

STAGES_PER_LANE = 3


def looped_stages(devices: int) -> tuple[int, ...]:
    """Return the placement: stage s on lane s mod d."""
    return tuple(range(devices)) * STAGES_PER_LANE


def build_breadth_first(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule, for any placement."""
    units = [(m, k) for m in range(problem.microbatches) for k in range(problem.slices)]
    backward_units = [(m, k) for m in range(problem.microbatches) for k in reversed(range(problem.slices))]
    lanes = []
    for lane in range(problem.num_lanes):
        stages = problem.lane_stages(lane)
        forwards = [Action("F", stage, m, k) for stage in stages for m, k in units]
        inputs, weights = (
            [Action(kind, stage, m, k) for stage in reversed(stages) for m, k in backward_units] for kind in ("I", "W")
        )
        lanes.append((*forwards, *inputs, *weights))
    return Schedule(
        name=BREADTH_FIRST.name,
        placement=problem.placement,
        microbatches=problem.microbatches,
        slices=problem.slices,
        lanes=tuple(lanes),
    )


BREADTH_FIRST = ScheduleFamily(
    name="breadth-first",
    build=build_breadth_first,
    placement=looped_stages,
    in_flight=lambda lane, lanes, stages_per_lane, microbatches: microbatches * stages_per_lane,
    warm_up=lambda lane, lanes, stages_per_lane, microbatches, slices: microbatches * slices * stages_per_lane,
)
