"""Bounds and guesses for all candidates of a panel at once, before any cut.

A cut gives every layer to a lane. Whatever it is, the busiest lane's time T is at least sum_s u_s t_s(l) over all
layers l and any weights u of the lanes that add up to one, hence at least sum_l min_s u_s t_s(l) (the dual of the
linear program that lets layers be divided). With u in proportion to the lanes' speeds this is the time of an even
cut, for lanes of one kind and for lanes of several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipefit.cost.types import Array
from pipefit.cost.work import Recompute, StageWork
from pipefit.plan.bounds import facts_of
from pipefit.plan.cut import Cutter
from pipefit.plan.cut_rows import LayerRow
from pipefit.plan.decisions import Decisions
from pipefit.plan.estimate import OVER, WEIGHT_SHARE, idle_s, most_held
from pipefit.plan.fleet import Pair, Runs, pairs_of
from pipefit.plan.panel import Panel
from pipefit.plan.sliced_bounds import first_share_bound_s
from pipefit.plan.slices import Slicer
from pipefit.plan.types import Job

Class = tuple[LayerRow, ...]
"""What the stages of a lane cost: lanes of one class are alike."""


@dataclass(frozen=True, slots=True)
class Floor:
    """All layers of a microbatch on lanes of some classes: seconds, and what an even cut needs."""

    forward_s: float
    "Every layer where it is fastest."
    backward_s: float
    largest_s: float
    "The slowest layer where it is fastest."
    even: Array
    "[whole, forward, backward]: the sum over the layers of the least of their times, as parts of the class's own."
    rates: Array
    "[whole, forward, backward][class]: 1 / seconds of all layers."
    saved_bytes: float
    "All layers, where it is least."
    limit_bytes: Array
    "[class]."
    first_share: float = 1.0
    "The least part of a layer's time that its first slice takes."


@dataclass(frozen=True, slots=True)
class PanelFloor:
    """Of a panel: [microbatches, recomputation], and what broadcasts to it."""

    forward_s: Array
    backward_s: Array
    largest_s: Array
    lane_s: Array
    "The busiest lane of an even cut."
    lane_forward_s: Array
    lane_backward_s: Array
    saved_bytes: Array
    static_bytes: Array
    "[microbatches, 1, ZeRO-1]: of all layers."
    rates: Array
    "[class, microbatches, recomputation]: 1 / seconds of all layers on such a lane."
    limit_bytes: Array
    "[class]."
    lanes: Array
    "[class]: how many lanes there are."
    first_share: Array
    "The least part of a layer's time that its first slice takes."

    @property
    def alike(self) -> bool:
        """Whether all lanes are of one class."""
        return len(self.lanes) == 1


class Floors:
    """The floors of the panels of one search."""

    def __init__(self, cutter: Cutter, job: Job, slicer: Slicer | None = None) -> None:
        self.cutter = cutter
        self.job = job
        self.slicer = slicer or Slicer(cutter, job, {})
        self._known: dict[tuple[tuple[int, ...], ...], Floor] = {}
        self._stacks: dict[object, list[list[Floor]]] = {}
        self._statics: dict[float, float] = {}
        self._panels: dict[object, tuple[Panel, PanelFloor]] = {}
        "By what panels of one grid share; with a panel that keeps it alive."
        self._near: dict[tuple[frozenset[Pair], Recompute], LayerRow] = {}
        self._sliced: dict[tuple[int, int, tuple[int, ...]], tuple[StageWork, LayerRow]] = {}
        "With the stage, which it keeps alive."
        self._shares: dict[int, float] = {}
        "Of sliced rows, the least part that a first slice takes."

    def panel(self, panel: Panel) -> PanelFloor:
        """The floor of all its candidates."""
        key = (id(panel.counts), id(panel.runs), panel.recompute, panel.slices)
        if panel.pattern is None:
            return self._panel(panel)
        if key not in self._panels:
            self._panels[key] = (panel, self._panel(panel))
        return self._panels[key][1]

    def _panel(self, panel: Panel) -> PanelFloor:
        if len(panel.shards) > 1 or any(len(way) > 1 for way in panel.recompute):
            return self._stacked(panel, *self._told(panel))
        counted = Counter(panel.lane_runs())
        lanes = np.array(list(counted.values()), dtype=float)
        counts = tuple(count for count, _ in panel.counts)
        even = all(max(shares) == 1 for _, shares in panel.counts)
        uneven = panel.counts if not even else None
        key = (panel.recompute, tuple(counted), counts, panel.replicas, uneven, panel.slices)
        if key not in self._stacks:
            each = [self.cutter.rows_of(self.job, count, shares) for count, shares in panel.counts]
            self._stacks[key] = [
                [
                    self._floor([(self._row(runs, rows, way[0], even, cut),) for runs in counted])
                    for way in panel.recompute
                ]
                for rows, cut in zip(each, panel.slices or [()] * len(each), strict=True)
            ]
        floors = self._stacks[key]
        return self._stacked(panel, floors, lanes)

    def _row(
        self, runs: Runs, rows: tuple[int, ...], recompute: Recompute, even: bool, slices: tuple[int, ...] = ()
    ) -> LayerRow:
        pairs = pairs_of(runs, rows)
        if slices:
            stage = self.slicer.stage(pairs, recompute)
            return self._cut(self.cutter.row(self.job, pairs, recompute, 1.0), stage, slices)
        if even:
            return self.cutter.row(self.job, pairs, recompute, 1.0)
        key = (pairs, recompute)
        if key not in self._near:
            self._near[key] = self.cutter.near(self.job, *key)
        return self._near[key]

    def _cut(self, row: LayerRow, stage: StageWork, slices: tuple[int, ...]) -> LayerRow:
        """The row with the times of all slices of its layers; `stage` is what it is the row of."""
        key = (id(row), id(stage), slices)
        if key not in self._sliced:
            found = self.slicer.rows.row(stage, slices, self.job.precision)
            times = {"forward_s": found.forward_s.sum(axis=0), "backward_s": found.backward_s.sum(axis=0)}
            self._sliced[key] = (stage, replace(row, **times))
            self._shares[id(self._sliced[key][1])] = found.first_share
        return self._sliced[key][1]

    def bound_s(self, panel: Panel, floor: PanelFloor) -> Array:
        """A lower bound of every candidate's step, whatever its cut: [microbatches, recomputation].

        With fused backwards the slowest stage has at least its equal part of the forwards, and of the backwards. With
        one stage a lane as well, all lanes alike and W being the sum, the largest of prefix + m w over the stages is
        least where all are equal, which gives T = W / (1 - (1 - 1/m)^lanes).
        """
        fused = facts_of(panel.names[0]).fused
        count = np.array([count for count, _ in panel.counts], dtype=float)[:, None]
        least: Array = count * np.maximum(floor.lane_s, floor.largest_s)
        if not fused:
            return least
        total = floor.forward_s + floor.backward_s
        if panel.slices:
            if len(panel.placement) == panel.lanes and floor.alike:
                least = np.maximum(least, first_share_bound_s(total, floor.first_share, count, panel.lanes))
            return least
        way = total + (count - 1) * np.maximum(floor.lane_forward_s, floor.lane_backward_s) / panel.turns
        least = np.maximum(least, way)
        if len(panel.placement) == panel.lanes and floor.alike:
            least = np.maximum(least, total / (1 - (1 - 1 / count) ** panel.lanes))
        return least

    def fills(self, panel: Panel) -> Array:
        """What all layers need as a part of the memory of all lanes, were it shared evenly and every lane as full as
        the fullest: [schedule, microbatches, recomputation, ZeRO-1]."""
        floor = self.panel(panel)
        kept = (self._held(panel) * floor.saved_bytes / (panel.turns * self._slices(panel)))[:, :, :, None]
        filled: Array = (floor.static_bytes + kept) / float(floor.lanes @ floor.limit_bytes)
        return filled

    def _held(self, panel: Panel) -> Array:
        """[schedule, microbatches, 1]: stage-microbatches on the fullest lane, or slices of them."""
        held = [[most_held(name, panel.lanes, panel.placement, each) for each in panel.units] for name in panel.names]
        return np.array(held, dtype=float)[:, :, None]

    def _slices(self, panel: Panel) -> Array:
        """[microbatches, 1]: how many slices."""
        return np.array([len(cut) for cut in panel.slices] or [1] * len(panel.counts), dtype=float)[:, None]

    def guesses_s(self, panel: Panel, floor: PanelFloor) -> Array:
        """What steps likely take (`plan/estimate.py`): [schedule, microbatches, recomputation, ZeRO-1]."""
        count = np.array([count for count, _ in panel.counts], dtype=float)[:, None]
        parts = panel.turns * self._slices(panel)
        w = np.minimum(WEIGHT_SHARE * floor.lane_backward_s, floor.lane_forward_s) / parts
        f, i = floor.lane_forward_s / parts, floor.lane_backward_s / parts - w
        held = self._held(panel)
        idle = [idle_s(name, panel.lanes, one, f, i, w) for name, one in zip(panel.names, held, strict=True)]
        kept = (held * floor.saved_bytes / parts)[:, :, :, None]
        filled_s, lack = _filled(floor, floor.static_bytes + kept)
        guess: Array = (count[:, :, None] * filled_s + np.stack(idle)[:, :, :, None]) * (1 + OVER * lack)
        return guess

    def _told(self, panel: Panel) -> tuple[list[list[Floor]], Array]:
        """Where stages differ in more than kinds: from the rows of every stage. Lanes are of one class if they are
        alike in all of the panel's candidates."""
        ways = [
            [
                self._lanes(panel.decisions(int(np.ravel_multi_index((which, way, 0, 0), panel.shape))))
                for way in range(len(panel.recompute))
            ]
            for which in range(len(panel.counts))
        ]
        members: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for lane in range(len(ways[0][0])):
            alike = tuple(tuple(map(id, each[lane])) for line in ways for each in line)
            members.setdefault(alike, []).append(lane)
        floors = [[self._floor([each[same[0]] for same in members.values()]) for each in line] for line in ways]
        return floors, np.array([len(same) for same in members.values()], dtype=float)

    def _lanes(self, decisions: Decisions) -> list[Class]:
        """Of every lane of a candidate, what its stages cost, each row once."""
        held: dict[int, dict[int, LayerRow]] = {}
        rows = self.cutter.rows(self.job, decisions)
        if decisions.slices:
            stages = self.slicer.stages_of(decisions)
            rows = [self._cut(row, stage, decisions.slices) for row, stage in zip(rows, stages, strict=True)]
        for row, lane in zip(rows, decisions.lane_of_stage, strict=True):
            held.setdefault(lane, {})[id(row)] = row
        return [tuple(held[lane][key] for key in sorted(held[lane])) for lane in sorted(held)]

    def _floor(self, classes: Sequence[Class]) -> Floor:
        key = tuple(tuple(map(id, one)) for one in classes)
        if key not in self._known:
            forward = np.stack([np.minimum.reduce([row.forward_s for row in one]) for one in classes])
            backward = np.stack([np.minimum.reduce([row.backward_s for row in one]) for one in classes])
            each = np.stack([forward + backward, forward, backward])
            whole = each.sum(axis=2)
            with np.errstate(divide="ignore", invalid="ignore"):
                parts = np.nan_to_num(each / whole[:, :, None])
                rates = 1.0 / whole
            self._known[key] = Floor(
                forward_s=float(forward.min(axis=0).sum()),
                backward_s=float(backward.min(axis=0).sum()),
                largest_s=float(each[0].min(axis=0).max()),
                even=parts.min(axis=1).sum(axis=1),
                rates=rates,
                saved_bytes=min(float(row.saved_bytes.sum()) for one in classes for row in one),
                limit_bytes=np.array([min(row.limit_bytes for row in one) for one in classes]),
                first_share=min(self._shares.get(id(row), 1.0) for one in classes for row in one),
            )
        return self._known[key]

    def _stacked(self, panel: Panel, floors: Sequence[Sequence[Floor]], lanes: Array) -> PanelFloor:
        flat = [floor for line in floors for floor in line]
        shape = (len(floors), len(floors[0]))
        whole, forward, backward = (
            np.array([floor.even[k] / (floor.rates[k] @ lanes) for floor in flat]).reshape(shape) for k in range(3)
        )
        static = [
            [[self._static(max(shares) / sum(shares) if zero1 else 1.0, panel) for zero1 in panel.zero1]]
            for _, shares in panel.counts
        ]
        return PanelFloor(
            forward_s=np.array([floor.forward_s for floor in flat]).reshape(shape),
            backward_s=np.array([floor.backward_s for floor in flat]).reshape(shape),
            largest_s=np.array([floor.largest_s for floor in flat]).reshape(shape),
            lane_s=whole,
            lane_forward_s=forward,
            lane_backward_s=backward,
            saved_bytes=np.array([floor.saved_bytes for floor in flat]).reshape(shape),
            static_bytes=np.array(static),
            rates=np.stack([floor.rates[0] for floor in flat], axis=1).reshape(len(lanes), *shape),
            limit_bytes=flat[0].limit_bytes,
            lanes=lanes,
            first_share=np.array([floor.first_share for floor in flat]).reshape(shape),
        )

    def _static(self, share: float, panel: Panel) -> float:
        if share not in self._statics:
            self._statics[share] = self.cutter.static_bytes(self.job, share, panel.sharding, panel.shards)
        return self._statics[share]


def _filled(floor: PanelFloor, whole_bytes: Array) -> tuple[Array, Array]:
    """(seconds of the busiest lane, what the memory lacks as a part of itself), where `whole_bytes` is what all layers
    need: every lane takes layers by its speed, up to its memory, and the others take what is left over."""
    if floor.alike:
        lack = np.maximum(0.0, whole_bytes / (floor.limit_bytes * floor.lanes)[0] - 1.0)
        return np.broadcast_to(floor.lane_s[:, :, None], lack.shape), lack
    more = (slice(None), *(None,) * whole_bytes.ndim)
    lanes, limits, rates = floor.lanes[more], floor.limit_bytes[more], floor.rates[:, None, :, :, None]
    most = limits / whole_bytes
    lack = np.maximum(0.0, 1.0 / (lanes * most).sum(axis=0) - 1.0)
    most = most * (1.0 + lack) * (1.0 + 1e-9)
    full = np.zeros(most.shape, dtype=bool)
    time_s = floor.lane_s[:, :, None] + np.zeros(whole_bytes.shape)
    for _ in range(len(floor.lanes) - 1):
        full |= rates * time_s > most
        if not full.any():
            break
        left = 1.0 - (lanes * most * full).sum(axis=0)
        speed = (lanes * rates * ~full).sum(axis=0)
        time_s = np.where(speed > 0, np.maximum(time_s, left / np.where(speed > 0, speed, 1.0)), time_s)
    return time_s, lack
