"""The search behind `orchestrate.py`: for one choice of modules that share devices, the best layouts of all modules.

Counts of microbatches are visited in the order of their bounds, until these are too long. For a count, the layouts of
each module that can be part of a short enough step are combined from the end of the chain backwards, because later
stages increase the microbatches in flight in earlier ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array, Ints
from pipefit.plan.modules.module_budgets import DIVISION_BUDGET
from pipefit.plan.modules.options import BestValues, LayoutOptions, drop_dominated, filter_fixed, options_of
from pipefit.plan.modules.profile import ModuleProfile
from pipefit.plan.modules.sharing import DeviceSharing, GuestModule

BOUND_ROUNDING = 1 - 1e-12
"""Bounds are multiplied by this: sums in another order may differ by as much."""

ModuleKey = tuple[int, int, int, tuple[int, ...]]
"""(variant, row, replicas, variants of the guests) of a module."""

Kept = tuple[float, int, int, tuple[ModuleKey, ...]]
"""Minus the step, minus devices, minus microbatches, and the keys of the modules with devices of their own."""


class DivisionProblem:
    """Modules with devices of their own, and guests of the backbone."""

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
        for index in (0, len(profiles) - 1):
            if profiles[index].name in guests:
                feeds = index < backbone
                adjacent_passes = (between.pop(0) if feeds else between.pop().T) if between else None
                guest_fixed = fixed.get(profiles[index].name, {})
                replicas, multiple = guest_fixed.get("replicas", 0), guest_fixed.get("multiple", 1)
                guest = GuestModule(
                    profile=profiles[index], feeds=feeds, passes=adjacent_passes, fixed=replicas, multiple=multiple
                )
                self.guests.append(guest)
        self.passes: Sequence[NDArray[np.bool_]] = between
        self.own = [profile for profile in profiles if profile.name not in guests]
        self.backbone = self.own.index(profiles[backbone])
        work = [
            batch * profile.mean_cost * float((profile.variant_totals.shards * profile.variant_totals.sample_s).min())
            for profile in profiles
        ]
        self.work_s = fsum(work) / devices
        "Lower bound of any step: all devices share all work."


@dataclass(frozen=True, slots=True)
class DeviceFrontier:
    """Minimum number of devices for a module's slowest stage to take at most a given time."""

    slowest_s: Array
    devices: Array
    best: BestValues
    "Best values over all layouts."

    @staticmethod
    def from_options(options: LayoutOptions) -> DeviceFrontier:
        order = np.argsort(options.slowest_s)
        devices = np.minimum.accumulate(options.devices[order]).astype(np.float64)
        fewer = np.flatnonzero(np.diff(devices, prepend=np.inf))
        return DeviceFrontier(options.slowest_s[order[fewer]], devices[fewer], options.best_values)

    def devices_needed(self, slowest_s: Array) -> Array:
        """Return the devices for each of these times of the slowest stage."""
        index = np.searchsorted(self.slowest_s, slowest_s, "right") - 1
        needed: Array = np.where(index >= 0, self.devices[index], np.inf)
        return needed


def relaxed_s(frontiers: Sequence[DeviceFrontier], microbatches: int, devices: int) -> float:
    """Return a lower bound of the step with these layouts.

    It combines the fastest slowest stage that the devices allow with the best value of everything else.
    """
    ends = np.sort(np.concatenate([frontier.slowest_s for frontier in frontiers]))
    enough = sum((frontier.devices_needed(ends) for frontier in frontiers), np.zeros(len(ends))) <= devices
    if not enough[-1]:
        return float("inf")
    slowest_s, through_s = float(ends[enough.argmax()]), fsum(frontier.best.through_s for frontier in frontiers)
    return (
        through_s + (microbatches - 1) * slowest_s + max(frontier.best.reduce_s for frontier in frontiers)
    ) * BOUND_ROUNDING


@dataclass(frozen=True, slots=True)
class OptionCache:
    """Results reused for all choices of modules that share, by module and count of microbatches."""

    options: dict[tuple[str, int], LayoutOptions] = field(default_factory=dict)
    frontiers: dict[tuple[str, int], DeviceFrontier] = field(default_factory=dict)

    def layout_options(self, modules: DivisionProblem, profile: ModuleProfile, microbatches: int) -> LayoutOptions:
        """Return the layouts of a module with devices of its own."""
        key, module_fixed = (profile.name, microbatches), modules.fixed.get(profile.name, {})
        if key not in self.options:
            samples = modules.batch // microbatches
            unfiltered = options_of(profile, microbatches, samples, modules.devices, modules.limit_bytes, module_fixed)
            self.options[key] = filter_fixed(unfiltered, module_fixed)
        return self.options[key]

    def device_frontier(self, modules: DivisionProblem, profile: ModuleProfile, microbatches: int) -> DeviceFrontier:
        """Return the frontier of a module's layouts."""
        key = (profile.name, microbatches)
        if key not in self.frontiers:
            self.frontiers[key] = DeviceFrontier.from_options(self.layout_options(modules, profile, microbatches))
        return self.frontiers[key]


class DivisionSearch:
    """A search for the best combinations: a heap with the worst one on top.

    It holds `few` combinations while they are slower than `fastest_s`, else `top`.
    """

    def __init__(self, modules: DivisionProblem, known: OptionCache, top: int, few: int, fastest_s: float) -> None:
        self.modules, self.known, self.top, self.few, self.fastest_s = modules, known, top, few, fastest_s
        self.kept: list[Kept] = []
        self.seen: set[Kept] = set()
        self.best_s = np.inf
        self.given_up = False
        "True if layouts were dropped because of the limit `few`."
        self.considered = self.combined = 0

    @property
    def until_s(self) -> float:
        """Step time up to which a combination is kept."""
        near = self.best_s * (1 + DIVISION_BUDGET.step_slack)
        return min(near, -self.kept[0][0]) if len(self.kept) >= self.kept_limit else near

    @property
    def kept_limit(self) -> int:
        """Number of combinations to keep."""
        return self.top if self.best_s <= self.fastest_s else self.few

    @property
    def cut_short(self) -> bool:
        """True if more layouts may belong to the `top` ones."""
        return self.given_up and self.best_s <= self.fastest_s

    def run(self, counts: Iterable[int]) -> None:
        """Search these counts of microbatches."""
        bounds = sorted((self.bound_s(count), count) for count in counts)
        bounds = [bound for bound in bounds if bound[0] < np.inf]
        # Narrow ranges first: their results shorten the wider ones.
        for share in DIVISION_BUDGET.bound_ranges if bounds else ():
            within_s = bounds[0][0] * (1 + share)
            for bound_s, count in bounds:
                until_s = min(self.until_s, within_s)
                if bound_s > until_s:
                    break
                self.combine_layouts(count, until_s)
            if within_s >= self.until_s:
                return

    def kept_layouts(self) -> list[Kept]:
        """Return the combinations kept, the fastest first; among equally fast ones, the one with fewer devices
        first."""
        longest_s = self.best_s * (1 + DIVISION_BUDGET.step_slack)
        return [layout for layout in sorted(self.kept, reverse=True) if -layout[0] <= longest_s]

    def bound_s(self, microbatches: int) -> float:
        """Return a lower bound of any step with this count of microbatches: without sharing, and with all work divided
        evenly."""
        modules = self.modules
        if not all(self.known.layout_options(modules, profile, microbatches).size for profile in modules.own):
            return float("inf")
        frontiers = [self.known.device_frontier(modules, profile, microbatches) for profile in modules.own]
        relaxed_bound_s = relaxed_s(frontiers, microbatches, modules.devices)
        return max(relaxed_bound_s, modules.work_s * BOUND_ROUNDING)

    def combine_layouts(self, microbatches: int, until_s: float) -> None:
        """Combine the layouts of all modules for one count of microbatches to steps of at most `until_s`."""
        modules = self.modules
        plain = [self.known.layout_options(modules, profile, microbatches) for profile in modules.own]
        options = self._promising_options(plain, microbatches, until_s)
        if options is not None and modules.guests:
            options = self._with_guests(options, microbatches, until_s)
        if options is not None:
            options = [drop_dominated(module_options, bool(modules.passes)) for module_options in options]
            self._combine_module(options, microbatches, len(options) - 1, _PartialChoice())

    def _with_guests(
        self, options: list[LayoutOptions], microbatches: int, until_s: float
    ) -> list[LayoutOptions] | None:
        """Return the options with every variant of the guests added to the backbone's layouts, including their
        memory."""
        modules, backbone, samples = self.modules, self.modules.backbone, self.modules.batch // microbatches
        sharing = DeviceSharing(modules.own[backbone], modules.guests, microbatches, samples, modules.limit_bytes)
        plain = options[backbone]
        options[backbone] = sharing.lower_bounds(plain)
        promising = self._promising_options(options, microbatches, until_s) if options[backbone].size else None
        if promising is None:
            return None
        promising[backbone] = sharing.expand_options(plain.select_rows(promising[backbone].beside[:, 0]))
        self.considered += promising[backbone].size
        remaining = self._promising_options(promising, microbatches, until_s) if promising[backbone].size else None
        if remaining is None:
            return None
        behind = sum(int(module_options.stages.max()) for module_options in remaining[backbone + 1 :])
        remaining[backbone] = sharing.fitting_options(remaining[backbone], behind)
        return self._promising_options(remaining, microbatches, until_s) if remaining[backbone].size else None

    def _promising_options(
        self, options: Sequence[LayoutOptions], microbatches: int, until_s: float
    ) -> list[LayoutOptions] | None:
        """Return the options that may be part of a step of at most `until_s`; None if a module has none."""
        left = list(options)
        while True:
            size = sum(module_options.size for module_options in left)
            for index, module_options in enumerate(left):
                other_modules = [
                    other_options for other_index, other_options in enumerate(left) if other_index != index
                ]
                step_s = _PartialChoice().with_best(other_modules).step_s(module_options, microbatches)
                spare = self.modules.devices - sum(other_options.best_values.devices for other_options in other_modules)
                fits = np.flatnonzero((module_options.devices <= spare) & (step_s <= until_s))
                if not len(fits):
                    return None
                if len(fits) < module_options.size:
                    left[index] = module_options.select_rows(fits)
            if sum(module_options.size for module_options in left) == size:
                return left

    def _combine_module(
        self, options: Sequence[LayoutOptions], microbatches: int, place: int, chosen: _PartialChoice
    ) -> None:
        """Combine every option of module `place` with those of the modules before it, given the choices behind it."""
        modules, module_options, before = self.modules, options[place], options[:place]
        least = sum(earlier.best_values.devices for earlier in before)
        fits = (module_options.room >= chosen.stages) & (
            module_options.devices + chosen.devices + least <= modules.devices
        )
        if modules.passes and chosen.keys:
            fits &= modules.passes[place][module_options.way, chosen.keys[0][0]]
        step_s = chosen.with_best(before).step_s(module_options, microbatches)
        order = np.flatnonzero(fits & (step_s <= self.until_s))
        order = order[np.argsort(step_s[order], kind="stable")]
        if place == 1:
            at_once = max(1, DIVISION_BUDGET.combined_layouts // before[0].size)
            for start in range(0, len(order), at_once):
                if step_s[order[start]] > self.until_s:
                    break
                self._combine_pairs(before[0], module_options, order[start : start + at_once], microbatches, chosen)
            return
        for index in order.tolist():
            if step_s[index] > self.until_s:
                break
            more = chosen.with_option(module_options, index)
            if place:
                self._combine_module(options, microbatches, place - 1, more)
            else:
                self._keep_layout(float(step_s[index]), microbatches, more)

    def _combine_pairs(
        self, first: LayoutOptions, second: LayoutOptions, index: Ints, microbatches: int, chosen: _PartialChoice
    ) -> None:
        """Combine options of the first module with these of the second one, given the choices behind them."""
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
        for pair in np.argsort(found_s, kind="stable").tolist():
            if found_s[pair] > self.until_s:
                break
            both = chosen.with_option(second, int(index[rows[pair]])).with_option(first, int(columns[pair]))
            self._keep_layout(float(found_s[pair]), microbatches, both)

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
    """Sums and maxima over the chosen modules at the end of the chain."""

    through_s: float = 0.0
    slowest_s: float = 0.0
    reduce_s: float = 0.0
    devices: int = 0
    stages: int = 0
    keys: tuple[ModuleKey, ...] = ()

    def with_option(self, options: LayoutOptions, index: int) -> _PartialChoice:
        """Return the choice with one more option, of the module before."""
        return _PartialChoice(
            self.through_s + float(options.through_s[index]),
            max(self.slowest_s, float(options.slowest_s[index])),
            max(self.reduce_s, float(options.reduce_s[index])),
            self.devices + int(options.devices[index]),
            self.stages + int(options.stages[index]),
            (_option_key(options, index), *self.keys),
        )

    def with_best(self, others: Sequence[LayoutOptions]) -> _PartialChoice:
        """Return the choice with the best values of these modules."""
        return _PartialChoice(
            self.through_s + fsum(module_options.best_values.through_s for module_options in others),
            max([self.slowest_s, *(module_options.best_values.slowest_s for module_options in others)]),
            max([self.reduce_s, *(module_options.best_values.reduce_s for module_options in others)]),
        )

    def step_s(self, options: LayoutOptions, microbatches: int) -> Array:
        """Return the step with each of these options."""
        slowest_s = np.maximum(options.slowest_s, self.slowest_s)
        steps_s: Array = (
            self.through_s
            + options.through_s
            + (microbatches - 1) * slowest_s
            + np.maximum(options.reduce_s, self.reduce_s)
        )
        return steps_s


def _option_key(options: LayoutOptions, index: int) -> ModuleKey:
    variant, row, replicas = (int(column[index]) for column in (options.way, options.row, options.replicas))
    return variant, row, replicas, tuple(options.beside[index].tolist()) if options.beside.shape[1] else ()
