"""The sliced part of the space: every count of microbatches of a grid with its promising slicings.

Plans without slices are searched first. A closed form then gives, for all candidates of a grid, a lower bound of the
step with slices and of the memory of its lanes, from the grid's bounds without slices. Sliced candidates are built only
if they could beat the best step known so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipefit.cost.types import Array
from pipefit.cost.work import StageWork
from pipefit.plan.bounds.estimates import OVER
from pipefit.plan.candidates.grid import CandidateGrid, Count
from pipefit.plan.candidates.grid_bounds import LowerBounds
from pipefit.plan.candidates.grid_figures import GridBounds
from pipefit.plan.candidates.slicing_budget import SLICING_BUDGET
from pipefit.plan.candidates.slicings import SequenceSlicer
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.slicing.cuts import uniform_slices
from pipefit.plan.types import Job
from pipefit.schedule.families import family_facts

CHEAPER = 0.9
"""Assumed lower bound of a sliced sequence's time relative to an unsliced one, for pruning before slices are costed: a
kernel that computes the masked half of causal attention saves part of it with slices."""

SPLIT_IDLE = 1 / 3
"""Part of the pipeline bubble that remains where backwards are split, for ranking."""

Cut = tuple[Count, tuple[int, ...]]
"""A count, and the tokens of each slice."""


@dataclass(frozen=True, slots=True)
class PruningThreshold:
    """The step time a sliced candidate has to beat, with the bounds to compare by."""

    floors: LowerBounds
    best_s: float


def most_promising(
    space: Sequence[CandidateGrid], threshold: PruningThreshold, part: float = 1.0
) -> list[CandidateGrid]:
    """Return the grids whose best candidate is likely the fastest with slices, in the order of the space.

    There are at most `part` of the budget.
    """
    guessed: list[tuple[float, int]] = []
    for places, floor in threshold.floors.bound_batches(space):
        guessed += zip(_likely_step_s(floor), places, strict=True)
    count = max(SLICING_BUDGET.least_grids, int(part * SLICING_BUDGET.grids))
    best = sorted(guess for guess in guessed if guess[0] <= threshold.best_s)[:count]
    return [space[index] for _, index in sorted(best, key=lambda guess: guess[1])]


def _likely_step_s(floor: GridBounds) -> list[float]:
    """Return the estimated step of every grid's best even count in a few slices, including the bubble and missing
    memory."""
    even = [which for which, count in enumerate(floor.grids[0].counts) if max(count[1]) == 1]
    if not even:
        return [float("inf")] * len(floor.grids)
    count, depth = floor.count[even], floor.lane_count
    idle = (depth - 1) / (floor.turns * SLICING_BUDGET.ranked_slices) * (1.0 if floor.is_fused else SPLIT_IDLE)
    least = _least_s(floor, 1.0 + (depth - 1) / (2 * SLICING_BUDGET.ranked_slices))[:, even]
    steps_s = (least * (count + idle) / count).min(axis=(1, 2))
    return [float(step_s) if lanes > 1 else float("inf") for step_s, lanes in zip(steps_s, depth.ravel(), strict=True)]


def slice_grid(
    grid: CandidateGrid, job: Job, constraints: Constraints, slicer: SequenceSlicer | None
) -> CandidateGrid | None:
    """Return the candidates of a grid with sliced sequences: every count with each promising slicing; None if there are
    none.

    Uneven rows, and pipelines of one lane, are sliced only on request.
    """
    wanted = constraints.slices
    if wanted == 1 or (wanted is None and (slicer is None or grid.lanes == 1)):
        return None
    if isinstance(wanted, tuple) or slicer is None:
        slices_wanted = wanted if isinstance(wanted, tuple) else uniform_slices(job.sequence, wanted or 1)
        return with_slices(grid, [(count, slices_wanted) for count in grid.counts])
    if wanted is not None:
        stages = slicer.stages_for(grid, range(len(grid.counts)))
        return with_slices(
            grid,
            [
                (count, slices)
                for count, stage in zip(grid.counts, stages, strict=True)
                for slices in slicer.candidate_slicings(stage, grid.lanes, grid.stages_per_lane, count[0])
            ],
        )
    if slicer.obstacle is not None:
        return None
    grid, numbers = promising_slicings(grid, slicer, None)
    return apply_slicings(grid, numbers, slicer)


def best_sliced_grids(
    space: Sequence[CandidateGrid], slicer: SequenceSlicer, threshold: PruningThreshold, part: float = 1.0
) -> list[CandidateGrid]:
    """Return the grids of `slice_grid` without constraints on slices, limited to the fastest `part` of the budget
    slicings."""
    if slicer.obstacle is not None:
        return []
    options_by_grid = [promising_slicings(grid, slicer, threshold) for grid in space if grid.lanes > 1]
    steps_s = sorted(option.step_s for _, numbers in options_by_grid for option in numbers)
    limit = max(SLICING_BUDGET.least_slicings, int(part * SLICING_BUDGET.slicings))
    until_s = steps_s[limit - 1] if limit < len(steps_s) else float("inf")
    within_limit = (
        (grid, [option for option in numbers if option.step_s <= until_s]) for grid, numbers in options_by_grid
    )
    sliced_grids = (apply_slicings(grid, numbers, slicer) for grid, numbers in within_limit)
    return [option for option in sliced_grids if option is not None]


@dataclass(frozen=True, slots=True)
class SlicingOption:
    """A number of slices for a count of microbatches."""

    step_s: float
    "Estimated step time, without the idle time of split backwards; 0 if there is no threshold."
    count: Count
    stage: StageWork
    slices: int


def promising_slicings(
    grid: CandidateGrid, slicer: SequenceSlicer, threshold: PruningThreshold | None
) -> tuple[CandidateGrid, list[SlicingOption]]:
    """Return the grid and the slicings that could beat the threshold.

    The slicings are every even count with the numbers of slices that the closed form prefers. The grid keeps only the
    kinds of recomputation that could beat the threshold.
    """
    count_indices = [which for which, count in enumerate(grid.counts) if max(count[1]) == 1]
    least_s = _least_s(threshold.floors.bound_grid(grid))[0] if threshold is not None and count_indices else None
    if threshold is not None and least_s is not None:
        recompute_indices = [
            recompute_index
            for recompute_index in range(len(grid.recompute))
            if (least_s[count_indices, recompute_index] <= threshold.best_s).any()
        ]
        count_indices = [which for which in count_indices if (least_s[which] <= threshold.best_s).any()]
        grid, least_s = (
            replace(grid, recompute=tuple(grid.recompute[recompute_index] for recompute_index in recompute_indices)),
            least_s[:, recompute_indices],
        )
    options: list[SlicingOption] = []
    idle = (grid.lanes - 1) / grid.stages_per_lane if family_facts(grid.names[0]).fused else 0.0
    for which, stage in zip(count_indices, slicer.stages_for(grid, count_indices), strict=True):
        count = grid.counts[which]
        for number in slicer.slice_counts(stage, grid.lanes, grid.stages_per_lane, count[0]):
            step_s = 0.0
            if threshold is not None and least_s is not None:
                each_s = float(least_s[which].min()) / count[0] / CHEAPER
                step_s = (count[0] + idle / number) * slicer.relative_costs(stage)[number] * each_s
            if threshold is None or step_s <= threshold.best_s:
                options.append(SlicingOption(step_s, count, stage, number))
    return grid, options


def apply_slicings(
    grid: CandidateGrid, numbers: Sequence[SlicingOption], slicer: SequenceSlicer
) -> CandidateGrid | None:
    """Return the grid with its counts cut into these numbers of slices."""
    return with_slices(grid, [(option.count, slicer.cut_sequence(option.stage, option.slices)) for option in numbers])


def _least_s(floor: GridBounds, alive: float | Array = 1.0) -> Array:
    """Return seconds of a step with slices, without its bubble, increased for missing memory: [grid, microbatches,
    recomputation].

    A lane holds `alive` microbatches of its layers at once, at least one, for any number of slices.
    """
    held = floor.static_bytes.min(axis=2) + alive * floor.stack.saved_bytes
    lack = np.maximum(0.0, held / floor.memory_bytes[:, None, None] - 1.0)
    least: Array = CHEAPER * floor.count * floor.lane_s * (1.0 + OVER * lack)
    return least


def with_slices(grid: CandidateGrid, cut: Sequence[Cut]) -> CandidateGrid | None:
    """Return the grid with these counts and slicings, limited to those with enough units for one of its schedules; else
    None."""
    able = [(count, slices) for count, slices in cut if count[0] * max(1, len(slices)) >= min(grid.least)]
    if not able:
        return None
    if len(able) == len(grid.counts) and not able[0][1]:
        return grid
    slices = tuple(slices for _, slices in able) if able[0][1] else ()
    return replace(grid, counts=tuple(count for count, _ in able), slices=slices)
