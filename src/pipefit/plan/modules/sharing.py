"""Layouts of the backbone, the module with the most work, together with guests that share its devices, as arrays.

A guest is held completely on every lane of the backbone, over the lane's devices in a grid of its own; the lanes take
microbatches in turn (multiplexing of encoder and language model, as in MegaScale-Omni, arXiv 2605.08962, and Optimus,
arXiv 2408.03505). Each lane thus has several units of guest work in sequence. The first unit delays the pipeline;
further units are free up to the idle time of the pipeline:

    step = time through the backbone + (K - 1) x its slowest stage + one unit + max(0, the other units - idle)

where the slowest stage idles for as long as the other stages take a microbatch. Memory: the complete module on every
device, and the units of the microbatches that the pipeline has in flight, plus one ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array, Ints
from pipefit.plan.modules.options import UNBOUNDED, LayoutOptions
from pipefit.plan.modules.profile import ModuleProfile

AHEAD = 1
"""Number of units that a lane has ready before the pipeline starts on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestModule:
    """A module that shares the devices of the backbone."""

    profile: ModuleProfile
    feeds: bool
    "True if it precedes the backbone in the chain; else the backbone feeds it."
    passes: NDArray[np.bool_] | None = None
    """[variant of the guest, variant of the backbone]: whether the hidden state can go between them; None: it always
    can."""
    fixed: int = 0
    "Fixed number of its replicas on a lane; 0: any."
    multiple: int = 1
    "Number of microbatches it processes together; a guest that processes several is not sharded."


class DeviceSharing:
    """The backbone's layouts with those of its guests, for one count of microbatches of `samples` samples."""

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
        """Return lower bounds over all layouts with guests: each guest at its fastest variant, with samples dealt
        evenly.

        Only layouts of the backbone with a unit for every lane remain; `beside` holds their indices in `options`.
        """
        number = np.flatnonzero(options.stages <= min(self.unit_count(guest) for guest in self.guests))
        options = replace(options.select_rows(number), beside=number[:, None])
        sizes, size = distinct_values(options.devices // options.stages)
        unit_s = np.zeros((len(self.guests), options.size))
        for index, guest in enumerate(self.guests):
            profile, totals = guest.profile, guest.profile.variant_totals
            replicas, fits = self.guest_replicas(guest, sizes)
            mean = profile.mean_cost * self.samples * guest.multiple
            seconds = totals.fixed_s[:, None] + mean / replicas * totals.sample_s[:, None]
            unit_s[index] = np.where(fits, seconds + profile.overhead_s, np.inf).min(axis=0)[size]
        able = np.flatnonzero(np.isfinite(unit_s).all(axis=0))
        options = options.select_rows(able)
        return self._join_times(options, unit_s[:, able], options.reduce_s)

    def expand_options(self, options: LayoutOptions) -> LayoutOptions:
        """Return every variant of every guest with these layouts of the backbone; `room` is not computed."""
        lane, reduce_s, index = options.devices // options.stages, options.reduce_s, np.arange(options.size)
        unit_s, beside = np.zeros((0, options.size)), np.zeros((options.size, 0), dtype=np.int64)
        for guest in self.guests:
            profile, totals = guest.profile, guest.profile.variant_totals
            sizes, size = distinct_values(lane[index])
            replicas, fits = self.guest_replicas(guest, sizes)
            goes = fits[:, size]
            if guest.passes is not None:
                goes &= guest.passes[:, options.way[index]]
            variant, before = np.nonzero(goes)
            counts, index = replicas[variant, size[before]], index[before]
            own_s = (
                totals.fixed_s[variant]
                + self.guest_loads(guest, counts)[0] * totals.sample_s[variant]
                + profile.overhead_s
            )
            over = 1.0 - 1.0 / (counts * options.stages[index])
            reduce_s = reduce_s[before] + 2.0 * over * profile.reduce_s_per_byte * totals.gradient_bytes[variant]
            unit_s = np.vstack((unit_s[:, before], own_s))
            beside = np.hstack((beside[before], variant[:, None]))
        return self._join_times(replace(options.select_rows(index), beside=beside), unit_s, reduce_s)

    def fitting_options(self, options: LayoutOptions, behind: int) -> LayoutOptions:
        """Return the options that fit, with their room: up to `behind` stages of other modules behind the backbone."""
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
        """Return the backbone's layouts with the times of one unit of each guest, [guest, layout], added."""
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
        """[variant, lane] of a guest on lanes of these numbers of devices: (its replicas, whether they are possible).

        Possible are complete shard groups with a sample, or an image, for each replica.
        """
        shards = guest.profile.variant_totals.shards[:, None]
        replicas = devices // shards
        limit = guest.profile.most_replicas(self.samples * guest.multiple, bool(guest.fixed))
        fits = (replicas * shards == devices) & (replicas <= limit)
        if guest.multiple > 1:
            fits &= shards == 1
        if guest.fixed:
            fits &= replicas == guest.fixed
        return np.maximum(replicas, 1), fits

    def unit_count(self, guest: GuestModule) -> int:
        """Return the number of a guest's units over all lanes; 0 if the microbatches are not a multiple of a unit's."""
        units, rest = divmod(self.microbatches, guest.multiple)
        return 0 if rest else units

    def replica_loads(self, profile: ModuleProfile, replicas: Ints, multiple: int = 1) -> tuple[Array, Array]:
        """Return the (mean, largest) load of the fullest replica of one or several microbatches, for each of these
        counts."""
        counts, index = distinct_values(replicas)
        mean, largest = profile.replica_loads(self.microbatches // multiple, counts, self.samples * multiple)
        return mean[index], largest[index]

    def guest_loads(self, guest: GuestModule, replicas: Ints) -> tuple[Array, Array]:
        """Return the loads of a unit of a guest."""
        return self.replica_loads(guest.profile, replicas, guest.multiple)


def distinct_values(numbers: Ints) -> tuple[Ints, Ints]:
    """Return (the distinct values, the index of each number's value), of small numbers."""
    there = np.bincount(numbers) > 0
    return np.flatnonzero(there), (np.cumsum(there) - 1)[numbers]


class _DeviceUsage:
    """Memory on the devices of layouts with guests."""

    def __init__(self, sharing: DeviceSharing, options: LayoutOptions) -> None:
        self.sharing, self.options = sharing, options
        cuts = sharing.backbone.all_cuts
        cut = cuts.start[options.way] + options.row
        sizes = cuts.sizes[cut]
        self.flat = np.repeat(np.arange(options.size), sizes)
        "Layout of every undominated stage."
        self.starts = np.cumsum(sizes) - sizes
        stage = np.arange(len(self.flat)) + np.repeat(cuts.first[cut] - self.starts, sizes)
        columns = {name: column[stage] for name, column in cuts.stages.items()}
        largest = sharing.replica_loads(sharing.backbone, options.replicas)[1][self.flat]
        self.kept = columns["static_bytes"] + columns["state_bytes"] / options.replicas[self.flat]
        self.kept += sharing.backbone.workspace_bytes + largest * columns["passing_bytes"]
        self.saved, self.behind = largest * columns["saved_bytes"], columns["behind"]
        self.guests = [(guest, *self._guest_usage(index, guest)) for index, guest in enumerate(sharing.guests)]

    def _guest_usage(self, place: int, guest: GuestModule) -> tuple[Array, Array, Array]:
        """Return (bytes always held, bytes of a unit, seconds of a unit), by layout."""
        options, sharing, profile, variant = self.options, self.sharing, guest.profile, self.options.beside[:, place]
        totals, replicas = (
            profile.variant_totals,
            options.devices // options.stages // profile.variant_totals.shards[variant],
        )
        mean, largest = sharing.guest_loads(guest, replicas)
        always = (
            totals.static_bytes[variant]
            + totals.state_bytes[variant] / replicas
            + largest * totals.passing_bytes[variant]
        )
        seconds = totals.fixed_s[variant] + mean * totals.sample_s[variant] + profile.overhead_s
        return always, largest * totals.saved_bytes[variant], seconds

    def fits_behind(self, behind: int) -> NDArray[np.bool_]:
        """Return which layouts fit with `behind` stages of other modules behind the backbone."""
        options, count = self.options, self.sharing.microbatches
        shared, ahead = np.zeros(options.size), np.zeros(options.size)
        for guest, always, unit, seconds in self.guests:
            shared += always
            if guest.feeds:
                units, lanes = np.ceil(self.sharing.unit_count(guest) / options.stages), options.stages * guest.multiple
                shared += unit * np.minimum(units, np.ceil((options.stages + behind) / lanes) + AHEAD)
            else:
                shared += unit
                waiting = np.ceil(seconds / np.maximum(guest.multiple * options.slowest_s, 1e-12))
                ahead += guest.multiple * waiting
        held = self.kept + np.minimum(count, self.behind + behind + ahead[self.flat]) * self.saved
        fullest = np.maximum.reduceat(held, self.starts) if len(held) else np.zeros(0)
        fits: NDArray[np.bool_] = fullest + shared <= self.sharing.limit_bytes
        return fits
