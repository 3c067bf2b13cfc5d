"""Division of a cluster's devices among the modules of a model: the layouts with the shortest closed-form step.

The problem follows DistTrain (arXiv 2408.04275, section 5): for every module shards, replicas and stages, and one
count of microbatches, on disjoint devices, within memory. A step of K microbatches takes

    sum of the times through the modules + (K - 1) x the slowest stage of all + the longest gradient reduction.

DistTrain relaxes counts to real numbers and solves a convex program. Here all integer layouts are searched, by bounds:
a layout of one module is dropped if the step is too long even with the best layout of every other module, or if too few
devices remain for them. Later stages increase the microbatches in flight in earlier ones, so layouts are combined from
the end of the chain backwards.

A module at an end of the chain, next to the module with the most work, may share its devices (`sharing.py`): the two
then count as one more module, with a time through it and a slowest stage. Every choice of modules that share has its
own short list, so the simulator sees the best of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipefit.model.analysis.saved import Recompute
from pipefit.plan.modules.device_division import DivisionProblem, DivisionSearch, Kept, OptionCache
from pipefit.plan.modules.module_budgets import DIVISION_BUDGET
from pipefit.plan.modules.profile import ModuleProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLayout:
    """The layout of one module over its devices."""

    module: str
    replicas: int
    shards: int
    cuts: tuple[int, ...]
    "First layer of every stage but the first."
    recompute: Recompute
    shared: bool = False
    """True if it is complete on every lane of the backbone, whose devices it shares; replicas and shards are those of a
    lane."""
    multiple: int = 1
    "Number of microbatches processed together, if it shares."
    inline: bool = False
    "True if it is on the backbone's first or last lane only; replicas and shards are those of that lane."

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
        """Names of the modules that share the devices of another, on every lane."""
        return frozenset(module.module for module in self.modules if module.shared)

    @property
    def inline_names(self) -> tuple[str, ...]:
        """Names of the modules inline with another, on its first and last lane."""
        return tuple(module.module for module in self.modules if module.inline)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestrationResult:
    """Result of the search."""

    best: tuple[ModuleArrangement, ...]
    "The fastest first, close to the first one; empty: nothing fits."
    considered: int
    "Number of layouts of single modules that were compared."
    combined: int
    "Number of layouts of all modules whose step was computed."


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
    """Return the layouts with the shortest closed-form step, for modules in the order of the chain.

    There are `top` layouts for each choice of modules that share the devices of the module with the most work, or fewer
    if another choice is faster. Exact: the first one of every choice is its optimum.

    `counts`: the numbers of microbatches to consider, by default all that divide the batch. `passes[i]` [variant of
    module i, variant of the next one]: whether they are compatible; empty: all are. `fixed`: by name of a module, its
    fixed `replicas`, `stages`, `devices` or `multiple`. `sharing`: the choices, each the names of modules that
    `can_share`.
    """
    count_choices = (
        list(counts) if counts is not None else [count for count in range(1, batch + 1) if batch % count == 0]
    )
    known, backbone = OptionCache(), backbone_of(profiles)
    best: list[ModuleArrangement] = []
    considered = combined = 0
    for guests in sorted(sharing, key=len, reverse=True):
        assert guests <= can_share(profiles), "sharing is for modules that can"
        modules = DivisionProblem(profiles, backbone, devices, batch, limit_bytes, passes, fixed or {}, guests)
        fastest_s = min((layout.step_s for layout in best), default=math.inf)
        search = DivisionSearch(modules, known, top, min(DIVISION_BUDGET.slower_sharing_layouts, top), fastest_s)
        search.run(count_choices)
        if search.cut_short:  # it became the fastest after some layouts had been dropped
            search = DivisionSearch(modules, known, top, top, fastest_s)
            search.run(count_choices)
        best += [_build_arrangement(modules, layout) for layout in search.kept_layouts()]
        considered += search.considered
        combined += search.combined
    considered += sum(layout.size for layout in known.options.values())
    best.sort(key=lambda layout: layout.step_s)
    return OrchestrationResult(best=tuple(best), considered=considered, combined=combined)


def backbone_of(profiles: Sequence[ModuleProfile]) -> int:
    """Return the index of the module with the most work, whose devices others may share."""
    work = [
        min(variant.shards * float((variant.fixed_s + variant.sample_s).sum()) for variant in profile.ways)
        for profile in profiles
    ]
    return int(np.argmax(work))


def can_share(profiles: Sequence[ModuleProfile]) -> frozenset[str]:
    """Return the modules that may share the backbone's devices: the first and the last one, if adjacent to it."""
    backbone, last = backbone_of(profiles), len(profiles) - 1
    return frozenset(profiles[index].name for index in {0, last} if index != backbone and abs(index - backbone) == 1)


def _build_arrangement(modules: DivisionProblem, kept: Kept) -> ModuleArrangement:
    """Return an entry of the search as layouts of all modules in the order of the chain."""
    minus_s, _, minus_count, keys = kept
    layouts = {profile.name: _build_layout(profile, *key[:3]) for profile, key in zip(modules.own, keys, strict=True)}
    backbone = layouts[modules.own[modules.backbone].name]
    for guest, variant in zip(modules.guests, keys[modules.backbone][3], strict=True):
        chosen = guest.profile.ways[variant]
        layouts[guest.profile.name] = ModuleLayout(
            module=guest.profile.name,
            replicas=backbone.replicas * backbone.shards // chosen.shards,
            shards=chosen.shards,
            cuts=(),
            recompute=chosen.recompute,
            shared=True,
            multiple=guest.multiple,
        )
    return ModuleArrangement(
        microbatches=-minus_count, modules=tuple(layouts[profile.name] for profile in modules.whole), step_s=-minus_s
    )


def _build_layout(profile: ModuleProfile, way: int, row: int, replicas: int) -> ModuleLayout:
    variant = profile.ways[way]
    return ModuleLayout(
        module=profile.name,
        replicas=replicas,
        shards=variant.shards,
        cuts=variant.stage_cuts.bounds[row][1:-1],
        recompute=variant.recompute,
    )
