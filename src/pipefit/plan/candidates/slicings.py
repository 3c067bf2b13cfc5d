"""Which slicings a search tries for a layout: equal-cost cuts, in the few numbers that a closed form prefers.

The closed form stands in `plan/slicing/count.py`; here is what it works on, C(s): what a lane needs for one sequence in
s slices by the costs of the layers, with what each slice costs anew (launches, contexts, products too small for the
device). Where microbatches are many, stages few or sequences short, no number promises a shorter step than no slices,
and none is tried. The simulator decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from pipefit.cost.compute.curves import stage_overhead_s
from pipefit.cost.pipeline.table import ACTION_OVERHEAD_S
from pipefit.cost.types import Array
from pipefit.cost.work import StageWork
from pipefit.errors import PlanError
from pipefit.layout import Mesh
from pipefit.plan.assemble.structure import make_groups
from pipefit.plan.candidates.grid import CandidateGrid
from pipefit.plan.cutting.cutter import LayerCutter
from pipefit.plan.devices.fleet import Pair, pairs_of
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.sliceable import slicing_obstacles
from pipefit.plan.slicing.count import LADDER, promising_counts, slice_count_ladder, step_s
from pipefit.plan.slicing.cuts import Counts, Seconds, TimeOf, check_number, equal_cost, most_slices, slice_grain
from pipefit.plan.slicing.slice_costs import SliceRows
from pipefit.plan.types import Job, Recompute

Slices = tuple[int, ...]

ACTIONS = 12_000
"""The most actions of an order with slices: longer ones take too long to look at, and gain little by more slices."""

PROCESSOR_TILE, ACCELERATOR_TILE, LEAST_TILE = 8, 64, 8
"""Slices are multiples of so many tokens: what kernels of a processor and of an accelerator want, and what those need
where slices are short."""

TILES = 8
"""A slice has so many tiles, or tiles become smaller: rounding to them would cost more than they save."""

SAMPLES = 8
"""Slice lengths at which layers are costed for equal-cost cuts, alone and at the end of the sequence."""

CELLS = 256
"""Where a sequence has more multiples than this, a search cuts it at some of them only."""


def slicer_of(cutter: LayerCutter, job: Job, pins: Mapping[str, Any]) -> SequenceSlicer:
    """The slicings of a job under these pins: what costs were worked out for one search stays for the next."""
    key = (job, *(pins.get(name) for name in ("slices", "shards", "slice_multiple")))
    if key not in cutter.slicers:
        cutter.slicers[key] = SequenceSlicer(cutter, job, pins)
    return cutter.slicers[key]  # type: ignore[no-any-return]


class SequenceSlicer:
    """The slicings of one search."""

    def __init__(self, cutter: LayerCutter, job: Job, pins: Mapping[str, Any]) -> None:
        self.cutter, self.job = cutter, job
        self.rows = SliceRows(cutter.network, cutter.layers)
        self.obstacle: PlanError | None = next(slicing_obstacles(cutter.programs.model), None)
        "Why the model's sequences cannot be cut."
        self.wanted: int | Slices | None = pins.get("slices")
        shards: tuple[int, ...] = pins.get("shards", (1,))
        self._tile = pins.get("slice_multiple", PROCESSOR_TILE if cutter.network.over_gloo else ACCELERATOR_TILE)
        self._shares = sum(shards)
        self.finest = slice_grain(pins.get("slice_multiple", LEAST_TILE), self._shares)
        "Tokens that every slice is a multiple of, however short; what is left over lengthens the last."
        self._stages: dict[object, StageWork] = {}
        self._curves: dict[int, TimeOf] = {}
        self._cut: dict[tuple[int, int], Slices] = {}
        self._numbers: dict[object, tuple[int, ...]] = {}
        self._wholes: dict[int, tuple[Counts, Array]] = {}
        self._dearer: dict[int, Mapping[int, float]] = {}

    def token_multiple(self, number: int) -> int:
        """The tokens that each of so many slices is a multiple of: a tile, or less where that leaves them too few."""
        tile = self._tile
        while slice_grain(tile // 2, self._shares) >= self.finest and self.job.sequence < TILES * number * tile:
            tile //= 2
        return slice_grain(tile, self._shares)

    @property
    def finest_multiple(self) -> int:
        """The finest multiple that has no more places in the sequence than a search looks at."""
        return self.finest * max(1, -(-self.job.sequence // (self.finest * CELLS)))

    def candidate_slicings(self, stage: StageWork, lanes: int, turns: int, microbatches: int) -> tuple[Slices, ...]:
        """What is tried beside no slices, for lanes with `turns` stages each; `stage_work` is all layers on one of
        them."""
        if self.obstacle is not None:
            return ()
        if isinstance(self.wanted, tuple):
            return (self.wanted,)
        if self.wanted is not None:
            return (self.cut_sequence(stage, self.wanted),) if self.wanted > 1 else ()
        return tuple(
            self.cut_sequence(stage, number) for number in self.slice_counts(stage, lanes, turns, microbatches)
        )

    def slice_counts(self, stage: StageWork, lanes: int, turns: int, microbatches: int) -> tuple[int, ...]:
        """How many slices are worth trying; none where the closed form promises nothing of them."""
        key = (id(stage), lanes, turns, microbatches)
        if key not in self._numbers:
            steps_s = self.closed_form_s(stage, lanes, turns, microbatches)
            most = ACTIONS // (3 * lanes * turns * microbatches)
            self._numbers[key] = promising_counts(self._whole_s(stage)[0], steps_s, most)
        return self._numbers[key]

    def closed_form_s(self, stage: StageWork, lanes: int, turns: int, microbatches: int, idle: float = 1.0) -> Array:
        """Seconds of a step without slices, and for every number of the ladder that the sequence allows. `idle`: see
        `count.step_s`."""
        numbers, whole = self._whole_s(stage)
        lane_s = whole / lanes + numbers * self.action_s(turns)
        return step_s(lanes, microbatches, numbers, lane_s, turns, idle)

    def action_s(self, turns: int) -> float:
        """What a slice costs a lane beside its layers: the actions of `turns` stages, forward and backward."""
        return 2 * turns * (ACTION_OVERHEAD_S + stage_overhead_s(self.cutter.network.cluster))

    def relative_costs(self, stage: StageWork) -> Mapping[int, float]:
        """What a sequence in each number of slices takes, as a part of its time in one."""
        if id(stage) not in self._dearer:
            numbers, whole = self._whole_s(stage)
            self._dearer[id(stage)] = dict(zip(numbers.tolist(), (whole / whole[0]).tolist(), strict=True))
        return self._dearer[id(stage)]

    def _whole_s(self, stage: StageWork) -> tuple[Counts, Array]:
        """(1 and the numbers of the ladder that the sequence allows, seconds of all its slices in all layers)."""
        if id(stage) not in self._wholes:
            length, time_of = self.job.sequence, self.time_curve(stage)
            numbers = slice_count_ladder(length, self.finest)
            tokens = length // numbers  # a slice in the middle costs the mean of all
            self._wholes[id(stage)] = numbers, numbers * time_of(tokens, (length - tokens) // 2)
        return self._wholes[id(stage)]

    def cut_sequence(self, stage: StageWork, number: int) -> Slices:
        """Equal-cost slices. Raises PlanError where the sequence is too short for that many."""
        key = (id(stage), number)
        if key not in self._cut:
            length, multiple = self.job.sequence, max(self.token_multiple(number), self.finest_multiple)
            if number > most_slices(length, multiple):
                multiple = self.finest
            check_number(length, number, multiple, "--fix slices")
            self._cut[key] = equal_cost(length, number, self.time_curve(stage), multiple)
        return self._cut[key]

    def time_curve(self, stage: StageWork) -> TimeOf:
        """Seconds of all layers, forward and backward, for slices: straight lines between samples, and along the
        context. For cutting and ranking; what decides are the costs themselves."""
        if id(stage) not in self._curves:
            self._curves[id(stage)] = self._sample_curve(stage)
        return self._curves[id(stage)]

    def _sample_curve(self, stage: StageWork) -> TimeOf:
        length = self.job.sequence
        least = min(max(self.finest, length // LADDER[-1]), length)
        places = np.unique(np.round(np.geomspace(least, length, SAMPLES)).astype(int)).tolist()
        alone = [self._slice_seconds(stage, tokens, 0) for tokens in places]
        slopes = [
            (self._slice_seconds(stage, tokens, length - tokens) - time_s) / (length - tokens)
            for tokens, time_s in zip(places[:-1], alone[:-1], strict=True)
        ]
        slopes.append(slopes[-1] * length / places[-2] if slopes else 0.0)

        def time_of(tokens: Counts, past: Counts) -> Seconds:
            return np.asarray(np.interp(tokens, places, alone) + past * np.interp(tokens, places, slopes))

        return time_of

    def _slice_seconds(self, stage: StageWork, tokens: int, past: int) -> float:
        forward, backward = self.rows.times_of_slice(stage, tokens, past, self.job.precision)
        return float(forward.sum() + backward.sum())

    def stage_work(self, pairs: frozenset[Pair], recompute: Recompute = "none") -> StageWork:
        """All layers on devices of these kinds with these rows; the same object for equal questions."""
        key = (pairs, recompute)
        if key not in self._stages:
            group, rows = self.cutter.fleet.sample_group(pairs)
            self._stages[key] = self.cutter.probe_stage(self.job, group, rows, recompute)
        return self._stages[key]

    def slowest_stage(self, decisions: ParallelConfig) -> StageWork:
        """All layers on the devices of a candidate's lanes, the slowest of them."""
        if len(decisions.shards) > 1:
            return self.stages_of(decisions)[0]
        rows = self.cutter.rows_of(self.job, decisions.microbatches, decisions.replicas)
        pairs = self.cutter.fleet.lane_pairs(decisions, rows)
        return self.stage_work(frozenset().union(*pairs), decisions.recompute[0])

    def stages_for(self, panel: CandidateGrid, counts: Iterable[int]) -> list[StageWork]:
        """All layers on the devices of a panel's lanes, the slowest of them, for each of these counts."""
        if len(panel.shards) > 1:
            return [self.stages_of(panel.decisions_at(panel.first_of(which)))[0] for which in counts]
        lanes = {*panel.lane_runs()}
        found = []
        for which in counts:
            rows = self.cutter.rows_of(self.job, *panel.counts[which])
            found.append(self.stage_work(frozenset().union(*(pairs_of(runs, rows) for runs in lanes))))
        return found

    def stages_of(self, decisions: ParallelConfig) -> list[StageWork]:
        """All layers on the devices of every stage of a candidate, with its way of recomputing."""
        rows = self.cutter.rows_of(self.job, decisions.microbatches, decisions.replicas)
        ways = [decisions.recompute_of(stage) for stage in range(decisions.stage_count)]
        if decisions.is_sharded:
            groups = [group.to_mesh() for group in make_groups(decisions)]
            return [
                self._sharded_work(groups[lane], rows, way, decisions.sharding_key(lane), decisions.shards_of(lane))
                for lane, way in zip(decisions.lane_of_stage, ways, strict=True)
            ]
        pairs = self.cutter.fleet.lane_pairs(decisions, rows)
        return [self.stage_work(pairs[lane], way) for lane, way in zip(decisions.lane_of_stage, ways, strict=True)]

    def slice_times(self, decisions: ParallelConfig) -> tuple[Array, Array]:
        """(forward, backward) seconds [slice, stage] of a candidate with cuts, actions' own overhead apart."""
        bounds = (0, *decisions.cuts, len(self.cutter.programs.modules[self.cutter.module].layers))
        rows = [self.rows.slice_row(stage, decisions.slices, self.job.precision) for stage in self.stages_of(decisions)]
        runs = [*zip(rows, pairwise(bounds), strict=True)]
        forward = np.stack([row.forward_s[:, start:stop].sum(axis=1) for row, (start, stop) in runs], axis=1)
        backward = np.stack([row.backward_s[:, start:stop].sum(axis=1) for row, (start, stop) in runs], axis=1)
        return forward, backward

    def _sharded_work(
        self, group: Mesh, rows: tuple[int, ...], recompute: Recompute, sharding: str, shards: tuple[int, ...]
    ) -> StageWork:
        key = (group.devices, rows, recompute, sharding, shards)
        if key not in self._stages:
            self._stages[key] = self.cutter.probe_stage(self.job, group, rows, recompute, sharding, shards)
        return self._stages[key]
