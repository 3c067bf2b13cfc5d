"""The part of the space that cuts sequences: every count of microbatches of a panel with the slicings worth trying.

A search looks at what does not cut first. What a step with slices takes at least by a closed form, and what its lanes
hold at least, is then worked out for all candidates of a panel from its floor without slices; only those that promise
less than the best step found so far are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipefit.cost.types import Array
from pipefit.cost.work import StageWork
from pipefit.plan.bounds.estimates import OVER
from pipefit.plan.bounds.step_bounds import schedule_facts
from pipefit.plan.candidates.grid import CandidateGrid, Count
from pipefit.plan.candidates.grid_bounds import LowerBounds
from pipefit.plan.candidates.grid_figures import GridBounds
from pipefit.plan.candidates.slicings import SequenceSlicer
from pipefit.plan.slicing.cuts import uniform_slices
from pipefit.plan.types import Job

CHEAPER = 0.9
"""What a sequence in slices takes at least of its time in one, for leaving candidates out before their slices are
costed: a kernel that computes what a causal mask hides saves some of it by slices."""

PANELS, LEAST_PANELS = 192, 12
"""Panels of which candidates with slices are made, and on the largest clusters: there are thousands."""

SLICINGS, LEAST_SLICINGS = 512, 32
"""Slicings that are costed layer by layer, and on the largest clusters."""

SOME = 8
"""Slices that are assumed where panels are ranked."""

SPLIT_IDLE = 1 / 3
"""What of the filling is left where backwards are split, for ranking."""

Cut = tuple[Count, tuple[int, ...]]
"""A count, and the tokens of each slice."""


@dataclass(frozen=True, slots=True)
class PruningThreshold:
    """What a candidate with slices has to beat."""

    floors: LowerBounds
    best_s: float


def most_promising(space: Sequence[CandidateGrid], hope: PruningThreshold, part: float = 1.0) -> list[CandidateGrid]:
    """The panels whose best candidate is likely the fastest with slices, this part of PANELS, in the order of the
    space."""
    guessed: list[tuple[float, int]] = []
    for places, floor in hope.floors.bound_batches(space):
        guessed += zip(_likely_step_s(floor), places, strict=True)
    kept = sorted(each for each in guessed if each[0] <= hope.best_s)[: max(LEAST_PANELS, int(part * PANELS))]
    return [space[place] for _, place in sorted(kept, key=lambda each: each[1])]


def _likely_step_s(floor: GridBounds) -> list[float]:
    """What the best even count of every panel likely takes in SOME slices, filling and what memory lacks included."""
    even = [which for which, count in enumerate(floor.panels[0].counts) if max(count[1]) == 1]
    if not even:
        return [float("inf")] * len(floor.panels)
    count, depth = floor.count[even], floor.lane_count
    idle = (depth - 1) / (floor.turns * SOME) * (1.0 if floor.is_fused else SPLIT_IDLE)
    least = _least_s(floor, 1.0 + (depth - 1) / (2 * SOME))[:, even]
    steps_s = (least * (count + idle) / count).min(axis=(1, 2))
    return [float(step_s) if lanes > 1 else float("inf") for step_s, lanes in zip(steps_s, depth.ravel(), strict=True)]


def slice_grid(
    panel: CandidateGrid, job: Job, pins: Mapping[str, Any], slicer: SequenceSlicer | None
) -> CandidateGrid | None:
    """The candidates of a panel that cut sequences: every count with each slicing that is worth trying. Rows that are
    divided unevenly, and pipelines of one lane, are cut where the user says so. None where there are none."""
    wanted = pins.get("slices")
    if wanted == 1 or (wanted is None and (slicer is None or panel.lanes == 1)):
        return None
    if isinstance(wanted, tuple) or slicer is None:
        each = wanted if isinstance(wanted, tuple) else uniform_slices(job.sequence, wanted or 1)
        return with_slices(panel, [(count, each) for count in panel.counts])
    if wanted is not None:
        stages = slicer.stages_for(panel, range(len(panel.counts)))
        return with_slices(
            panel,
            [
                (count, slices)
                for count, stage in zip(panel.counts, stages, strict=True)
                for slices in slicer.candidate_slicings(stage, panel.lanes, panel.stages_per_lane, count[0])
            ],
        )
    if slicer.obstacle is not None:
        return None
    panel, numbers = promising_slicings(panel, slicer, None)
    return apply_slicings(panel, numbers, slicer)


def best_sliced_grids(
    space: Sequence[CandidateGrid], slicer: SequenceSlicer, hope: PruningThreshold, part: float = 1.0
) -> list[CandidateGrid]:
    """What `slice_grid` makes of panels without pins of slices, of all their slicings this part of SLICINGS: those that
    promise the shortest steps."""
    if slicer.obstacle is not None:
        return []
    each = [promising_slicings(panel, slicer, hope) for panel in space if panel.lanes > 1]
    every = sorted(one.step_s for _, numbers in each for one in numbers)
    most = max(LEAST_SLICINGS, int(part * SLICINGS))
    until_s = every[most - 1] if most < len(every) else float("inf")
    kept = ((panel, [one for one in numbers if one.step_s <= until_s]) for panel, numbers in each)
    made = (apply_slicings(panel, numbers, slicer) for panel, numbers in kept)
    return [one for one in made if one is not None]


@dataclass(frozen=True, slots=True)
class SlicingOption:
    """A number of slices that a count of microbatches may be cut into."""

    step_s: float
    "What a step likely takes, the idle time of split backwards left out; 0 where there is nothing to beat."
    count: Count
    stage: StageWork
    slices: int


def promising_slicings(
    panel: CandidateGrid, slicer: SequenceSlicer, hope: PruningThreshold | None
) -> tuple[CandidateGrid, list[SlicingOption]]:
    """Every even count with the numbers of slices that the closed form prefers, as far as they may beat the best; and
    the panel with the ways of recomputing that may."""
    kept = [which for which, count in enumerate(panel.counts) if max(count[1]) == 1]
    least_s = _least_s(hope.floors.bound_grid(panel))[0] if hope is not None and kept else None
    if hope is not None and least_s is not None:
        ways = [way for way in range(len(panel.recompute)) if (least_s[kept, way] <= hope.best_s).any()]
        kept = [which for which in kept if (least_s[which] <= hope.best_s).any()]
        panel, least_s = replace(panel, recompute=tuple(panel.recompute[way] for way in ways)), least_s[:, ways]
    found: list[SlicingOption] = []
    idle = (panel.lanes - 1) / panel.stages_per_lane if schedule_facts(panel.names[0]).fused else 0.0
    for which, stage in zip(kept, slicer.stages_for(panel, kept), strict=True):
        count = panel.counts[which]
        for number in slicer.slice_counts(stage, panel.lanes, panel.stages_per_lane, count[0]):
            step_s = 0.0
            if hope is not None and least_s is not None:
                each_s = float(least_s[which].min()) / count[0] / CHEAPER
                step_s = (count[0] + idle / number) * slicer.relative_costs(stage)[number] * each_s
            if hope is None or step_s <= hope.best_s:
                found.append(SlicingOption(step_s, count, stage, number))
    return panel, found


def apply_slicings(
    panel: CandidateGrid, numbers: Sequence[SlicingOption], slicer: SequenceSlicer
) -> CandidateGrid | None:
    """The panel with its counts cut into these numbers of slices."""
    return with_slices(panel, [(one.count, slicer.cut_sequence(one.stage, one.slices)) for one in numbers])


def _least_s(floor: GridBounds, alive: float | Array = 1.0) -> Array:
    """Seconds of a step with slices, its filling left out, put back by what memory lacks: [panel, microbatches,
    recomputation]. A lane holds `alive` microbatches of its layers at once, one at least, whatever the slices."""
    held = floor.static_bytes.min(axis=2) + alive * floor.stack.saved_bytes
    lack = np.maximum(0.0, held / floor.memory_bytes[:, None, None] - 1.0)
    least: Array = CHEAPER * floor.count * floor.lane_s * (1.0 + OVER * lack)
    return least


def with_slices(panel: CandidateGrid, cut: Sequence[Cut]) -> CandidateGrid | None:
    """The panel with these counts and slicings, as far as there are units enough for one of its schedules."""
    able = [(count, slices) for count, slices in cut if count[0] * max(1, len(slices)) >= min(panel.least)]
    if not able:
        return None
    if len(able) == len(panel.counts) and not able[0][1]:
        return panel
    slices = tuple(slices for _, slices in able) if able[0][1] else ()
    return replace(panel, counts=tuple(count for count, _ in able), slices=slices)
