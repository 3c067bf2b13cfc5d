"""Dividing the devices of a cluster among the modules of a model: the layouts with the least closed-form step.

The problem is that of DistTrain (arXiv 2408.04275, section 5): for every module shards, replicas and stages, and one
count of microbatches, on disjoint devices, within memory. A step of K microbatches takes

    sum of the ways through the modules + (K - 1) x the slowest stage of all + the longest reduction of gradients.

Where they relax counts to real numbers and solve a convex program, all whole-numbered layouts are gone through here,
by bounds: a layout of one module is given up when the step is too long even if all the other modules had their best,
or when too few devices are left for them. Stages of modules further down the chain keep more microbatches in flight in
those before them, so layouts are put together from the end of the chain backwards.

A module at the end of the chain, beside the one with most work, may share that one's devices (`sharing.py`): the two
are then one module more that can be chosen, with a way through it and a slowest stage. Every choice of who shares has a
short list of its own, so that the simulator sees the best of each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array
from pipefit.cost.work import Recompute
from pipefit.plan.bounds import Ints
from pipefit.plan.modules.options import Options, obeying, options_of, unbeaten
from pipefit.plan.modules.profile import ModuleProfile
from pipefit.plan.modules.sharing import Guest, Sharing

NEAR = 0.15
"""How much longer the step of a layout on the short list may be than the best one's, as a part of it."""


FEW = 12
"""Layouts on the short list of a choice of who shares that is slower than another one."""

LOOKS = (0.02, 0.1, 0.5, float("inf"))
"""How far above its bound the layouts of a count of microbatches are looked for, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLayout:
    """How one module lies over its devices."""

    module: str
    replicas: int
    shards: int
    cuts: tuple[int, ...]
    "First layer of every stage but the first."
    recompute: Recompute
    shared: bool = False
    "Whether it lies whole on every lane of the module with most work, which has the devices; replicas and shards are"
    " then those of one lane."
    inline: bool = False
    "Whether it lies on that module's first or last lane alone; replicas and shards are those there."

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    @property
    def devices(self) -> int:
        return self.replicas * self.shards * self.stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A layout for every module, in the order of the chain."""

    microbatches: int
    modules: tuple[ModuleLayout, ...]
    step_s: float
    "By the closed form."

    @property
    def devices(self) -> int:
        return sum(module.devices for module in self.modules if not module.shared and not module.inline)

    @property
    def guests(self) -> frozenset[str]:
        """The modules that share the devices of another, lane by lane."""
        return frozenset(module.module for module in self.modules if module.shared)

    @property
    def inline(self) -> tuple[str, ...]:
        """The modules in line with another, on its first and last lane."""
        return tuple(module.module for module in self.modules if module.inline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orchestration:
    """What the search found."""

    best: tuple[Arrangement, ...]
    "The fastest first, within NEAR of the first one; empty: nothing fits."
    considered: int
    "Layouts of single modules that were compared."
    combined: int
    "Layouts of all modules whose step was worked out."


def orchestrate(
    profiles: Sequence[ModuleProfile],
    devices: int,
    batch: int,
    limit_bytes: float,
    *,
    top: int = 100,
    counts: Iterable[int] | None = None,
    passes: Sequence[NDArray[np.bool_]] = (),
    fixed: Mapping[str, Mapping[str, int]] | None = None,
    sharing: Sequence[frozenset[str]] = (frozenset(),),
) -> Orchestration:
    """The layouts with the least closed-form step, for modules in the order of the chain: the `top` ones of a choice of
    modules that share the devices of the one with most work, FEW where another choice is faster. Exact: the first one
    of every choice is its optimum.

    `counts`: the numbers of microbatches to consider, by default all that divide the batch. `passes[i]` [way of module
    i, way of the next one]: whether they go together; none: all do. `fixed`: of modules by name, the `replicas`,
    `stages` or `devices` that are given. `sharing`: the choices, each the names of modules that `can_share`.
    """
    each = list(counts) if counts is not None else [count for count in range(1, batch + 1) if batch % count == 0]
    known = _Known()
    best: list[Arrangement] = []
    considered = combined = 0
    for guests in sorted(sharing, key=len, reverse=True):
        fastest_s = min((one.step_s for one in best), default=math.inf)
        search = _Search(profiles, devices, batch, limit_bytes, top, passes, fixed or {}, guests, known, fastest_s)
        for bound_s, count in sorted((search.least_s(count), count) for count in each):
            if bound_s > search.until_s:
                break
            search.look(count)
        best += search.arrangements()
        considered += search.considered
        combined += search.combined
    best.sort(key=lambda one: one.step_s)
    return Orchestration(best=tuple(best), considered=considered, combined=combined)


def backbone_of(profiles: Sequence[ModuleProfile]) -> int:
    """The module with most work, whose devices others may share."""
    work = [min(way.shards * float((way.fixed_s + way.sample_s).sum()) for way in profile.ways) for profile in profiles]
    return int(np.argmax(work))


def can_share(profiles: Sequence[ModuleProfile]) -> frozenset[str]:
    """The modules that may share the backbone's devices: the first and the last one, where they stand next to it."""
    backbone, last = backbone_of(profiles), len(profiles) - 1
    return frozenset(profiles[one].name for one in {0, last} if one != backbone and abs(one - backbone) == 1)


@dataclass(frozen=True, slots=True)
class _Known:
    """What is worked out once for all choices of who shares."""

    options: dict[tuple[str, int], Options] = field(default_factory=dict)
    "By module and count of microbatches."


_Key = tuple[int, int, int, tuple[int, ...]]
"""(way, row, replicas, ways of the guests) of a module."""

_Kept = tuple[float, int, int, tuple[_Key, ...]]
"""Minus the step, minus devices, minus microbatches, and the keys of the modules with devices of their own."""


class _Search:
    """Keeps the best combinations so far: a heap with the worst of them on top."""

    def __init__(
        self,
        profiles: Sequence[ModuleProfile],
        devices: int,
        batch: int,
        limit_bytes: float,
        top: int,
        passes: Sequence[NDArray[np.bool_]],
        fixed: Mapping[str, Mapping[str, int]],
        guests: frozenset[str],
        known: _Known,
        fastest_s: float,
    ) -> None:
        assert guests <= can_share(profiles), "sharing is for modules that can"
        self.whole, self.fixed, self.known, self.fastest_s = tuple(profiles), fixed, known, fastest_s
        self.devices, self.batch, self.limit_bytes, self.top = devices, batch, limit_bytes, top
        backbone, between = backbone_of(profiles), [*passes]
        self.guests: list[Guest] = []
        self.guest_names = guests
        self.profiles = [one for one in profiles if one.name not in guests]
        for place in (0, len(profiles) - 1):
            if profiles[place].name in guests:
                feeds = place < backbone
                own = (between.pop(0) if feeds else between.pop().T) if between else None
                replicas = fixed.get(profiles[place].name, {}).get("replicas", 0)
                self.guests.append(Guest(profile=profiles[place], feeds=feeds, passes=own, fixed=replicas))
        self.passes: Sequence[NDArray[np.bool_]] = between
        self.backbone = self.profiles.index(profiles[backbone])
        self.kept: list[_Kept] = []
        self.seen: set[_Kept] = set()
        self.best_s = np.inf
        self.considered = self.combined = 0

    @property
    def until_s(self) -> float:
        """What a step may take to be kept."""
        near = self.best_s * (1 + NEAR)
        return min(near, -self.kept[0][0]) if len(self.kept) >= self.most else near

    @property
    def most(self) -> int:
        """How many layouts are kept."""
        return self.top if self.best_s <= self.fastest_s else min(FEW, self.top)

    def least_s(self, microbatches: int) -> float:
        """Less than any step of so many microbatches, from sums alone: devices that share all work evenly, and one
        sample on its way through every module. What guests have to do may run where the others idle: with them either
        their work is left out, or all that waits."""
        work_s = through_s = guests_s = 0.0
        for profile in self.profiles:
            samples = self.batch // microbatches
            mean = float(profile.weights.mean()) if profile.weights.size else 1.0
            sums = [(way.shards, way.cuts.whole_fixed_s, mean * way.cuts.whole_sample_s) for way in profile.ways]
            work_s += min(shards * (fixed_s + samples * sample_s) for shards, fixed_s, sample_s in sums)
            through_s += min(fixed_s + sample_s for _, fixed_s, sample_s in sums)
        for guest in self.guests:
            mean = float(guest.profile.weights.mean()) if guest.profile.weights.size else 1.0
            least_s = min(way.shards * mean * float(way.sample_s.sum()) for way in guest.profile.ways)
            guests_s += self.batch // microbatches * least_s
        waiting_s = through_s + (microbatches - 1) * work_s / self.devices
        return max(waiting_s, microbatches * (work_s + guests_s) / self.devices) if self.guests else waiting_s

    def relaxed_s(self, options: Sequence[Options], microbatches: int) -> float:
        """Less than any step with these options: the least slowest stage that the devices allow if nothing else
        mattered, and the best of everything else."""
        ends = np.unique(np.concatenate([one.slowest_s for one in options]))
        low, high = 0, len(ends) - 1
        if self._least_devices(options, ends[high]) > self.devices:
            return float("inf")
        while low < high:
            middle = (low + high) // 2
            enough = self._least_devices(options, ends[middle]) <= self.devices
            low, high = (low, middle) if enough else (middle + 1, high)
        through = sum(float(one.through_s.min()) for one in options)
        return through + (microbatches - 1) * float(ends[low]) + max(float(one.reduce_s.min()) for one in options)

    def _least_devices(self, options: Sequence[Options], slowest_s: float) -> float:
        """Devices that it takes to have no stage slower than this."""
        own = (np.where(one.slowest_s <= slowest_s, one.devices, np.inf).min() for one in options)
        return float(sum(own))

    def look(self, microbatches: int) -> None:
        """Combine the layouts of all modules for one count of microbatches."""
        samples = self.batch // microbatches
        options = [self._options(one, place, microbatches) for place, one in enumerate(self.profiles)]
        self.considered += sum(one.size for one in options)
        sharing = None
        if self.guests and all(one.size for one in options):
            own = self.profiles[self.backbone]
            sharing = Sharing(own, self.guests, microbatches, samples, self.limit_bytes)
            options[self.backbone] = sharing.least(options[self.backbone])
        if not all(one.size for one in options):
            return
        bound_s = self.relaxed_s(options, microbatches)
        for share in LOOKS:  # a narrow look first: what it finds makes the wider ones short
            if bound_s > self.until_s:
                return
            until_s = min(self.until_s, bound_s * (1 + share))
            promising = self._promising(options, microbatches, until_s)
            if promising is not None and sharing is not None:
                promising = self._with_guests(promising, sharing, microbatches, until_s)
            if promising is not None:
                promising = [unbeaten(one, bool(self.passes)) for one in promising]
                self._combine(promising, microbatches, len(promising) - 1, _Chosen())
            if bound_s * (1 + share) >= self.until_s:
                return

    def _options(self, profile: ModuleProfile, place: int, microbatches: int) -> Options:
        """The layouts of a module with devices of its own."""
        key, own = (profile.name, microbatches), self.fixed.get(profile.name, {})
        if key not in self.known.options:
            samples = self.batch // microbatches
            found = options_of(profile, microbatches, samples, self.devices, self.limit_bytes, own)
            self.known.options[key] = obeying(found, own)
        plain = self.known.options[key]
        if place != self.backbone or not self.guests:
            return plain
        return replace(plain, beside=np.zeros((plain.size, len(self.guests)), dtype=np.int64))

    def _with_guests(
        self, options: Sequence[Options], sharing: Sharing, microbatches: int, until_s: float
    ) -> list[Options] | None:
        """With the guests of the backbone's layouts as they are, their memory among it."""
        least, found = options[self.backbone], [*options]
        plain = self._options(self.profiles[self.backbone], self.backbone, microbatches)
        found[self.backbone] = sharing.expanded(_same(plain, least))
        self.considered += found[self.backbone].size
        if not found[self.backbone].size:
            return None
        promising = self._promising(found, microbatches, until_s)
        if promising is None:
            return None
        behind = sum(int(one.stages.max()) for one in promising[self.backbone + 1 :])
        promising[self.backbone] = sharing.fitting(promising[self.backbone], behind)
        return self._promising(promising, microbatches, until_s) if promising[self.backbone].size else None

    def _promising(self, options: Sequence[Options], microbatches: int, until_s: float) -> list[Options] | None:
        """The options that may be part of a step of at most this; None if of some module there are none."""
        left = list(options)
        while True:
            size = sum(one.size for one in left)
            for place, one in enumerate(left):
                others = [other for at, other in enumerate(left) if at != place]
                step_s = _Chosen().all_best(others).step_s(one, microbatches)
                fits = one.devices + sum(int(other.devices.min()) for other in others) <= self.devices
                left[place] = one.only(fits & (step_s <= until_s))
                if not left[place].size:
                    return None
            if sum(one.size for one in left) == size:
                return left

    def _combine(self, options: Sequence[Options], microbatches: int, place: int, chosen: _Chosen) -> None:
        """Every option of module `place`, given what was chosen for the modules behind it."""
        own, before = options[place], options[:place]
        least = sum(int(one.devices.min()) for one in before)
        fits = (own.room >= chosen.stages) & (own.devices + chosen.devices + least <= self.devices)
        if self.passes and chosen.keys:
            fits &= self.passes[place][own.way, chosen.keys[0][0]]
        step_s = chosen.all_best(before).step_s(own, microbatches)
        order = np.argsort(np.where(fits, step_s, np.inf), kind="stable")[: int(fits.sum())]
        for index in order.tolist():
            if step_s[index] > self.until_s:
                break
            more = chosen.with_(own, index)
            if place:
                self._combine(options, microbatches, place - 1, more)
            else:
                self._keep(float(step_s[index]), microbatches, more)

    def _keep(self, step_s: float, microbatches: int, chosen: _Chosen) -> None:
        item = (-step_s, -chosen.devices, -microbatches, chosen.keys)
        self.combined += 1
        if item in self.seen:
            return
        self.seen.add(item)
        self.best_s = min(self.best_s, step_s)
        if len(self.kept) < self.most:
            heapq.heappush(self.kept, item)
        elif item > self.kept[0]:
            heapq.heapreplace(self.kept, item)

    def arrangements(self) -> tuple[Arrangement, ...]:
        """What was kept, the fastest first, of equally fast ones that with fewer devices."""
        found = []
        for minus_s, _, minus_count, keys in sorted(self.kept, reverse=True):
            if -minus_s <= self.best_s * (1 + NEAR):
                found.append(Arrangement(microbatches=-minus_count, modules=self._layouts(keys), step_s=-minus_s))
        return tuple(found)

    def _layouts(self, keys: Sequence[_Key]) -> tuple[ModuleLayout, ...]:
        """Of all modules, in the order of the chain."""
        own = {profile.name: _layout(profile, *key[:3]) for profile, key in zip(self.profiles, keys, strict=True)}
        backbone = own[self.profiles[self.backbone].name]
        for guest, way in zip(self.guests, keys[self.backbone][3], strict=True):
            chosen = guest.profile.ways[way]
            own[guest.profile.name] = ModuleLayout(
                module=guest.profile.name,
                replicas=backbone.replicas * backbone.shards // chosen.shards,
                shards=chosen.shards,
                cuts=(),
                recompute=chosen.recompute,
                shared=True,
            )
        return tuple(own[profile.name] for profile in self.whole)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What the modules at the end of the chain come to."""

    through_s: float = 0.0
    slowest_s: float = 0.0
    reduce_s: float = 0.0
    devices: int = 0
    stages: int = 0
    keys: tuple[_Key, ...] = ()

    def with_(self, options: Options, index: int) -> _Chosen:
        """With one option more, of the module before."""
        return _Chosen(
            self.through_s + float(options.through_s[index]),
            max(self.slowest_s, float(options.slowest_s[index])),
            max(self.reduce_s, float(options.reduce_s[index])),
            self.devices + int(options.devices[index]),
            self.stages + int(options.stages[index]),
            (_key(options, index), *self.keys),
        )

    def all_best(self, others: Sequence[Options]) -> _Chosen:
        """With the best of everything that these modules have."""
        return _Chosen(
            self.through_s + sum(float(one.through_s.min()) for one in others),
            max([self.slowest_s, *(float(one.slowest_s.min()) for one in others)]),
            max([self.reduce_s, *(float(one.reduce_s.min()) for one in others)]),
        )

    def step_s(self, options: Options, microbatches: int) -> Array:
        """The step with each of these options."""
        slowest_s = np.maximum(options.slowest_s, self.slowest_s)
        found: Array = (
            self.through_s
            + options.through_s
            + (microbatches - 1) * slowest_s
            + np.maximum(options.reduce_s, self.reduce_s)
        )
        return found


def _key(options: Options, index: int) -> _Key:
    way, row, replicas = (int(column[index]) for column in (options.way, options.row, options.replicas))
    return way, row, replicas, tuple(options.beside[index].tolist()) if options.beside.shape[1] else ()


def _same(options: Options, chosen: Options) -> Options:
    """The layouts of `options` that are the `chosen` ones, whatever times these have."""

    def numbers(some: Options) -> Ints:
        return (some.way << 48) + (some.row << 32) + some.replicas

    return options.only(np.isin(numbers(options), numbers(chosen)))


def _layout(profile: ModuleProfile, way: int, row: int, replicas: int) -> ModuleLayout:
    own = profile.ways[way]
    return ModuleLayout(
        module=profile.name,
        replicas=replicas,
        shards=own.shards,
        cuts=own.cuts.bounds[row][1:-1],
        recompute=own.recompute,
    )
