"""The layouts of one module for a count of microbatches, as arrays: devices, times and the room that is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array
from pipefit.plan.bounds.step_bounds import Ints
from pipefit.plan.modules.profile import AllCuts, ModuleProfile

UNBOUNDED = 1 << 30
"""As many stages behind it as there may be."""

FEW = 8
"""Replicas up to which every count of them is considered."""

COMPARED = 512
"""Layouts that are compared with each other at once."""


@dataclass(frozen=True, slots=True)
class BestValues:
    """The least of everything that any of some layouts has."""

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
    "All its stages one after the other, for one microbatch."
    reduce_s: Array
    "Adding up the gradients of its largest stage."
    room: Ints
    "How many stages of other modules may lie behind it: each of them has one more microbatch in flight here."
    replicas: Ints
    way: Ints
    row: Ints
    "Of the way's cuts."
    beside: Ints
    "[layout, guest]: the ways of the modules that share its devices (`sharing.py`)."

    @property
    def size(self) -> int:
        return len(self.devices)

    @cached_property
    def best_values(self) -> BestValues:
        """Of layouts, of which there must be one."""
        through_s, slowest_s, reduce_s = (float(one.min()) for one in (self.through_s, self.slowest_s, self.reduce_s))
        return BestValues(through_s, slowest_s, reduce_s, int(self.devices.min()))

    def select_rows(self, index: NDArray[np.bool_] | Ints) -> LayoutOptions:
        """These of them."""
        if index.dtype == np.bool_:
            index = np.flatnonzero(index)
        return LayoutOptions(**{one.name: getattr(self, one.name)[index] for one in fields(self)})


def replica_counts(samples: int, devices: int) -> list[int]:
    """The counts of replicas that are considered: all up to FEW (more replicas split the optimizer state further, even
    where they spare nobody work), and those of which each takes fewer samples of a microbatch than with fewer."""
    spared = {-(-samples // each) for each in range(1, samples + 1)}
    return sorted(count for count in {*spared, *range(1, min(FEW, samples) + 1)} if count <= devices)


def options_of(
    profile: ModuleProfile,
    microbatches: int,
    samples: int,
    devices: int,
    limit_bytes: float,
    fixed: Mapping[str, int] = MappingProxyType({}),
) -> LayoutOptions:
    """All layouts of a module on at most so many devices that fit by themselves, where a microbatch has `samples`
    samples and a device holds `limit_bytes`; of fixed `replicas` only those."""
    each = replica_counts(profile.most_replicas(samples), devices)
    if "replicas" in fixed:
        able = min(profile.most_replicas(samples, fixed=True), devices)
        each = [fixed["replicas"]] if fixed["replicas"] <= able else []
    if not each or not profile.ways:
        return _empty_options()
    replicas = np.array(each, dtype=np.int64)
    mean, most = (column[:, None] for column in profile.replica_loads(microbatches, replicas, samples))
    cuts, stages, part = profile.all_cuts, profile.all_cuts.stages, (1.0 - 1.0 / replicas)[:, None]
    used = replicas[:, None] * (cuts.counts * cuts.shards)
    kept = stages["static_bytes"] + stages["state_bytes"] / replicas[:, None] + profile.workspace_bytes
    kept += most * stages["passing_bytes"]
    room = _stages_behind(limit_bytes - kept, most * stages["saved_bytes"], cuts, microbatches)
    index, cut = np.nonzero((used <= devices) & (room >= 0))
    order = np.argsort(cuts.way[cut].astype(np.uint16), kind="stable")  # one way after the other
    index, cut = index[order], cut[order]
    slowest_s = cuts.largest_stages(stages["fixed_s"] + mean * stages["sample_s"]) + profile.overhead_s
    whole = profile.variant_totals
    through_s = whole.fixed_s[cuts.way] + mean * whole.sample_s[cuts.way] + cuts.counts * profile.overhead_s
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
    """Those with the fixed `stages` and `devices`."""
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
    """[replicas, cut]: stages that may lie behind the module, negative where it does not even fit as the last one. A
    stage with s stages behind it holds min(microbatches, s + 1) microbatches (1F1B)."""
    held = np.floor(left_bytes / np.maximum(saved_bytes, 1e-30))
    room = np.where(held >= microbatches, float(UNBOUNDED), held - cuts.stages["behind"])
    room[left_bytes < 0] = -1.0
    found: Ints = cuts.smallest_stages(room).astype(np.int64)
    return found


def drop_dominated(options: LayoutOptions, ways_differ: bool = False) -> LayoutOptions:
    """Without layouts that another one beats in everything, or equals: they need no fewer devices, have no fewer
    stages, no shorter slowest stage or way through the module, no cheaper reduction, and bear no more stages behind
    them. Where `ways_differ` in what goes with them, only layouts of the same way are compared."""
    keys = (-options.room, options.reduce_s, options.stages, options.through_s, options.slowest_s, options.devices)
    order = np.lexsort(keys)
    options = options.select_rows(order)
    kept = np.ones(options.size, dtype=np.bool_)
    for start in range(0, options.size, COMPARED):  # whoever beats another stands before it, with no more devices
        own = np.arange(start, min(start + COMPARED, options.size))
        before = np.concatenate((np.flatnonzero(kept[:start]), own))
        a, b = options.select_rows(before), options.select_rows(own)
        beaten = (
            (a.stages[:, None] <= b.stages)
            & (a.slowest_s[:, None] <= b.slowest_s)
            & (a.through_s[:, None] <= b.through_s)
            & (a.reduce_s[:, None] <= b.reduce_s)
            & (a.room[:, None] >= b.room)
        )
        beaten &= before[:, None] < own  # of equal ones, the first stays
        if ways_differ:
            beaten &= a.way[:, None] == b.way
        kept[own] = ~beaten.any(axis=0)
    return options.select_rows(kept)
