"""Layouts with the small modules in line with the largest one: the one before it on its first lane, the one behind it
on its last, in its shards or in a grid of their own with fewer of them and as many times more replicas.

Such a layout is one of a single module, whose first and last layer do the small modules' work as well. So that one is
made, and costed as all are (`options.py`): cut where its slowest lane is fastest, by the closed form of `orchestrate`,
its memory filled as 1F1B fills it. Where samples differ in several modules, the joined module's samples differ as they
do on average, and a module with more replicas gets its part of them to a fraction; the simulator knows each.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array
from pipefit.cost.work import Recompute
from pipefit.plan.bounds.step_bounds import Ints
from pipefit.plan.modules.options import LayoutOptions, filter_fixed, options_of
from pipefit.plan.modules.orchestrate import NEAR, ModuleArrangement, ModuleLayout, OrchestrationResult, backbone_of
from pipefit.plan.modules.profile import ModuleProfile, ModuleVariant

SHORT = 16
"""Layouts that are handed on: the best by the closed form; the best if all reductions were hidden, which the simulator
knows how far they are; and those whose busiest lane has least to do, which an order without idle lanes would make the
best, ALIKE of them at most with the same grid and stages of the backbone. The same again of those that are monolithic:
what all modules have alike needs least memory at the ends, where the closed form is least sure of it."""

ALIKE = 2

EVERY = 64
"""Devices up to which every module is free in its shards and in what it recomputes; with more, those beside the
backbone are alike, in what they recompute as far as all modules have the choice."""


def inline_layouts(
    profiles: Sequence[ModuleProfile],
    devices: int,
    batch: int,
    limit_bytes: float,
    *,
    counts: Iterable[int] | None = None,
    passes: Sequence[NDArray[np.bool_]] = (),
    fixed: Mapping[str, Mapping[str, int]] | None = None,
) -> OrchestrationResult:
    """The layouts with the least closed-form step that have all other modules in line with the backbone, which stands
    beside each of them: SHORT by each measure. Arguments as those of `orchestrate`."""
    free = all(len({way.recompute for way in one.ways}) > 1 for one in profiles)
    whole = join_modules(profiles, passes, alike=devices > EVERY, free=free)
    replicas = {name: own["replicas"] for name, own in (fixed or {}).items() if "replicas" in own}
    given = (fixed or {}).get(whole.profile.name, {})
    each = list(counts) if counts is not None else [count for count in range(1, batch + 1) if batch % count == 0]
    if not whole.profile.ways:
        each = []
    found: list[tuple[int, LayoutOptions]] = []
    best_s = np.inf
    for bound_s, count in sorted((whole.least_s(count, batch, devices), count) for count in each):
        if bound_s > best_s * (1 + NEAR):
            break
        samples = batch // count
        for own in whole.replica_choices(given, replicas):
            options = filter_fixed(options_of(whole.profile, count, samples, devices, limit_bytes, own), given)
            found.append((count, whole.feasible_options(options, samples, replicas)))
            best_s = min(best_s, float(_step_times_s(*found[-1]).min(initial=np.inf)))
    reduce_s = np.concatenate([np.zeros(0), *(one.reduce_s for _, one in found)])
    step_s = np.concatenate([np.zeros(0), *itertools.starmap(_step_times_s, found)]) + reduce_s
    starts = np.cumsum([0, *(one.size for _, one in found)])
    busy_s = np.concatenate([np.zeros(0), *(count * one.slowest_s for count, one in found)])
    plain = np.concatenate([np.zeros(0, dtype=np.bool_), *(whole.uniform_variants()[one.way] for _, one in found)])
    chosen = set[int]()
    for some in (np.arange(len(plain)), np.flatnonzero(plain)):
        for seconds in (step_s, step_s - reduce_s):
            chosen |= {*some[np.argsort(seconds[some], kind="stable")[:SHORT]].tolist()}
        chosen |= {*_least_busy(busy_s, some, found)}
    best: list[ModuleArrangement] = []
    for index in sorted(chosen, key=lambda index: (step_s[index], index)):
        at = int(np.searchsorted(starts, index, "right")) - 1
        count, options = found[at]
        layouts = whole.split_layouts(options, int(index - starts[at]))
        best.append(ModuleArrangement(microbatches=count, modules=layouts, step_s=float(step_s[index])))
    return OrchestrationResult(best=tuple(best), considered=len(step_s), combined=len(best))


def _step_times_s(microbatches: int, options: LayoutOptions) -> Array:
    """The step of every layout, but for adding up gradients."""
    found: Array = options.through_s + (microbatches - 1) * options.slowest_s
    return found


def _least_busy(seconds: Array, some: Ints, found: Sequence[tuple[int, LayoutOptions]]) -> list[int]:
    """Where of `some` the SHORT least are, ALIKE of each (microbatches, replicas, stages, devices)."""
    grids = [np.column_stack((np.full(one.size, count), one.replicas, one.stages, one.devices)) for count, one in found]
    chosen, seen = list[int](), Counter[bytes]()
    whole = np.concatenate([np.zeros((0, 4), dtype=np.int64), *grids])
    for index in some[np.argsort(seconds[some], kind="stable")].tolist():
        seen[whole[index].tobytes()] += 1
        if seen[whole[index].tobytes()] <= ALIKE:
            chosen.append(index)
            if len(chosen) == SHORT:
                break
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedModules:
    """All modules as one."""

    profile: ModuleProfile
    "With the backbone's name and layers."
    modules: tuple[str, ...]
    recompute: tuple[tuple[Recompute, ...], ...]
    "Of every way, what each module recomputes."
    shards: tuple[tuple[int, ...], ...]
    "Of every way, the shards of each module: they divide those of the backbone."
    profiles: tuple[ModuleProfile, ...]
    "Of each module by itself."

    def least_s(self, microbatches: int, batch: int, devices: int) -> float:
        """Less than any step of so many microbatches, reductions apart: as `orchestrate` has it, of one module."""
        whole, sample_s = self.profile.variant_totals, self.profile.mean_cost * self.profile.variant_totals.sample_s
        through_s = float((whole.fixed_s + sample_s).min())
        work_s = float((whole.shards * (whole.fixed_s + batch // microbatches * sample_s)).min())
        return through_s + (microbatches - 1) * work_s / devices

    def uniform_variants(self) -> NDArray[np.bool_]:
        """Of every way, whether all modules have the same shards and recompute the same."""
        each = zip(self.recompute, self.shards, strict=True)
        return np.array([len({*again}) == len({*shards}) == 1 for again, shards in each], dtype=np.bool_)

    def replica_choices(self, given: Mapping[str, int], replicas: Mapping[str, int]) -> list[dict[str, int]]:
        """`given` of the backbone, with each count of its replicas that lets the modules have theirs, where those are
        fixed: in one entry without a count where none is."""
        others = [(self.modules.index(name), count) for name, count in replicas.items() if name != self.profile.name]
        if "replicas" in given or not others:
            return [dict(given)]
        place, count = others[0]
        found = {count * own[place] // way.shards for way, own in zip(self.profile.ways, self.shards, strict=True)}
        return [{**given, "replicas": own} for own in sorted(found - {0})]

    def feasible_options(self, options: LayoutOptions, samples: int, replicas: Mapping[str, int]) -> LayoutOptions:
        """Those in which each replica of a module has a sample of a microbatch, or an image where it divides those, and
        that have what is fixed."""
        each = np.array([way.shards for way in self.profile.ways])[:, None] // np.array(self.shards)
        counts = options.replicas[:, None] * each[options.way]
        most = [profile.most_replicas(samples, profile.name in replicas) for profile in self.profiles]
        fits = (counts <= np.array(most)).all(axis=1)
        for name, count in replicas.items():
            fits &= counts[:, self.modules.index(name)] == count
        return options.select_rows(fits)

    def split_layouts(self, options: LayoutOptions, index: int) -> tuple[ModuleLayout, ...]:
        """What a layout is for each of the modules."""
        number = int(options.way[index])
        way, replicas = self.profile.ways[number], int(options.replicas[index])
        return tuple(
            ModuleLayout(
                module=name,
                replicas=replicas * way.shards // shards,
                shards=shards,
                cuts=way.stage_cuts.bounds[options.row[index]][1:-1] if name == self.profile.name else (),
                recompute=recompute,
                inline=name != self.profile.name,
            )
            for name, recompute, shards in zip(self.modules, self.recompute[number], self.shards[number], strict=True)
        )


def join_modules(
    profiles: Sequence[ModuleProfile],
    passes: Sequence[NDArray[np.bool_]] = (),
    alike: bool = False,
    free: bool = True,
) -> JoinedModules:
    """All modules as one: a way for every way of each of them whose shards divide the backbone's; where they have to
    be `uniform_variants`, of those with others than the backbone that differ in shards none, or where these are `free`
    in that, in what they recompute. `passes` as in `orchestrate`."""
    place = backbone_of(profiles)
    backbone = profiles[place]
    ways, recompute, shards, chosen = [], [], [], (0,) * len(profiles)
    for each in itertools.product(*(range(len(profile.ways)) for profile in profiles)):
        own = [profile.ways[index] for profile, index in zip(profiles, each, strict=True)]
        goes = all(table[one, two] for table, (one, two) in zip(passes, itertools.pairwise(each), strict=False))
        others = {(way.recompute if free else "none", way.shards) for at, way in enumerate(own) if at != place}
        if goes and not any(own[place].shards % way.shards for way in own) and not (alike and len(others) > 1):
            ways.append(_join_variant(own, place, backbone.overhead_s))
            recompute.append(tuple(way.recompute for way in own))
            shards.append(tuple(way.shards for way in own))
            chosen = each
    profile = replace(backbone, ways=tuple(ways), weights=_mean_weights(profiles, chosen))
    return JoinedModules(
        profile=profile,
        modules=tuple(one.name for one in profiles),
        recompute=tuple(recompute),
        shards=tuple(shards),
        profiles=tuple(profiles),
    )


def _join_variant(own: Sequence[ModuleVariant], place: int, overhead_s: float) -> ModuleVariant:
    """The backbone's way with what lies before it in its first layer, and what lies behind it in its last. A module
    with fewer shards has so many times more replicas: a sample of the backbone's is a part of one for each of them, and
    so is what they hold of the optimizer state."""
    shards = own[place].shards

    def lump_layers(name: str, over: np.ufunc = np.add, more: float = 0.0, divided: bool = False) -> Array:
        layers = np.array(getattr(own[place], name), dtype=np.float64)
        for at, way in enumerate(own):
            if at != place:
                end = 0 if at < place else -1
                part = way.shards / shards if divided else 1.0
                layers[end] = over(layers[end], over.reduce(getattr(way, name)) * part + more)
        return layers

    return ModuleVariant(
        shards=shards,
        recompute=own[place].recompute,
        fixed_s=lump_layers("fixed_s", more=overhead_s),
        sample_s=lump_layers("sample_s", divided=True),
        static_bytes=lump_layers("static_bytes"),
        state_bytes=lump_layers("state_bytes", divided=True),
        saved_bytes=lump_layers("saved_bytes", divided=True),
        passing_bytes=lump_layers("passing_bytes", np.maximum, divided=True),
        gradient_bytes=lump_layers("gradient_bytes"),
    )


def _mean_weights(profiles: Sequence[ModuleProfile], ways: Sequence[int]) -> Array:
    """[sampled batch, sample]: the mean of what samples cost in the modules, by their time for an average one."""
    seconds = [float(profile.ways[way].sample_s.sum()) for profile, way in zip(profiles, ways, strict=True)]
    ragged = [profile.weights.shape for profile in profiles if profile.weights.size]
    if not ragged or not sum(seconds):
        return np.ones((1, 0))
    found: Array = np.zeros(ragged[0])
    for profile, own_s in zip(profiles, seconds, strict=True):
        found = found + own_s / sum(seconds) * (profile.weights if profile.weights.size else 1.0)
    return found
