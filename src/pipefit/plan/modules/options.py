"""Layouts of one module for a count of microbatches, as arrays: devices, times and remaining memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array, Ints
from pipefit.plan.modules.module_budgets import DIVISION_BUDGET
from pipefit.plan.modules.profile import AllCuts, ModuleProfile

UNBOUNDED = 1 << 30
"""Any number of stages may follow."""


@dataclass(frozen=True, slots=True)
class BestValues:
    """The minimum of every quantity over some layouts."""

    through_s: float
    slowest_s: float
    reduce_s: float
    devices: int


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """Layouts of one module; arrays with an entry for each."""

    devices: Ints
    stages: Ints
    slowest_s: Array
    "Its slowest stage, for one microbatch, forward and backward."
    through_s: Array
    "Sum over its stages, for one microbatch."
    reduce_s: Array
    "Gradient reduction of its largest stage."
    room: Ints
    "Number of stages of other modules that may follow: each adds one microbatch in flight here."
    replicas: Ints
    way: Ints
    row: Ints
    "Index among the cuts of the variant."
    beside: Ints
    "[layout, guest]: variants of the modules that share its devices (`sharing.py`)."

    @property
    def size(self) -> int:
        return len(self.devices)

    @cached_property
    def best_values(self) -> BestValues:
        """Best values over the layouts. There must be at least one."""
        through_s, slowest_s, reduce_s = (
            float(column.min()) for column in (self.through_s, self.slowest_s, self.reduce_s)
        )
        return BestValues(through_s, slowest_s, reduce_s, int(self.devices.min()))

    def select_rows(self, index: NDArray[np.bool_] | Ints) -> LayoutOptions:
        """Return these layouts."""
        if index.dtype == np.bool_:
            index = np.flatnonzero(index)
        return LayoutOptions(**{column.name: getattr(self, column.name)[index] for column in fields(self)})


def replica_counts(samples: int, devices: int) -> list[int]:
    """Return the counts of replicas to consider.

    They are all counts up to `every_replica_count` (more replicas shard the optimizer state further, even if no replica
    gets fewer samples), and larger counts that reduce the samples of a replica.
    """
    spared = {-(-samples // divisor) for divisor in range(1, samples + 1)}
    first_counts = range(1, min(DIVISION_BUDGET.every_replica_count, samples) + 1)
    return sorted(count for count in {*spared, *first_counts} if count <= devices)


def options_of(
    profile: ModuleProfile,
    microbatches: int,
    samples: int,
    devices: int,
    limit_bytes: float,
    fixed: Mapping[str, int] = MappingProxyType({}),
) -> LayoutOptions:
    """Return all layouts of a module on at most `devices` devices that fit by themselves.

    A microbatch has `samples` samples and a device holds `limit_bytes`; fixed `replicas` are obeyed.
    """
    counts = replica_counts(profile.most_replicas(samples), devices)
    if "replicas" in fixed:
        able = min(profile.most_replicas(samples, fixed=True), devices)
        counts = [fixed["replicas"]] if fixed["replicas"] <= able else []
    if not counts or not profile.ways:
        return _empty_options()
    replicas = np.array(counts, dtype=np.int64)
    mean, largest = (column[:, None] for column in profile.replica_loads(microbatches, replicas, samples))
    cuts, stages, part = profile.all_cuts, profile.all_cuts.stages, (1.0 - 1.0 / replicas)[:, None]
    used = replicas[:, None] * (cuts.counts * cuts.shards)
    held_bytes = stages["static_bytes"] + stages["state_bytes"] / replicas[:, None] + profile.workspace_bytes
    held_bytes += largest * stages["passing_bytes"]
    room = _stages_behind(limit_bytes - held_bytes, largest * stages["saved_bytes"], cuts, microbatches)
    index, cut = np.nonzero((used <= devices) & (room >= 0))
    order = np.argsort(cuts.way[cut].astype(np.uint16), kind="stable")  # sorted by variant
    index, cut = index[order], cut[order]
    slowest_s = cuts.largest_stages(stages["fixed_s"] + mean * stages["sample_s"]) + profile.overhead_s
    totals = profile.variant_totals
    through_s = totals.fixed_s[cuts.way] + mean * totals.sample_s[cuts.way] + cuts.counts * profile.overhead_s
    reduce_s = 2.0 * part * profile.reduce_s_per_byte * cuts.most_gradient_bytes
    return LayoutOptions(
        devices=used[index, cut],
        stages=cuts.counts[cut],
        slowest_s=slowest_s[index, cut],
        through_s=through_s[index, cut],
        reduce_s=reduce_s[index, cut],
        room=room[index, cut],
        replicas=replicas[index],
        way=cuts.way[cut],
        row=cuts.row[cut],
        beside=np.zeros((len(cut), 0), dtype=np.int64),
    )


def filter_fixed(options: LayoutOptions, fixed: Mapping[str, int]) -> LayoutOptions:
    """Return the options with the fixed `stages` and `devices`."""
    for name in fixed.keys() & {"stages", "devices"}:
        options = options.select_rows(getattr(options, name) == fixed[name])
    return options


def _empty_options() -> LayoutOptions:
    numbers, seconds = np.zeros(0, dtype=np.int64), np.zeros(0)
    return LayoutOptions(
        devices=numbers, stages=numbers, slowest_s=seconds, through_s=seconds, reduce_s=seconds, room=numbers,
        replicas=numbers, way=numbers, row=numbers, beside=np.zeros((0, 0), dtype=np.int64),
    )  # fmt: skip


def _stages_behind(left_bytes: Array, saved_bytes: Array, cuts: AllCuts, microbatches: int) -> Ints:
    """[replicas, cut]: number of stages that may follow the module; negative if it does not even fit as the last one.

    A stage with s stages behind it holds min(microbatches, s + 1) microbatches (1F1B).
    """
    held = np.floor(left_bytes / np.maximum(saved_bytes, 1e-30))
    room = np.where(held >= microbatches, float(UNBOUNDED), held - cuts.stages["behind"])
    room[left_bytes < 0] = -1.0
    stages_behind: Ints = cuts.smallest_stages(room).astype(np.int64)
    return stages_behind


def drop_dominated(options: LayoutOptions, ways_differ: bool = False) -> LayoutOptions:
    """Return the options not dominated by another one, which equals or beats them in every quantity.

    The quantities are devices, stages, slowest stage, time through the module, reduction, and the number of stages that
    may follow. With `ways_differ`, variants differ in compatibility, so only layouts of the same variant are compared.
    """
    keys = (-options.room, options.reduce_s, options.stages, options.through_s, options.slowest_s, options.devices)
    order = np.lexsort(keys)
    options = options.select_rows(order)
    undominated = np.ones(options.size, dtype=np.bool_)
    # Sorted: a dominating layout comes first, with no more devices.
    for start in range(0, options.size, DIVISION_BUDGET.compared_layouts):
        rows = np.arange(start, min(start + DIVISION_BUDGET.compared_layouts, options.size))
        before = np.concatenate((np.flatnonzero(undominated[:start]), rows))
        a, b = options.select_rows(before), options.select_rows(rows)
        beaten = (
            (a.stages[:, None] <= b.stages)
            & (a.slowest_s[:, None] <= b.slowest_s)
            & (a.through_s[:, None] <= b.through_s)
            & (a.reduce_s[:, None] <= b.reduce_s)
            & (a.room[:, None] >= b.room)
        )
        beaten &= before[:, None] < rows  # the first of equals stays
        if ways_differ:
            beaten &= a.way[:, None] == b.way
        undominated[rows] = ~beaten.any(axis=0)
    return options.select_rows(undominated)
