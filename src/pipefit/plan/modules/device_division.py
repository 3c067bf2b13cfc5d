"""The search behind `orchestrate.py`: for one choice of who shares devices, the best layouts of all modules together.

Counts of microbatches are gone through by their bound, the lowest first, until that is too long. For a count, layouts
of each module that can be part of a step short enough are put together from the end of the chain backwards, because
stages further down keep more microbatches in flight in those before them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array
from pipefit.plan.bounds.step_bounds import Ints
from pipefit.plan.modules.options import BestValues, LayoutOptions, drop_dominated, filter_fixed, options_of
from pipefit.plan.modules.profile import ModuleProfile
from pipefit.plan.modules.sharing import DeviceSharing, GuestModule

NEAR = 0.15
"""How much longer the step of a layout on the short list may be than the best one's, as a part of it."""

LOOKS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, float("inf"))
"""How far above the bound layouts are looked for, one after the other."""

PAIRS = 1 << 16
"""Layouts of two modules that are put together at once."""

ROUNDING = 1 - 1e-12
"""Bounds are this part of what they come to: sums in another order may differ so much."""

Key = tuple[int, int, int, tuple[int, ...]]
"""(way, row, replicas, ways of the guests) of a module."""

Kept = tuple[float, int, int, tuple[Key, ...]]
"""Minus the step, minus devices, minus microbatches, and the keys of the modules with devices of their own."""


class DivisionProblem:
    """What is to be laid out: modules with devices of their own, and guests of the backbone."""

    def __init__(
        self,
        profiles: Sequence[ModuleProfile],
        backbone: int,
        devices: int,
        batch: int,
        limit_bytes: float,
        passes: Sequence[NDArray[np.bool_]],
        fixed: Mapping[str, Mapping[str, int]],
        guests: frozenset[str],
    ) -> None:
        self.whole, self.fixed = tuple(profiles), fixed
        self.devices, self.batch, self.limit_bytes = devices, batch, limit_bytes
        between = [*passes]
        self.guests: list[GuestModule] = []
        for place in (0, len(profiles) - 1):
            if profiles[place].name in guests:
                feeds = place < backbone
                own = (between.pop(0) if feeds else between.pop().T) if between else None
                given = fixed.get(profiles[place].name, {})
                replicas, multiple = given.get("replicas", 0), given.get("multiple", 1)
                guest = GuestModule(profile=profiles[place], feeds=feeds, passes=own, fixed=replicas, multiple=multiple)
                self.guests.append(guest)
        self.passes: Sequence[NDArray[np.bool_]] = between
        self.own = [one for one in profiles if one.name not in guests]
        self.backbone = self.own.index(profiles[backbone])
        work = [
            batch * one.mean_cost * float((one.variant_totals.shards * one.variant_totals.sample_s).min())
            for one in profiles
        ]
        self.work_s = sum(work) / devices
        "Less than any step: all devices share all work."


@dataclass(frozen=True, slots=True)
class DeviceFrontier:
    """Of a module's layouts, the fewest devices that it takes to have no stage slower than so much."""

    slowest_s: Array
    devices: Array
    best: BestValues
    "Of all of them."

    @staticmethod
    def from_options(options: LayoutOptions) -> DeviceFrontier:
        order = np.argsort(options.slowest_s)
        devices = np.minimum.accumulate(options.devices[order]).astype(np.float64)
        fewer = np.flatnonzero(np.diff(devices, prepend=np.inf))
        return DeviceFrontier(options.slowest_s[order[fewer]], devices[fewer], options.best_values)

    def devices_needed(self, slowest_s: Array) -> Array:
        """Devices, for each of these."""
        place = np.searchsorted(self.slowest_s, slowest_s, "right") - 1
        found: Array = np.where(place >= 0, self.devices[place], np.inf)
        return found


def relaxed_s(frontiers: Sequence[DeviceFrontier], microbatches: int, devices: int) -> float:
    """Less than any step with these layouts: the least slowest stage that the devices allow if nothing else mattered,
    and the best of everything else."""
    ends = np.sort(np.concatenate([one.slowest_s for one in frontiers]))
    enough = sum((one.devices_needed(ends) for one in frontiers), np.zeros(len(ends))) <= devices
    if not enough[-1]:
        return float("inf")
    slowest_s, through_s = float(ends[enough.argmax()]), sum(one.best.through_s for one in frontiers)
    return (through_s + (microbatches - 1) * slowest_s + max(one.best.reduce_s for one in frontiers)) * ROUNDING


@dataclass(frozen=True, slots=True)
class OptionCache:
    """What is worked out once for all choices of who shares, by module and count of microbatches."""

    options: dict[tuple[str, int], LayoutOptions] = field(default_factory=dict)
    frontiers: dict[tuple[str, int], DeviceFrontier] = field(default_factory=dict)

    def layout_options(self, modules: DivisionProblem, profile: ModuleProfile, microbatches: int) -> LayoutOptions:
        """The layouts of a module with devices of its own."""
        key, own = (profile.name, microbatches), modules.fixed.get(profile.name, {})
        if key not in self.options:
            samples = modules.batch // microbatches
            found = options_of(profile, microbatches, samples, modules.devices, modules.limit_bytes, own)
            self.options[key] = filter_fixed(found, own)
        return self.options[key]

    def device_frontier(self, modules: DivisionProblem, profile: ModuleProfile, microbatches: int) -> DeviceFrontier:
        """Of those."""
        key = (profile.name, microbatches)
        if key not in self.frontiers:
            self.frontiers[key] = DeviceFrontier.from_options(self.layout_options(modules, profile, microbatches))
        return self.frontiers[key]


class DivisionSearch:
    """Keeps the best combinations so far: a heap with the worst of them on top; `few` while they are slower than
    `fastest_s`, `top` else."""

    def __init__(self, modules: DivisionProblem, known: OptionCache, top: int, few: int, fastest_s: float) -> None:
        self.modules, self.known, self.top, self.few, self.fastest_s = modules, known, top, few, fastest_s
        self.kept: list[Kept] = []
        self.seen: set[Kept] = set()
        self.best_s = np.inf
        self.given_up = False
        "Whether layouts were because a few were enough."
        self.considered = self.combined = 0

    @property
    def until_s(self) -> float:
        """What a step may take to be kept."""
        near = self.best_s * (1 + NEAR)
        return min(near, -self.kept[0][0]) if len(self.kept) >= self.kept_limit else near

    @property
    def kept_limit(self) -> int:
        """How many layouts are kept."""
        return self.top if self.best_s <= self.fastest_s else self.few

    @property
    def cut_short(self) -> bool:
        """Whether there may be more layouts that belong to the `top` ones."""
        return self.given_up and self.best_s <= self.fastest_s

    def run(self, counts: Iterable[int]) -> None:
        """Go through these counts of microbatches."""
        bounds = sorted((self.bound_s(count), count) for count in counts)
        bounds = [one for one in bounds if one[0] < np.inf]
        for share in LOOKS if bounds else ():  # narrow looks first: what they find makes the wider ones short
            within_s = bounds[0][0] * (1 + share)
            for bound_s, count in bounds:
                until_s = min(self.until_s, within_s)
                if bound_s > until_s:
                    break
                self.combine_layouts(count, until_s)
            if within_s >= self.until_s:
                return

    def kept_layouts(self) -> list[Kept]:
        """What was kept, the fastest first, of equally fast ones that with fewer devices."""
        return [one for one in sorted(self.kept, reverse=True) if -one[0] <= self.best_s * (1 + NEAR)]

    def bound_s(self, microbatches: int) -> float:
        """Less than any step of so many microbatches: as if nobody shared, and as if all devices shared all work."""
        modules = self.modules
        if not all(self.known.layout_options(modules, one, microbatches).size for one in modules.own):
            return float("inf")
        frontiers = [self.known.device_frontier(modules, one, microbatches) for one in modules.own]
        found = relaxed_s(frontiers, microbatches, modules.devices)
        return max(found, modules.work_s * ROUNDING)

    def combine_layouts(self, microbatches: int, until_s: float) -> None:
        """Combine the layouts of all modules for one count of microbatches to steps of at most this."""
        modules = self.modules
        plain = [self.known.layout_options(modules, one, microbatches) for one in modules.own]
        options = self._promising_options(plain, microbatches, until_s)
        if options is not None and modules.guests:
            options = self._with_guests(options, microbatches, until_s)
        if options is not None:
            options = [drop_dominated(one, bool(modules.passes)) for one in options]
            self._combine_module(options, microbatches, len(options) - 1, _PartialChoice())

    def _with_guests(
        self, options: list[LayoutOptions], microbatches: int, until_s: float
    ) -> list[LayoutOptions] | None:
        """With every way of the guests in the backbone's layouts, their memory among it."""
        modules, backbone, samples = self.modules, self.modules.backbone, self.modules.batch // microbatches
        sharing = DeviceSharing(modules.own[backbone], modules.guests, microbatches, samples, modules.limit_bytes)
        plain = options[backbone]
        options[backbone] = sharing.lower_bounds(plain)
        promising = self._promising_options(options, microbatches, until_s) if options[backbone].size else None
        if promising is None:
            return None
        promising[backbone] = sharing.expand_options(plain.select_rows(promising[backbone].beside[:, 0]))
        self.considered += promising[backbone].size
        found = self._promising_options(promising, microbatches, until_s) if promising[backbone].size else None
        if found is None:
            return None
        behind = sum(int(one.stages.max()) for one in found[backbone + 1 :])
        found[backbone] = sharing.fitting_options(found[backbone], behind)
        return self._promising_options(found, microbatches, until_s) if found[backbone].size else None

    def _promising_options(
        self, options: Sequence[LayoutOptions], microbatches: int, until_s: float
    ) -> list[LayoutOptions] | None:
        """The options that may be part of a step of at most this; None if of some module there are none."""
        left = list(options)
        while True:
            size = sum(one.size for one in left)
            for place, one in enumerate(left):
                others = [other for at, other in enumerate(left) if at != place]
                step_s = _PartialChoice().with_best(others).step_s(one, microbatches)
                spare = self.modules.devices - sum(other.best_values.devices for other in others)
                fits = np.flatnonzero((one.devices <= spare) & (step_s <= until_s))
                if not len(fits):
                    return None
                if len(fits) < one.size:
                    left[place] = one.select_rows(fits)
            if sum(one.size for one in left) == size:
                return left

    def _combine_module(
        self, options: Sequence[LayoutOptions], microbatches: int, place: int, chosen: _PartialChoice
    ) -> None:
        """Every option of module `place` with those of the modules before, given what was chosen for those behind."""
        modules, own, before = self.modules, options[place], options[:place]
        least = sum(one.best_values.devices for one in before)
        fits = (own.room >= chosen.stages) & (own.devices + chosen.devices + least <= modules.devices)
        if modules.passes and chosen.keys:
            fits &= modules.passes[place][own.way, chosen.keys[0][0]]
        step_s = chosen.with_best(before).step_s(own, microbatches)
        order = np.flatnonzero(fits & (step_s <= self.until_s))
        order = order[np.argsort(step_s[order], kind="stable")]
        if place == 1:
            at_once = max(1, PAIRS // before[0].size)
            for start in range(0, len(order), at_once):
                if step_s[order[start]] > self.until_s:
                    break
                self._combine_pairs(before[0], own, order[start : start + at_once], microbatches, chosen)
            return
        for index in order.tolist():
            if step_s[index] > self.until_s:
                break
            more = chosen.with_option(own, index)
            if place:
                self._combine_module(options, microbatches, place - 1, more)
            else:
                self._keep_layout(float(step_s[index]), microbatches, more)

    def _combine_pairs(
        self, first: LayoutOptions, second: LayoutOptions, index: Ints, microbatches: int, chosen: _PartialChoice
    ) -> None:
        """Options of the first module with these of the second one, given what was chosen for those behind."""
        second_s = chosen.through_s + second.through_s[index]
        slowest_s = np.maximum(chosen.slowest_s, second.slowest_s[index])
        reduce_s = np.maximum(chosen.reduce_s, second.reduce_s[index])
        step_s = (
            (second_s[:, None] + first.through_s)
            + (microbatches - 1) * np.maximum(first.slowest_s, slowest_s[:, None])
            + np.maximum(first.reduce_s, reduce_s[:, None])
        )
        fits = step_s <= self.until_s
        fits &= (chosen.devices + second.devices[index])[:, None] + first.devices <= self.modules.devices
        fits &= first.room >= (chosen.stages + second.stages[index])[:, None]
        if self.modules.passes:
            fits &= self.modules.passes[0][first.way[None, :], second.way[index][:, None]]
        rows, columns = np.nonzero(fits)
        found_s = step_s[rows, columns]
        for place in np.argsort(found_s, kind="stable").tolist():
            if found_s[place] > self.until_s:
                break
            both = chosen.with_option(second, int(index[rows[place]])).with_option(first, int(columns[place]))
            self._keep_layout(float(found_s[place]), microbatches, both)

    def _keep_layout(self, step_s: float, microbatches: int, chosen: _PartialChoice) -> None:
        item = (-step_s, -chosen.devices, -microbatches, chosen.keys)
        self.combined += 1
        if item in self.seen:
            return
        self.seen.add(item)
        self.best_s = min(self.best_s, step_s)
        if len(self.kept) < self.kept_limit:
            heapq.heappush(self.kept, item)
            return
        self.given_up = self.given_up or self.kept_limit < self.top
        if item > self.kept[0]:
            heapq.heapreplace(self.kept, item)


@dataclass(frozen=True, slots=True)
class _PartialChoice:
    """What the modules at the end of the chain come to."""

    through_s: float = 0.0
    slowest_s: float = 0.0
    reduce_s: float = 0.0
    devices: int = 0
    stages: int = 0
    keys: tuple[Key, ...] = ()

    def with_option(self, options: LayoutOptions, index: int) -> _PartialChoice:
        """With one option more, of the module before."""
        return _PartialChoice(
            self.through_s + float(options.through_s[index]),
            max(self.slowest_s, float(options.slowest_s[index])),
            max(self.reduce_s, float(options.reduce_s[index])),
            self.devices + int(options.devices[index]),
            self.stages + int(options.stages[index]),
            (_option_key(options, index), *self.keys),
        )

    def with_best(self, others: Sequence[LayoutOptions]) -> _PartialChoice:
        """With the best of everything that these modules have."""
        return _PartialChoice(
            self.through_s + sum(one.best_values.through_s for one in others),
            max([self.slowest_s, *(one.best_values.slowest_s for one in others)]),
            max([self.reduce_s, *(one.best_values.reduce_s for one in others)]),
        )

    def step_s(self, options: LayoutOptions, microbatches: int) -> Array:
        """The step with each of these options."""
        slowest_s = np.maximum(options.slowest_s, self.slowest_s)
        found: Array = (
            self.through_s
            + options.through_s
            + (microbatches - 1) * slowest_s
            + np.maximum(options.reduce_s, self.reduce_s)
        )
        return found


def _option_key(options: LayoutOptions, index: int) -> Key:
    way, row, replicas = (int(column[index]) for column in (options.way, options.row, options.replicas))
    return way, row, replicas, tuple(options.beside[index].tolist()) if options.beside.shape[1] else ()
