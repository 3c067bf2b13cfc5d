"""Layouts of the module with most work together with modules that share its devices, as arrays.

A module that shares is held whole on every lane of the backbone, over the lane's devices in a grid of its own; the
lanes take microbatches in turn (multiplexing of encoder and language model, as in MegaScale-Omni, arXiv 2605.08962, and
Optimus, arXiv 2408.03505). Per lane that is so many units of work one after another. The first one delays the pipeline;
of the others as much as the pipeline idles is free:

    step = way through the backbone + (K - 1) x its slowest stage + one unit + max(0, the other units - idle)

where the slowest stage idles for as long as the other stages take a microbatch. Memory: the whole module on every
device, and the units of the microbatches that the pipeline has in flight, and one ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array
from pipefit.plan.bounds.step_bounds import Ints
from pipefit.plan.modules.options import UNBOUNDED, LayoutOptions
from pipefit.plan.modules.profile import ModuleProfile

AHEAD = 1
"""Units that a lane has ready before the pipeline begins with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestModule:
    """A module that shares the devices of the backbone."""

    profile: ModuleProfile
    feeds: bool
    "Whether it lies before the backbone in the chain; else it is fed by it."
    passes: NDArray[np.bool_] | None = None
    "[way of the guest, way of the backbone]: whether the hidden state can go between them; None: it always can."
    fixed: int = 0
    "Its replicas on a lane, where they are given."
    multiple: int = 1
    "How many microbatches it takes together; one that takes several is not sharded."


class DeviceSharing:
    """The backbone's layouts with those of its guests, for one count of microbatches of so many samples."""

    def __init__(
        self,
        backbone: ModuleProfile,
        guests: Sequence[GuestModule],
        microbatches: int,
        samples: int,
        limit_bytes: float,
    ) -> None:
        self.backbone, self.guests = backbone, tuple(guests)
        self.microbatches, self.samples, self.limit_bytes = microbatches, samples, limit_bytes

    def lower_bounds(self, options: LayoutOptions) -> LayoutOptions:
        """Less than any layout with guests: each as fast as its fastest way could be, its samples dealt out evenly.
        Only layouts of the backbone with a unit for every lane; `beside` says which one of `options` each is."""
        number = np.flatnonzero(options.stages <= min(self.unit_count(guest) for guest in self.guests))
        options = replace(options.select_rows(number), beside=number[:, None])
        sizes, size = distinct_values(options.devices // options.stages)
        each = np.zeros((len(self.guests), options.size))
        for place, guest in enumerate(self.guests):
            profile, whole = guest.profile, guest.profile.variant_totals
            replicas, fits = self.guest_replicas(guest, sizes)
            mean = profile.mean_cost * self.samples * guest.multiple
            seconds = whole.fixed_s[:, None] + mean / replicas * whole.sample_s[:, None]
            each[place] = np.where(fits, seconds + profile.overhead_s, np.inf).min(axis=0)[size]
        able = np.flatnonzero(np.isfinite(each).all(axis=0))
        options = options.select_rows(able)
        return self._join_times(options, each[:, able], options.reduce_s)

    def expand_options(self, options: LayoutOptions) -> LayoutOptions:
        """Every way of every guest with these layouts of the backbone; the room of the layouts is not worked out."""
        lane, reduce_s, index = options.devices // options.stages, options.reduce_s, np.arange(options.size)
        each, beside = np.zeros((0, options.size)), np.zeros((options.size, 0), dtype=np.int64)
        for guest in self.guests:
            profile, whole = guest.profile, guest.profile.variant_totals
            sizes, size = distinct_values(lane[index])
            replicas, fits = self.guest_replicas(guest, sizes)
            goes = fits[:, size]
            if guest.passes is not None:
                goes &= guest.passes[:, options.way[index]]
            way, before = np.nonzero(goes)
            counts, index = replicas[way, size[before]], index[before]
            own_s = whole.fixed_s[way] + self.guest_loads(guest, counts)[0] * whole.sample_s[way] + profile.overhead_s
            over = 1.0 - 1.0 / (counts * options.stages[index])
            reduce_s = reduce_s[before] + 2.0 * over * profile.reduce_s_per_byte * whole.gradient_bytes[way]
            each = np.vstack((each[:, before], own_s))
            beside = np.hstack((beside[before], way[:, None]))
        return self._join_times(replace(options.select_rows(index), beside=beside), each, reduce_s)

    def fitting_options(self, options: LayoutOptions, behind: int) -> LayoutOptions:
        """Those that fit, with their room: up to so many stages of other modules `behind` the backbone."""
        held = _DeviceUsage(self, options)
        room = np.full(options.size, -1, dtype=np.int64)
        left = np.ones(options.size, dtype=np.bool_)
        for stages in range(behind + 1):
            left &= held.fits_behind(stages)
            if not left.any():
                break
            room[left] = stages
        room[left] = UNBOUNDED
        return replace(options, room=room).select_rows(room >= 0)

    def _join_times(self, options: LayoutOptions, each_s: Array, reduce_s: Array) -> LayoutOptions:
        """The times of the backbone's layouts with those of one unit of each guest, [guest, layout]."""
        first_s, others_s = each_s.sum(axis=0), np.zeros(options.size)
        for guest, own_s in zip(self.guests, each_s, strict=True):
            others_s += own_s * (np.ceil(self.unit_count(guest) / options.stages) - 1.0)
        idle_s = np.maximum(0.0, options.through_s - options.slowest_s)
        more_s = np.maximum(0.0, others_s - idle_s) / max(1, self.microbatches - 1)
        return replace(
            options,
            through_s=options.through_s + first_s,
            slowest_s=options.slowest_s + more_s,
            reduce_s=reduce_s,
        )

    def guest_replicas(self, guest: GuestModule, devices: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """[way, lane] of a guest on lanes of so many devices: (its replicas, whether that can be): whole shard groups,
        a sample, or an image, for each replica."""
        shards = guest.profile.variant_totals.shards[:, None]
        replicas = devices // shards
        most = guest.profile.most_replicas(self.samples * guest.multiple, bool(guest.fixed))
        fits = (replicas * shards == devices) & (replicas <= most)
        if guest.multiple > 1:
            fits &= shards == 1
        if guest.fixed:
            fits &= replicas == guest.fixed
        return np.maximum(replicas, 1), fits

    def unit_count(self, guest: GuestModule) -> int:
        """How often a guest takes microbatches, on all lanes together; 0: they are no multiple of what it takes."""
        units, rest = divmod(self.microbatches, guest.multiple)
        return 0 if rest else units

    def replica_loads(self, profile: ModuleProfile, replicas: Ints, multiple: int = 1) -> tuple[Array, Array]:
        """What the fullest replica of a microbatch, or of several together, gets, for each of these counts: on average,
        and at most."""
        counts, place = distinct_values(replicas)
        mean, most = profile.replica_loads(self.microbatches // multiple, counts, self.samples * multiple)
        return mean[place], most[place]

    def guest_loads(self, guest: GuestModule, replicas: Ints) -> tuple[Array, Array]:
        """Those of a unit of a guest."""
        return self.replica_loads(guest.profile, replicas, guest.multiple)


def distinct_values(numbers: Ints) -> tuple[Ints, Ints]:
    """(those that there are, which of them each is), of numbers that are not large."""
    there = np.bincount(numbers) > 0
    return np.flatnonzero(there), (np.cumsum(there) - 1)[numbers]


class _DeviceUsage:
    """What the devices of layouts with guests hold."""

    def __init__(self, sharing: DeviceSharing, options: LayoutOptions) -> None:
        self.sharing, self.options = sharing, options
        cuts = sharing.backbone.all_cuts
        cut = cuts.start[options.way] + options.row
        sizes = cuts.sizes[cut]
        self.flat = np.repeat(np.arange(options.size), sizes)
        "The layout of every stage that tells of all of them."
        self.starts = np.cumsum(sizes) - sizes
        stage = np.arange(len(self.flat)) + np.repeat(cuts.first[cut] - self.starts, sizes)
        columns = {name: column[stage] for name, column in cuts.stages.items()}
        most = sharing.replica_loads(sharing.backbone, options.replicas)[1][self.flat]
        self.kept = columns["static_bytes"] + columns["state_bytes"] / options.replicas[self.flat]
        self.kept += sharing.backbone.workspace_bytes + most * columns["passing_bytes"]
        self.saved, self.behind = most * columns["saved_bytes"], columns["behind"]
        self.guests = [(guest, *self._guest_usage(place, guest)) for place, guest in enumerate(sharing.guests)]

    def _guest_usage(self, place: int, guest: GuestModule) -> tuple[Array, Array, Array]:
        """(what it always holds, what a unit keeps, seconds of a unit), by layout."""
        options, sharing, profile, way = self.options, self.sharing, guest.profile, self.options.beside[:, place]
        whole, replicas = (
            profile.variant_totals,
            options.devices // options.stages // profile.variant_totals.shards[way],
        )
        mean, most = sharing.guest_loads(guest, replicas)
        always = whole.static_bytes[way] + whole.state_bytes[way] / replicas + most * whole.passing_bytes[way]
        seconds = whole.fixed_s[way] + mean * whole.sample_s[way] + profile.overhead_s
        return always, most * whole.saved_bytes[way], seconds

    def fits_behind(self, behind: int) -> NDArray[np.bool_]:
        """Which layouts fit with so many stages of other modules behind the backbone."""
        options, count = self.options, self.sharing.microbatches
        shared, ahead = np.zeros(options.size), np.zeros(options.size)
        for guest, always, unit, seconds in self.guests:
            shared += always
            if guest.feeds:
                units, lanes = np.ceil(self.sharing.unit_count(guest) / options.stages), options.stages * guest.multiple
                shared += unit * np.minimum(units, np.ceil((options.stages + behind) / lanes) + AHEAD)
            else:
                shared += unit
                many = np.ceil(seconds / np.maximum(guest.multiple * options.slowest_s, 1e-12))
                ahead += guest.multiple * many
        held = self.kept + np.minimum(count, self.behind + behind + ahead[self.flat]) * self.saved
        fullest = np.maximum.reduceat(held, self.starts) if len(held) else np.zeros(0)
        found: NDArray[np.bool_] = fullest + shared <= self.sharing.limit_bytes
        return found
