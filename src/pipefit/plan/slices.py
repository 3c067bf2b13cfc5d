"""Which slicings a search tries for a layout: equal-cost cuts, in the few numbers that a closed form prefers.

With m sequences in turn on K lanes, v stages on each, a step of s slices takes about (m + (K - 1) / (s v)) C(s), where
C(s) is what a lane needs for one sequence in s slices: what each slice costs anew (launches, contexts, products too
small for the device) included (`plan/slicing/count.py` has the closed form of the best s). The numbers that are tried
stand on a ladder; of them the best by that formula and its neighbours, as far as they promise a shorter step than no
slices. Where microbatches are many, stages few or sequences short, that leaves none. The simulator decides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from pipefit.cost.curves import stage_overhead_s
from pipefit.cost.table import ACTION_OVERHEAD_S
from pipefit.cost.types import Array
from pipefit.cost.work import StageWork
from pipefit.errors import PlanError
from pipefit.layout import Group
from pipefit.plan.check_slices import obstacles
from pipefit.plan.cut import Cutter
from pipefit.plan.decisions import Decisions, Sharding
from pipefit.plan.fleet import Pair, pairs_of
from pipefit.plan.panel import Panel
from pipefit.plan.slice_rows import SliceRows
from pipefit.plan.slicing.cuts import Counts, Seconds, TimeOf, equal_cost, grain, most_slices
from pipefit.plan.structure import make_groups
from pipefit.plan.types import Job, Recompute

Slices = tuple[int, ...]

LADDER = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of slices that are tried."""

ACTIONS = 12_000
"""The most actions of an order with slices: longer ones take too long to look at, and gain little by more slices."""

AROUND = 2
"""Steps of the ladder to either side of the best one by the closed form."""

PROCESSOR_TILE, ACCELERATOR_TILE = 8, 64
"""Slices are multiples of so many tokens: what kernels of a processor and of an accelerator want."""

SAMPLES = 8
"""Slice lengths at which layers are costed for equal-cost cuts, alone and at the end of the sequence."""

CELLS = 256
"""Where a sequence has more multiples than this, a search cuts it at some of them only."""


class Slicer:
    """The slicings of one search."""

    def __init__(self, cutter: Cutter, job: Job, pins: Mapping[str, Any]) -> None:
        self.cutter, self.job = cutter, job
        self.rows = SliceRows(cutter.network, cutter.layers)
        self.obstacle: PlanError | None = next(obstacles(cutter.programs.model), None)
        "Why the model's sequences cannot be cut."
        self.wanted: int | Slices | None = pins.get("slices")
        shards: tuple[int, ...] = pins.get("shards", (1,))
        tile = PROCESSOR_TILE if cutter.network.over_gloo else ACCELERATOR_TILE
        self.multiple = grain(pins.get("slice_multiple", tile), sum(shards))
        "Tokens that every slice is a multiple of; what is left over lengthens the last."
        self._stages: dict[object, StageWork] = {}
        self._curves: dict[int, TimeOf] = {}
        self._cut: dict[tuple[int, int], Slices] = {}
        self._numbers: dict[object, tuple[int, ...]] = {}
        self._wholes: dict[int, tuple[Array, Array]] = {}
        self._dearer: dict[int, Mapping[int, float]] = {}

    @property
    def coarse(self) -> int:
        """The multiple that a search cuts at: larger where sequences are long."""
        return self.multiple * max(1, -(-self.job.sequence // (self.multiple * CELLS)))

    def slicings(self, stage: StageWork, lanes: int, turns: int, microbatches: int) -> tuple[Slices, ...]:
        """What is tried beside no slices, for lanes with `turns` stages each; `stage` is all layers on one of them."""
        if self.obstacle is not None:
            return ()
        if isinstance(self.wanted, tuple):
            return (self.wanted,)
        if self.wanted is not None:
            return (self.cut(stage, self.wanted),) if self.wanted > 1 else ()
        return tuple(self.cut(stage, number) for number in self.numbers(stage, lanes, turns, microbatches))

    def numbers(self, stage: StageWork, lanes: int, turns: int, microbatches: int) -> tuple[int, ...]:
        """How many slices are worth trying; none where the closed form promises nothing of them."""
        key = (id(stage), lanes, turns, microbatches)
        if key not in self._numbers:
            steps = self.closed_form_s(stage, lanes, turns, microbatches)
            most = bisect_right(LADDER, ACTIONS // (3 * lanes * turns * microbatches))
            steps = steps[: 1 + max(1, most)]
            best = int(np.argmin(steps))
            near = range(max(1, best - AROUND), min(len(steps), best + AROUND + 1)) if best else ()
            self._numbers[key] = tuple(LADDER[place - 1] for place in near if steps[place] < steps[0])
        return self._numbers[key]

    def closed_form_s(self, stage: StageWork, lanes: int, turns: int, microbatches: int) -> Array:
        """Seconds of a step without slices, and for every number of the ladder that the sequence allows."""
        numbers, whole = self._whole_s(stage)
        action_s = 2 * turns * (ACTION_OVERHEAD_S + stage_overhead_s(self.cutter.network.cluster))
        steps: Array = (microbatches + (lanes - 1) / (turns * numbers)) * (whole / lanes + numbers * action_s)
        return steps

    def dearer(self, stage: StageWork) -> Mapping[int, float]:
        """What a sequence in each number of slices takes, as a part of its time in one."""
        if id(stage) not in self._dearer:
            numbers, whole = self._whole_s(stage)
            self._dearer[id(stage)] = dict(zip(numbers.tolist(), (whole / whole[0]).tolist(), strict=True))
        return self._dearer[id(stage)]

    def _whole_s(self, stage: StageWork) -> tuple[Array, Array]:
        """(1 and the numbers of the ladder that the sequence allows, seconds of all its slices in all layers)."""
        if id(stage) not in self._wholes:
            length, time_of = self.job.sequence, self.curve(stage)
            most = most_slices(length, self.multiple)
            numbers = np.array([1, *(number for number in LADDER if number <= most)])
            tokens = length // numbers  # a slice in the middle costs the mean of all
            self._wholes[id(stage)] = numbers, numbers * time_of(tokens, (length - tokens) // 2)
        return self._wholes[id(stage)]

    def cut(self, stage: StageWork, number: int) -> Slices:
        """Equal-cost slices. Raises PlanError where the sequence is too short for that many."""
        key = (id(stage), number)
        if key not in self._cut:
            multiple = self.coarse if number <= most_slices(self.job.sequence, self.coarse) else self.multiple
            self._cut[key] = equal_cost(self.job.sequence, number, self.curve(stage), multiple)
        return self._cut[key]

    def curve(self, stage: StageWork) -> TimeOf:
        """Seconds of all layers, forward and backward, for slices: straight lines between samples, and along the
        context. For cutting and ranking; what decides are the costs themselves."""
        if id(stage) not in self._curves:
            self._curves[id(stage)] = self._sampled(stage)
        return self._curves[id(stage)]

    def _sampled(self, stage: StageWork) -> TimeOf:
        length = self.job.sequence
        least = min(self.multiple, length)
        places = np.unique(np.round(np.geomspace(least, length, SAMPLES)).astype(int)).tolist()
        alone = [self._seconds(stage, tokens, 0) for tokens in places]
        slopes = [
            (self._seconds(stage, tokens, length - tokens) - time_s) / (length - tokens)
            for tokens, time_s in zip(places[:-1], alone[:-1], strict=True)
        ]
        slopes.append(slopes[-1] * length / places[-2] if slopes else 0.0)

        def time_of(tokens: Counts, past: Counts) -> Seconds:
            return np.asarray(np.interp(tokens, places, alone) + past * np.interp(tokens, places, slopes))

        return time_of

    def _seconds(self, stage: StageWork, tokens: int, past: int) -> float:
        forward, backward = self.rows.slice(stage, tokens, past, self.job.precision)
        return float(forward.sum() + backward.sum())

    def stage(self, pairs: frozenset[Pair], recompute: Recompute = "none") -> StageWork:
        """All layers on devices of these kinds with these rows; the same object for equal questions."""
        key = (pairs, recompute)
        if key not in self._stages:
            group, rows = self.cutter.fleet.sample(pairs)
            self._stages[key] = self.cutter.probe(self.job, group, rows, recompute)
        return self._stages[key]

    def stages_for(self, panel: Panel, counts: Iterable[int]) -> list[StageWork]:
        """All layers on the devices of a panel's lanes, the slowest of them, for each of these counts."""
        if len(panel.shards) > 1:
            return [self.stages_of(panel.decisions(panel.first_of(which)))[0] for which in counts]
        lanes = {*panel.lane_runs()}
        found = []
        for which in counts:
            rows = self.cutter.rows_of(self.job, *panel.counts[which])
            found.append(self.stage(frozenset().union(*(pairs_of(runs, rows) for runs in lanes))))
        return found

    def stages_of(self, decisions: Decisions) -> list[StageWork]:
        """All layers on the devices of every stage of a candidate, with its way of recomputing."""
        rows = self.cutter.rows_of(self.job, decisions.microbatches, decisions.replicas)
        ways = [decisions.recompute_of(stage) for stage in range(decisions.stage_count)]
        if len(decisions.shards) > 1:
            groups = [group.group() for group in make_groups(decisions)]
            return [
                self._sharded(groups[lane], rows, way, decisions.sharding, decisions.shards)
                for lane, way in zip(decisions.lane_of_stage, ways, strict=True)
            ]
        pairs = self.cutter.fleet.lane_pairs(decisions, rows)
        return [self.stage(pairs[lane], way) for lane, way in zip(decisions.lane_of_stage, ways, strict=True)]

    def times(self, decisions: Decisions) -> tuple[Array, Array]:
        """(forward, backward) seconds [slice, stage] of a candidate with cuts, actions' own overhead apart."""
        bounds = (0, *decisions.cuts, len(self.cutter.programs.modules[self.cutter.module].layers))
        rows = [self.rows.row(stage, decisions.slices, self.job.precision) for stage in self.stages_of(decisions)]
        runs = [*zip(rows, pairwise(bounds), strict=True)]
        forward = np.stack([row.forward_s[:, start:stop].sum(axis=1) for row, (start, stop) in runs], axis=1)
        backward = np.stack([row.backward_s[:, start:stop].sum(axis=1) for row, (start, stop) in runs], axis=1)
        return forward, backward

    def _sharded(
        self, group: Group, rows: tuple[int, ...], recompute: Recompute, sharding: Sharding, shards: tuple[int, ...]
    ) -> StageWork:
        key = (group.devices, rows, recompute, sharding, shards)
        if key not in self._stages:
            self._stages[key] = self.cutter.probe(self.job, group, rows, recompute, sharding, shards)
        return self._stages[key]
