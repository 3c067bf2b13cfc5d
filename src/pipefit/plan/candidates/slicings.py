"""Slicings that a search tries for a layout: equal-cost cuts, in the few numbers that a closed form prefers.

The closed form is in `plan/slicing/count.py`; this file supplies its input C(s), the time of a lane for one sequence in
s slices. It follows from the layers' costs and includes the overhead of each slice (launches, contexts, matrix products
too small for the device). With many microbatches, few stages or short sequences no number promises a shorter step than
no slices, and none is tried. The simulator decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np

from pipefit.cost.compute.curves import stage_overhead_s
from pipefit.cost.pipeline.table import ACTION_OVERHEAD_S
from pipefit.cost.portable import portable_power
from pipefit.cost.types import Array, Ints
from pipefit.cost.work import StageWork
from pipefit.errors import PlanError
from pipefit.layout import Mesh
from pipefit.model.analysis.saved import Recompute
from pipefit.plan.assemble.structure import make_groups
from pipefit.plan.candidates.grid import CandidateGrid
from pipefit.plan.candidates.shard_choices import shard_sizes
from pipefit.plan.candidates.slicing_budget import SLICING_BUDGET
from pipefit.plan.cutting.cutter import UNSHARDED, LayerCutter, ShardProgram
from pipefit.plan.devices.fleet import KindRows, pairs_of
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.expert_parts import parts_of_key
from pipefit.plan.request.sliceable import slicing_obstacles
from pipefit.plan.slicing.count import LADDER, promising_counts, slice_count_ladder, step_s
from pipefit.plan.slicing.cuts import TimeOf, check_number, equal_cost, most_slices, slice_grain
from pipefit.plan.slicing.refine import Slices
from pipefit.plan.slicing.slice_costs import SliceRows
from pipefit.plan.types import Job

PROCESSOR_TILE, ACCELERATOR_TILE, LEAST_TILE = 8, 64, 8
"""Slices are multiples of this number of tokens: the sizes CPU and accelerator kernels prefer, and the minimum for
short slices."""


def slicer_of(cutter: LayerCutter, job: Job, constraints: Constraints) -> SequenceSlicer:
    """Return the slicings of a job under these constraints. Costs computed for one search are reused by the next."""
    key = (job, constraints.slices, constraints.shards, constraints.slice_multiple)
    if key not in cutter.slicers:
        cutter.slicers[key] = SequenceSlicer(cutter, job, constraints)
    return cutter.slicers[key]  # type: ignore[no-any-return]


class SequenceSlicer:
    """The slicings of one search."""

    def __init__(self, cutter: LayerCutter, job: Job, constraints: Constraints) -> None:
        self.cutter, self.job = cutter, job
        self.rows = SliceRows(cutter.network, cutter.layers)
        self.obstacle: PlanError | None = next(slicing_obstacles(cutter.programs.model), None)
        "The reason why the model's sequences cannot be sliced."
        self.wanted: int | Slices | None = constraints.slices
        shards = (
            [constraints.shards] if constraints.shards else [(1,) * size for size in shard_sizes(constraints, cutter)]
        )
        self._tile = constraints.slice_multiple or (PROCESSOR_TILE if cutter.network.over_gloo else ACCELERATOR_TILE)
        self._shares = slice_grain(1, *map(sum, shards))
        self.finest = slice_grain(constraints.slice_multiple or LEAST_TILE, self._shares)
        "Every slice is a multiple of this number of tokens; the remainder lengthens the last."
        self._stages: dict[object, StageWork] = {}
        self._curves: dict[int, TimeOf] = {}
        self._cut: dict[tuple[int, int], Slices] = {}
        self._numbers: dict[object, tuple[int, ...]] = {}
        self._wholes: dict[int, tuple[Ints, Array]] = {}
        self._dearer: dict[int, Mapping[int, float]] = {}

    def token_multiple(self, number: int) -> int:
        """Return the multiple of tokens for this number of slices: a tile, or less if slices would have too few
        tiles."""
        tile = self._tile
        tiles = SLICING_BUDGET.least_tiles * number
        while slice_grain(tile // 2, self._shares) >= self.finest and self.job.sequence < tiles * tile:
            tile //= 2
        return slice_grain(tile, self._shares)

    @property
    def finest_multiple(self) -> int:
        """The finest multiple that leaves few enough positions in the sequence."""
        return self.finest * max(1, -(-self.job.sequence // (self.finest * SLICING_BUDGET.positions)))

    def candidate_slicings(self, stage: StageWork, lanes: int, turns: int, microbatches: int) -> tuple[Slices, ...]:
        """Return the slicings to try besides no slices, for lanes with `turns` stages each.

        `stage` is all layers on one of the lanes.
        """
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
        """Return the promising numbers of slices; none if the closed form expects no gain."""
        key = (id(stage), lanes, turns, microbatches)
        if key not in self._numbers:
            steps_s = self.closed_form_s(stage, lanes, turns, microbatches)
            limit = SLICING_BUDGET.order_actions // (3 * lanes * turns * microbatches)
            self._numbers[key] = promising_counts(self._whole_s(stage)[0], steps_s, limit)
        return self._numbers[key]

    def closed_form_s(self, stage: StageWork, lanes: int, turns: int, microbatches: int, idle: float = 1.0) -> Array:
        """Return seconds of a step without slices, and for every number of the ladder that the sequence allows.

        `idle`: see `count.step_s`.
        """
        numbers, sequence_s = self._whole_s(stage)
        lane_s = sequence_s / lanes + numbers * self.action_s(turns)
        return step_s(lanes, microbatches, numbers, lane_s, turns, idle)

    def action_s(self, turns: int) -> float:
        """Return a lane's overhead for a slice besides its layers: the actions of `turns` stages, forward and
        backward."""
        return 2 * turns * (ACTION_OVERHEAD_S + stage_overhead_s(self.cutter.network.cluster))

    def relative_costs(self, stage: StageWork) -> Mapping[int, float]:
        """Return number of slices -> time of a sequence relative to the time without slices."""
        if id(stage) not in self._dearer:
            numbers, sequence_s = self._whole_s(stage)
            self._dearer[id(stage)] = dict(zip(numbers.tolist(), (sequence_s / sequence_s[0]).tolist(), strict=True))
        return self._dearer[id(stage)]

    def _whole_s(self, stage: StageWork) -> tuple[Ints, Array]:
        """Return (1 and the numbers of the ladder that the sequence allows, seconds of all its slices in all
        layers)."""
        if id(stage) not in self._wholes:
            length, time_of = self.job.sequence, self.time_curve(stage)
            numbers = slice_count_ladder(length, self.finest)
            tokens = length // numbers  # a slice in the middle costs the mean of all
            self._wholes[id(stage)] = numbers, numbers * time_of(tokens, (length - tokens) // 2)
        return self._wholes[id(stage)]

    def cut_sequence(self, stage: StageWork, number: int) -> Slices:
        """Return equal-cost slices. Raises PlanError if the sequence is too short for this number."""
        key = (id(stage), number)
        if key not in self._cut:
            length, multiple = self.job.sequence, max(self.token_multiple(number), self.finest_multiple)
            if number > most_slices(length, multiple):
                multiple = self.finest
            check_number(length, number, multiple, "--fix slices")
            self._cut[key] = equal_cost(length, number, self.time_curve(stage), multiple)
        return self._cut[key]

    def time_curve(self, stage: StageWork) -> TimeOf:
        """Return the seconds of all layers, forward and backward, as a function of slice and context.

        It interpolates linearly between samples of the slice length and in the context. It serves cutting and ranking;
        the decision uses the exact costs.
        """
        if id(stage) not in self._curves:
            self._curves[id(stage)] = self._sample_curve(stage)
        return self._curves[id(stage)]

    def _sample_curve(self, stage: StageWork) -> TimeOf:
        length = self.job.sequence
        least = min(max(self.finest, length // LADDER[-1]), length)
        count = SLICING_BUDGET.costed_lengths
        steps = [portable_power(length / least, step / (count - 1)) for step in range(count)]
        places = sorted({round(least * step) for step in steps})
        alone = [self._slice_seconds(stage, tokens, 0) for tokens in places]
        slopes = [
            (self._slice_seconds(stage, tokens, length - tokens) - time_s) / (length - tokens)
            for tokens, time_s in zip(places[:-1], alone[:-1], strict=True)
        ]
        slopes.append(slopes[-1] * length / places[-2] if slopes else 0.0)

        def time_of(tokens: Ints, past: Ints) -> Array:
            return np.asarray(np.interp(tokens, places, alone) + past * np.interp(tokens, places, slopes))

        return time_of

    def _slice_seconds(self, stage: StageWork, tokens: int, past: int) -> float:
        forward, backward = self.rows.times_of_slice(stage, tokens, past, self.job.precision)
        return float(forward.sum() + backward.sum())

    def stage_work(
        self, pairs: frozenset[KindRows], recompute: Recompute = "none", program: ShardProgram = UNSHARDED
    ) -> StageWork:
        """Return all layers on devices, or shard groups in one host each, of these kinds with these rows; the same
        object for equal arguments."""
        key = (pairs, recompute, program)
        if key not in self._stages:
            group, rows = self.cutter.fleet.sample_group(pairs, program[1], parts_of_key(program[0]))
            self._stages[key] = self.cutter.probe_stage(self.job, group, rows, recompute, *program)
        return self._stages[key]

    def slowest_stage(self, decisions: ParallelConfig) -> StageWork:
        """Return all layers on the slowest devices of a candidate's lanes."""
        if not self.cutter.fleet.has_host_groups(decisions):
            return self.stages_of(decisions)[0]
        rows = self.cutter.rows_of(self.job, decisions.microbatches, decisions.replicas)
        pairs = self.cutter.fleet.lane_pairs(decisions, rows)
        program = (decisions.sharding_key(0), decisions.shards)
        return self.stage_work(frozenset().union(*pairs), decisions.recompute[0], program)

    def stages_for(self, grid: CandidateGrid, counts: Iterable[int]) -> list[StageWork]:
        """Return all layers on the slowest devices of a grid's lanes, for each of these counts."""
        if not self.cutter.fleet.fills_hosts(grid.shard_devices):
            return [self.stages_of(grid.decisions_at(grid.first_of(which)))[0] for which in counts]
        lanes = {*grid.lane_runs()}
        stages = []
        for which in counts:
            rows = self.cutter.rows_of(self.job, *grid.counts[which])
            pairs = frozenset().union(*(pairs_of(runs, rows) for runs in lanes))
            stages.append(self.stage_work(pairs, program=grid.program))
        return stages

    def stages_of(self, decisions: ParallelConfig) -> list[StageWork]:
        """Return all layers on the devices of every stage of a candidate, with the stage's recomputation."""
        rows = self.cutter.rows_of(self.job, decisions.microbatches, decisions.replicas)
        recompute_by_stage = [decisions.recompute_of(stage) for stage in range(decisions.stage_count)]
        if not self.cutter.fleet.has_host_groups(decisions):
            groups = [group.to_mesh() for group in make_groups(decisions)]
            return [
                self._sharded_work(
                    groups[lane], rows, recompute, decisions.sharding_key(lane), decisions.shards_of(lane)
                )
                for lane, recompute in zip(decisions.lane_of_stage, recompute_by_stage, strict=True)
            ]
        pairs = self.cutter.fleet.lane_pairs(decisions, rows)
        return [
            self.stage_work(pairs[lane], recompute, (decisions.sharding_key(lane), decisions.shards))
            for lane, recompute in zip(decisions.lane_of_stage, recompute_by_stage, strict=True)
        ]

    def slice_times(self, decisions: ParallelConfig) -> tuple[Array, Array]:
        """Return (forward, backward) seconds [slice, stage] of a candidate with cuts, without the overhead of
        actions."""
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
