"""One cut of a chain of layers into stages, with the closed-form figures of its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.cost.types import Array
from pipefit.plan.bounds.sliced_bounds import min_sliced_in_flight
from pipefit.plan.bounds.step_bounds import min_in_flight
from pipefit.plan.cutting.balance import balance_lanes, lane_times
from pipefit.plan.cutting.partition import partition_layers, some_partition_fits
from pipefit.plan.cutting.rows import (
    LayerRow,
    Need,
    lane_need,
    limits_of,
    memory_of,
    stack_rows,
    stages_by_row,
)
from pipefit.plan.request.decisions import ParallelConfig


@dataclass(frozen=True, slots=True)
class LayerCut:
    """A cut of the layers, with the closed-form figures of its stages."""

    cuts: tuple[int, ...]
    "First layer of every stage but the first."
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    floor_bytes: tuple[float, ...]
    "Lower bound of each lane's memory, workspace included."
    limit_bytes: tuple[float, ...]
    """Memory of each lane's smallest device. If kinds hold different amounts, the largest memory of the fullest device
    with which all fit."""
    needs: tuple[Need, ...]
    "For each lane, (least memory, memory available) on the device that is fullest relative to its memory."
    static_bytes: tuple[float, ...]
    "Static memory of each lane, workspace included."
    saved_bytes: tuple[float, ...]
    "Memory that one microbatch keeps on each stage."
    pending_bytes: tuple[float, ...]
    "Memory that one microbatch keeps on each stage from I to W; zero if device kinds hold different amounts."

    @property
    def fullest_lane(self) -> int:
        """The lane with the least memory left, or the largest excess."""
        return max(range(len(self.floor_bytes)), key=lambda lane: self.floor_bytes[lane] - self.limit_bytes[lane])

    @property
    def may_fit(self) -> bool:
        """True if the cut may fit; False is certain."""
        return self.floor_bytes[self.fullest_lane] <= self.limit_bytes[self.fullest_lane]


def lanes_in_flight(decisions: ParallelConfig) -> tuple[float, ...]:
    """Return the least number of stage-microbatches that each lane holds at once; with slices, as fractions."""
    if decisions.slices:
        return min_sliced_in_flight(
            decisions.schedule, decisions.lane_of_stage, decisions.microbatches, decisions.slices
        )
    return min_in_flight(decisions.schedule, decisions.lane_of_stage, decisions.microbatches)


def stages_in_flight(held: Sequence[float], placement: Sequence[int]) -> list[float]:
    """Return the microbatches in flight of each stage: an equal part of its lane's, and at least one."""
    turns = Counter(placement)
    of_lane = {lane: max(1, held[lane] if turns[lane] == 1 else held[lane] // turns[lane]) for lane in turns}
    return [of_lane[lane] for lane in placement]


def cut_at(bounds: Sequence[int], rows: Sequence[LayerRow], decisions: ParallelConfig) -> LayerCut:
    """Return the cut with these boundaries (0, cut, ..., layers), with its closed-form figures."""
    return measure_cut(bounds, rows, lanes_in_flight(decisions), decisions.lane_of_stage)


def some_cut_fits(rows: Sequence[LayerRow], flights: Sequence[float]) -> bool:
    """Return whether any cut keeps every stage within its limit. Exact."""
    return some_partition_fits(memory_of(rows, flights), limits_of(rows, [1] * len(rows)))


Balance = tuple[tuple[int, ...], float, Sequence[LayerRow]]
"""(boundaries that balance the lanes, time of the busiest lane, rows with these times)."""


def best_cut(
    rows: Sequence[LayerRow],
    held: Sequence[float],
    placement: tuple[int, ...],
    fixed_cuts: tuple[int, ...],
    balances: dict[object, Balance] | None = None,
) -> LayerCut | None:
    """Return the fastest cut that fits, or the `fixed_cuts` one; None if none fits.

    `balances` holds the balanced boundaries of rows that were cut before. Rows that differ in memory alone share them.
    """
    layers, stages = len(rows[0].forward_s), len(rows)
    if fixed_cuts or stages == 1:
        cut = measure_cut((0, *fixed_cuts, layers), rows, held, placement)
        return cut if cut.may_fit else None
    stage_counts = Counter(placement)
    turns = [stage_counts[lane] for lane in placement]
    certain = [held[lane] if count == 1 else 1 for lane, count in zip(placement, turns, strict=True)]
    least = memory_of(rows, certain)
    if not some_partition_fits(least, limits_of(rows, [1] * stages)):
        return None
    times = stack_rows(rows, lambda row: row.forward_s + row.backward_s)
    shared = stages_in_flight(held, placement)
    likely = least if shared == certain else memory_of(rows, shared)
    tight = limits_of(rows, turns, passing=True)
    bounds = partition_layers(times, likely, tight)
    if bounds is None and max(turns) > 1:
        bounds = partition_layers(times, likely, limits_of(rows, turns))
    bounds = bounds or partition_layers(times, least, limits_of(rows, [1] * stages))
    assert bounds is not None, "the memory test found a cut that fits"
    cut = measure_cut(bounds, rows, held, placement)
    if max(turns) == 1:
        return cut
    if not cut.may_fit:  # the limits of stages leave open how full the stages of one lane are together
        lean = measure_cut(leanest_bounds(rows, held, placement), rows, held, placement)
        cut = lean if lean.may_fit else cut
    even, even_s = _balanced_bounds(times, rows, placement, {} if balances is None else balances)
    if even_s >= lane_times(times, bounds, placement).max():
        return cut
    balanced = measure_cut(even, rows, held, placement)
    return balanced if balanced.may_fit else cut


def _balanced_bounds(
    times: Array, rows: Sequence[LayerRow], placement: tuple[int, ...], balances: dict[object, Balance]
) -> tuple[tuple[int, ...], float]:
    """Return the balanced boundaries of these rows, and the time of their busiest lane."""
    key = placement, tuple([(id(row.forward_s), id(row.backward_s)) for row in rows])
    if key not in balances:
        bounds = balance_lanes(times, placement)
        balances[key] = bounds, float(lane_times(times, bounds, placement).max()), rows
    return balances[key][:2]


def leanest_bounds(rows: Sequence[LayerRow], held: Sequence[float], placement: Sequence[int]) -> tuple[int, ...]:
    """Return the boundaries (0, cut, ..., layers) with which the fullest stage needs the least memory."""
    flights = np.asarray(stages_in_flight(held, placement), dtype=float)[:, None]
    needs = np.empty((len(rows), len(rows[0].forward_s)))
    for row, stages in stages_by_row(rows):
        needs[stages] = row.static_bytes + flights[stages] * row.saved_bytes
    bounds = partition_layers(needs)
    assert bounds is not None, "without limits some cut always exists"
    return bounds


def measure_cut(
    bounds: Sequence[int], rows: Sequence[LayerRow], held: Sequence[float], placement: Sequence[int]
) -> LayerCut:
    runs, row_stages = list(pairwise(bounds)), stages_by_row(rows)
    saved, pending, stays, forward, backward = (
        _stage_sums(bounds, row_stages, value)
        for value in (
            lambda row: row.saved_bytes,
            lambda row: row.pending_bytes,
            lambda row: row.static_bytes,
            lambda row: row.forward_s,
            lambda row: row.backward_s,
        )
    )
    static = [float(WORKSPACE_BYTES)] * len(held)
    complete = [0.0] * len(held)  # a microbatch of every stage, which a lane holds after its last forward
    least = [float("inf")] * len(held)
    limits = [float("inf")] * len(held)
    for row, lane, saved_bytes, stay in zip(rows, placement, saved, stays, strict=True):
        static[lane] += stay
        complete[lane] += saved_bytes
        least[lane] = min(least[lane], saved_bytes)
        limits[lane] = min(limits[lane], row.limit_bytes + WORKSPACE_BYTES)
    lane_figures = zip(static, held, least, complete, strict=True)
    floors = [stays + max(count * saved_bytes, all_stages) for stays, count, saved_bytes, all_stages in lane_figures]
    needs = [*zip(floors, limits, strict=True)]
    for lane in {lane for lane, row in zip(placement, rows, strict=True) if row.kinds}:
        lane_stages = [stage for stage, stage_lane in enumerate(placement) if stage_lane == lane]
        limit, (need, has) = lane_need(
            [(rows[stage].kinds, *runs[stage]) for stage in lane_stages],
            held[lane],
            (static[lane] - WORKSPACE_BYTES, [saved[stage] for stage in lane_stages]),
        )
        limits[lane], needs[lane] = limit + WORKSPACE_BYTES, (need + WORKSPACE_BYTES, has + WORKSPACE_BYTES)
    return LayerCut(
        cuts=tuple(bounds[1:-1]),
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        floor_bytes=tuple(floors),
        limit_bytes=tuple(limits),
        needs=tuple(needs),
        static_bytes=tuple(static),
        saved_bytes=tuple(saved),
        pending_bytes=(0.0,) * len(rows) if any(row.kinds for row in rows) else tuple(pending),
    )


def _stage_sums(
    bounds: Sequence[int], row_stages: Sequence[tuple[LayerRow, Sequence[int]]], value: Callable[[LayerRow], Array]
) -> list[float]:
    """Return the sum of a figure over the layers of every stage."""
    if len(row_stages) == 1:
        sums: list[float] = np.add.reduceat(value(row_stages[0][0]), bounds[:-1]).tolist()
        return sums
    stage_totals = [0.0] * (len(bounds) - 1)
    for row, stages in row_stages:
        sums = np.add.reduceat(value(row), bounds[:-1]).tolist()
        for stage in stages:
            stage_totals[stage] = sums[stage]
    return stage_totals
