"""The layouts of one module for a count of microbatches, as arrays: devices, times and the room that is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array
from pipefit.plan.bounds import Ints
from pipefit.plan.modules.loads import fullest_loads
from pipefit.plan.modules.profile import ModuleProfile, StageCuts

UNBOUNDED = 1 << 30
"""As many stages behind it as there may be."""

FEW = 8
"""Replicas up to which every count of them is considered."""

COMPARED = 1500
"""Layouts that are compared with each other at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
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

    @staticmethod
    def joined(found: Sequence[Options]) -> Options:
        """All of them, one after the other."""
        return Options(**{name: np.concatenate([getattr(one, name) for one in found]) for name in Options.__slots__})

    @property
    def size(self) -> int:
        return len(self.devices)

    def only(self, index: NDArray[np.bool_] | Ints) -> Options:
        """These of them."""
        return Options(**{name: getattr(self, name)[index] for name in self.__slots__})


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
) -> Options:
    """All layouts of a module on at most so many devices that fit by themselves, where a microbatch has `samples`
    samples and a device holds `limit_bytes`; of fixed `replicas` only those."""
    each = replica_counts(samples, devices)
    if "replicas" in fixed:
        each = [fixed["replicas"]] if fixed["replicas"] <= min(samples, devices) else []
    if not each:
        return _none()
    counts = np.array(each, dtype=np.int64)
    loads = [fullest_loads(profile.weights, microbatches, int(count), samples) for count in counts]
    mean, most = (np.array(column) for column in zip(*loads, strict=True))
    found = [
        _of_way(profile, index, counts, mean, most, microbatches, devices, limit_bytes)
        for index in range(len(profile.ways))
    ]
    return Options.joined(found)


def obeying(options: Options, fixed: Mapping[str, int]) -> Options:
    """Those with the fixed `stages` and `devices`."""
    for name in fixed.keys() & {"stages", "devices"}:
        options = options.only(getattr(options, name) == fixed[name])
    return options


def _none() -> Options:
    numbers, seconds = np.zeros(0, dtype=np.int64), np.zeros(0)
    return Options(
        devices=numbers, stages=numbers, slowest_s=seconds, through_s=seconds, reduce_s=seconds, room=numbers,
        replicas=numbers, way=numbers, row=numbers, beside=np.zeros((0, 0), dtype=np.int64),
    )  # fmt: skip


def _of_way(
    profile: ModuleProfile,
    index: int,
    replicas: Ints,
    mean: Array,
    most: Array,
    microbatches: int,
    devices: int,
    limit_bytes: float,
) -> Options:
    way = profile.ways[index]
    cuts = way.cuts
    shape = (len(replicas), len(cuts.counts))
    used = replicas[:, None] * (cuts.counts * way.shards)
    slowest_s = _most(cuts.fixed_s + mean[:, None] * cuts.sample_s, cuts) + profile.overhead_s
    through_s = cuts.whole_fixed_s + mean[:, None] * cuts.whole_sample_s + cuts.counts * profile.overhead_s
    part = (1.0 - 1.0 / replicas)[:, None]
    reduce_s = 2.0 * part * profile.reduce_s_per_byte * _most(cuts.gradient_bytes[None], cuts)
    kept = cuts.static_bytes + cuts.state_bytes / replicas[:, None] + profile.workspace_bytes
    kept = kept + most[:, None] * cuts.passing_bytes
    room = _room(limit_bytes - kept, most[:, None] * cuts.saved_bytes, cuts, microbatches)
    fits = (used <= devices) & (room >= 0)
    rows = np.broadcast_to(np.arange(shape[1]), shape)
    return Options(
        devices=used[fits],
        stages=np.broadcast_to(cuts.counts, shape)[fits],
        slowest_s=slowest_s[fits],
        through_s=through_s[fits],
        reduce_s=reduce_s[fits],
        room=room[fits],
        replicas=np.broadcast_to(replicas[:, None], shape)[fits],
        way=np.full(int(fits.sum()), index, dtype=np.int64),
        row=rows[fits],
        beside=np.zeros((int(fits.sum()), 0), dtype=np.int64),
    )


def _most(stages: Array, cuts: StageCuts) -> Array:
    """[..., cut]: the largest of the stages of every cut."""
    found: Array = np.maximum.reduceat(stages, cuts.first, axis=-1)
    return found


def _room(left_bytes: Array, saved_bytes: Array, cuts: StageCuts, microbatches: int) -> Ints:
    """[replicas, cut]: stages that may lie behind the module, negative where it does not even fit as the last one. A
    stage with s stages behind it holds min(microbatches, s + 1) microbatches (1F1B)."""
    held = np.floor(left_bytes / np.maximum(saved_bytes, 1e-30))
    room = np.where(held >= microbatches, float(UNBOUNDED), held - cuts.behind)
    room[left_bytes < 0] = -1.0
    found: Ints = np.minimum.reduceat(room, cuts.first, axis=-1).astype(np.int64)
    return found


def unbeaten(options: Options, ways_differ: bool = False) -> Options:
    """Without layouts that another one beats in everything, or equals: they need no fewer devices, have no fewer
    stages, no shorter slowest stage or way through the module, no cheaper reduction, and bear no more stages behind
    them. Where `ways_differ` in what goes with them, only layouts of the same way are compared."""
    keys = (-options.room, options.reduce_s, options.stages, options.through_s, options.slowest_s, options.devices)
    order = np.lexsort(keys)
    options = options.only(order)
    kept = np.ones(options.size, dtype=np.bool_)
    for start in range(0, options.size, COMPARED):  # whoever beats another stands before it, or within its block
        own = np.arange(start, min(start + COMPARED, options.size))
        before = np.concatenate((np.flatnonzero(kept[:start]), own))
        a, b = options.only(before), options.only(own)
        beaten = (
            (a.devices[:, None] <= b.devices)
            & (a.stages[:, None] <= b.stages)
            & (a.slowest_s[:, None] <= b.slowest_s)
            & (a.through_s[:, None] <= b.through_s)
            & (a.reduce_s[:, None] <= b.reduce_s)
            & (a.room[:, None] >= b.room)
        )
        beaten &= before[:, None] < own  # of equal ones, the first stays
        if ways_differ:
            beaten &= a.way[:, None] == b.way
        kept[own] = ~beaten.any(axis=0)
    return options.only(kept)
