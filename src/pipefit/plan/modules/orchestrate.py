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

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.work import Recompute
from pipefit.plan.modules.device_division import NEAR as NEAR
from pipefit.plan.modules.device_division import DivisionProblem, DivisionSearch, Kept, OptionCache
from pipefit.plan.modules.profile import ModuleProfile

FEW = 12
"""Layouts on the short list of a choice of who shares that is slower than another one."""


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
    multiple: int = 1
    "The microbatches that it takes together, if it shares."
    inline: bool = False
    "Whether it lies on that module's first or last lane alone; replicas and shards are those there."

    @property
    def stage_count(self) -> int:
        return len(self.cuts) + 1

    @property
    def device_count(self) -> int:
        return self.replicas * self.shards * self.stage_count


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleArrangement:
    """A layout for every module, in the order of the chain."""

    microbatches: int
    modules: tuple[ModuleLayout, ...]
    step_s: float
    "By the closed form."

    @property
    def device_count(self) -> int:
        return sum(module.device_count for module in self.modules if not module.shared and not module.inline)

    @property
    def guest_names(self) -> frozenset[str]:
        """The modules that share the devices of another, lane by lane."""
        return frozenset(module.module for module in self.modules if module.shared)

    @property
    def inline_names(self) -> tuple[str, ...]:
        """The modules in line with another, on its first and last lane."""
        return tuple(module.module for module in self.modules if module.inline)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestrationResult:
    """What the search found."""

    best: tuple[ModuleArrangement, ...]
    "The fastest first, within NEAR of the first one; empty: nothing fits."
    considered: int
    "Layouts of single modules that were compared."
    combined: int
    "Layouts of all modules whose step was worked out."


def orchestrate_modules(
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
) -> OrchestrationResult:
    """The layouts with the least closed-form step, for modules in the order of the chain: the `top` ones of a choice of
    modules that share the devices of the one with most work, FEW where another choice is faster. Exact: the first one
    of every choice is its optimum.

    `counts`: the numbers of microbatches to consider, by default all that divide the batch. `passes[i]` [way of module
    i, way of the next one]: whether they go together; none: all do. `fixed`: of modules by name, the `replicas`,
    `stage_count` or `device_count` that are given, and the `multiple` of those that share. `sharing`: the choices,
    each the names of modules that `can_share`.
    """
    each = list(counts) if counts is not None else [count for count in range(1, batch + 1) if batch % count == 0]
    known, backbone = OptionCache(), backbone_of(profiles)
    best: list[ModuleArrangement] = []
    considered = combined = 0
    for guests in sorted(sharing, key=len, reverse=True):
        assert guests <= can_share(profiles), "sharing is for modules that can"
        modules = DivisionProblem(profiles, backbone, devices, batch, limit_bytes, passes, fixed or {}, guests)
        fastest_s = min((one.step_s for one in best), default=math.inf)
        search = DivisionSearch(modules, known, top, min(FEW, top), fastest_s)
        search.run(each)
        if search.cut_short:  # it became the fastest when some layouts had been given up
            search = DivisionSearch(modules, known, top, top, fastest_s)
            search.run(each)
        best += [_build_arrangement(modules, one) for one in search.kept_layouts()]
        considered += search.considered
        combined += search.combined
    considered += sum(one.size for one in known.options.values())
    best.sort(key=lambda one: one.step_s)
    return OrchestrationResult(best=tuple(best), considered=considered, combined=combined)


def backbone_of(profiles: Sequence[ModuleProfile]) -> int:
    """The module with most work, whose devices others may share."""
    work = [min(way.shards * float((way.fixed_s + way.sample_s).sum()) for way in profile.ways) for profile in profiles]
    return int(np.argmax(work))


def can_share(profiles: Sequence[ModuleProfile]) -> frozenset[str]:
    """The modules that may share the backbone's devices: the first and the last one, where they stand next to it."""
    backbone, last = backbone_of(profiles), len(profiles) - 1
    return frozenset(profiles[one].name for one in {0, last} if one != backbone and abs(one - backbone) == 1)


def _build_arrangement(modules: DivisionProblem, kept: Kept) -> ModuleArrangement:
    """What the search kept, of all modules in the order of the chain."""
    minus_s, _, minus_count, keys = kept
    own = {profile.name: _build_layout(profile, *key[:3]) for profile, key in zip(modules.own, keys, strict=True)}
    backbone = own[modules.own[modules.backbone].name]
    for guest, way in zip(modules.guests, keys[modules.backbone][3], strict=True):
        chosen = guest.profile.ways[way]
        own[guest.profile.name] = ModuleLayout(
            module=guest.profile.name,
            replicas=backbone.replicas * backbone.shards // chosen.shards,
            shards=chosen.shards,
            cuts=(),
            recompute=chosen.recompute,
            shared=True,
            multiple=guest.multiple,
        )
    return ModuleArrangement(
        microbatches=-minus_count, modules=tuple(own[profile.name] for profile in modules.whole), step_s=-minus_s
    )


def _build_layout(profile: ModuleProfile, way: int, row: int, replicas: int) -> ModuleLayout:
    own = profile.ways[way]
    return ModuleLayout(
        module=profile.name,
        replicas=replicas,
        shards=own.shards,
        cuts=own.stage_cuts.bounds[row][1:-1],
        recompute=own.recompute,
    )
