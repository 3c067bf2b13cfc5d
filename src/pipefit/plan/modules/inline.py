"""Layouts with the small modules inline with the largest one.

The module before it is on its first lane, the module behind it on its last, with the same shards or a grid with fewer
shards and proportionally more replicas.

Such a layout belongs to a single module whose first and last layer also do the small modules' work. The joined module
is costed like all others (`options.py`): cut where its slowest lane is fastest, by the closed form of `orchestrate`,
with the memory of 1F1B. If samples differ in several modules, the joined module's samples differ by their average. A
module with more replicas gets a fractional share of them; the simulator uses the exact samples.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array, Ints
from pipefit.model.analysis.saved import Recompute
from pipefit.plan.modules.module_budgets import DIVISION_BUDGET
from pipefit.plan.modules.options import LayoutOptions, filter_fixed, options_of
from pipefit.plan.modules.orchestrate import ModuleArrangement, ModuleLayout, OrchestrationResult, backbone_of
from pipefit.plan.modules.profile import ModuleProfile, ModuleVariant


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
    """Return the layouts with the shortest closed-form step whose other modules are all inline with the backbone.

    Every other module must be adjacent to the backbone. The arguments are those of `orchestrate_modules`.

    There are `DIVISION_BUDGET.inline_layouts` by each of three measures: the closed form; the closed form with all
    reductions hidden (the simulator decides how much they are); and the least work on the busiest lane, which an order
    without idle lanes would make the best. The same again for layouts in which all modules have the same shards and
    recomputation: these need least memory at the ends, where the closed form is least accurate.
    """
    free = all(len({variant.recompute for variant in profile.ways}) > 1 for profile in profiles)
    joined = join_modules(profiles, passes, alike=devices > DIVISION_BUDGET.free_inline_devices, free=free)
    count_choices = list(counts) if counts is not None else [n for n in range(1, batch + 1) if batch % n == 0]
    options_by_count = _list_options(joined, count_choices, batch, devices, limit_bytes, fixed or {})
    reduce_s = np.concatenate([np.zeros(0), *(options.reduce_s for _, options in options_by_count)])
    step_s = np.concatenate([np.zeros(0), *itertools.starmap(_step_times_s, options_by_count)]) + reduce_s
    starts = np.cumsum([0, *(options.size for _, options in options_by_count)])
    busy_s = np.concatenate([np.zeros(0), *(count * options.slowest_s for count, options in options_by_count)])
    plain = np.concatenate(
        [np.zeros(0, dtype=np.bool_), *(joined.uniform_variants()[options.way] for _, options in options_by_count)]
    )
    chosen = set[int]()
    for candidates in (np.arange(len(plain)), np.flatnonzero(plain)):
        for seconds in (step_s, step_s - reduce_s):
            fastest = np.argsort(seconds[candidates], kind="stable")[: DIVISION_BUDGET.inline_layouts]
            chosen |= {*candidates[fastest].tolist()}
        chosen |= {*_least_busy(busy_s, candidates, options_by_count)}
    best: list[ModuleArrangement] = []
    for index in sorted(chosen, key=lambda index: (step_s[index], index)):
        batch_index = int(np.searchsorted(starts, index, "right")) - 1
        count, options = options_by_count[batch_index]
        layouts = joined.split_layouts(options, int(index - starts[batch_index]))
        best.append(ModuleArrangement(microbatches=count, modules=layouts, step_s=float(step_s[index])))
    return OrchestrationResult(best=tuple(best), considered=len(step_s), combined=len(best))


def _list_options(
    joined: JoinedModules,
    count_choices: Sequence[int],
    batch: int,
    devices: int,
    limit_bytes: float,
    fixed: Mapping[str, Mapping[str, int]],
) -> list[tuple[int, LayoutOptions]]:
    """Return (microbatches, feasible options), the least bound first, until no count can be fast enough."""
    replicas = {name: module_fixed["replicas"] for name, module_fixed in fixed.items() if "replicas" in module_fixed}
    backbone_fixed = fixed.get(joined.profile.name, {})
    options_by_count: list[tuple[int, LayoutOptions]] = []
    best_s = np.inf
    if not joined.profile.ways:
        return options_by_count
    for bound_s, count in sorted((joined.least_s(count, batch, devices), count) for count in count_choices):
        if bound_s > best_s * (1 + DIVISION_BUDGET.step_slack):
            break
        samples = batch // count
        for replica_fixed in joined.replica_choices(backbone_fixed, replicas):
            options = filter_fixed(
                options_of(joined.profile, count, samples, devices, limit_bytes, replica_fixed), backbone_fixed
            )
            options_by_count.append((count, joined.feasible_options(options, samples, replicas)))
            best_s = min(best_s, float(_step_times_s(*options_by_count[-1]).min(initial=np.inf)))
    return options_by_count


def _step_times_s(microbatches: int, options: LayoutOptions) -> Array:
    """Return the step of every layout without gradient reductions."""
    steps_s: Array = options.through_s + (microbatches - 1) * options.slowest_s
    return steps_s


def _least_busy(seconds: Array, some: Ints, found: Sequence[tuple[int, LayoutOptions]]) -> list[int]:
    """Return the indices among `some` of the smallest `seconds`, `equal_inline_layouts` for each (microbatches,
    replicas, stages, devices)."""
    grids = [
        np.column_stack((np.full(options.size, count), options.replicas, options.stages, options.devices))
        for count, options in found
    ]
    chosen, seen = list[int](), Counter[bytes]()
    grid_rows = np.concatenate([np.zeros((0, 4), dtype=np.int64), *grids])
    for index in some[np.argsort(seconds[some], kind="stable")].tolist():
        seen[grid_rows[index].tobytes()] += 1
        if seen[grid_rows[index].tobytes()] <= DIVISION_BUDGET.equal_inline_layouts:
            chosen.append(index)
            if len(chosen) == DIVISION_BUDGET.inline_layouts:
                break
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedModules:
    """All modules as one."""

    profile: ModuleProfile
    "Profile with the backbone's name and layers."
    modules: tuple[str, ...]
    recompute: tuple[tuple[Recompute, ...], ...]
    "Recomputation of each module, for every variant."
    shards: tuple[tuple[int, ...], ...]
    "Shards of each module, for every variant: they divide those of the backbone."
    profiles: tuple[ModuleProfile, ...]
    "Profile of each single module."

    def least_s(self, microbatches: int, batch: int, devices: int) -> float:
        """Return a lower bound of any step with this count of microbatches, without reductions.

        It is the bound of `orchestrate_modules` for a single module.
        """
        totals, sample_s = self.profile.variant_totals, self.profile.mean_cost * self.profile.variant_totals.sample_s
        through_s = float((totals.fixed_s + sample_s).min())
        work_s = float((totals.shards * (totals.fixed_s + batch // microbatches * sample_s)).min())
        return through_s + (microbatches - 1) * work_s / devices

    def uniform_variants(self) -> NDArray[np.bool_]:
        """Return, for every variant, whether all modules have the same shards and recomputation."""
        choices = zip(self.recompute, self.shards, strict=True)
        return np.array([len({*again}) == len({*shards}) == 1 for again, shards in choices], dtype=np.bool_)

    def replica_choices(self, given: Mapping[str, int], replicas: Mapping[str, int]) -> list[dict[str, int]]:
        """Return `given` with each count of the backbone's replicas that agrees with the fixed `replicas` of the other
        modules.

        Without fixed ones it is a single entry without a count.
        """
        fixed_others = [
            (self.modules.index(name), count) for name, count in replicas.items() if name != self.profile.name
        ]
        if "replicas" in given or not fixed_others:
            return [dict(given)]
        index, count = fixed_others[0]
        backbone_replicas = {
            count * module_shards[index] // variant.shards
            for variant, module_shards in zip(self.profile.ways, self.shards, strict=True)
        }
        return [{**given, "replicas": backbone_count} for backbone_count in sorted(backbone_replicas - {0})]

    def feasible_options(self, options: LayoutOptions, samples: int, replicas: Mapping[str, int]) -> LayoutOptions:
        """Return the options in which each replica of a module has a sample of a microbatch and the fixed replicas are
        obeyed.

        A module that divides images needs an image, not a sample, for each replica.
        """
        quotients = np.array([variant.shards for variant in self.profile.ways])[:, None] // np.array(self.shards)
        counts = options.replicas[:, None] * quotients[options.way]
        limits = [profile.most_replicas(samples, profile.name in replicas) for profile in self.profiles]
        fits = (counts <= np.array(limits)).all(axis=1)
        for name, count in replicas.items():
            fits &= counts[:, self.modules.index(name)] == count
        return options.select_rows(fits)

    def split_layouts(self, options: LayoutOptions, index: int) -> tuple[ModuleLayout, ...]:
        """Return the layout of each module."""
        number = int(options.way[index])
        variant, replicas = self.profile.ways[number], int(options.replicas[index])
        return tuple(
            ModuleLayout(
                module=name,
                replicas=replicas * variant.shards // shards,
                shards=shards,
                cuts=variant.stage_cuts.bounds[options.row[index]][1:-1] if name == self.profile.name else (),
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
    """Return all modules as one: a variant for every combination whose shards divide the backbone's.

    With `alike`, all modules but the backbone have the same shards, and with `free` also the same recomputation.
    `passes` as in `orchestrate_modules`.
    """
    backbone_index = backbone_of(profiles)
    backbone = profiles[backbone_index]
    variants, recompute, shards, chosen = [], [], [], (0,) * len(profiles)
    for indices in itertools.product(*(range(len(profile.ways)) for profile in profiles)):
        chosen_variants = [profile.ways[index] for profile, index in zip(profiles, indices, strict=True)]
        goes = all(
            table[giver, taker] for table, (giver, taker) in zip(passes, itertools.pairwise(indices), strict=False)
        )
        other_choices = {
            (variant.recompute if free else "none", variant.shards)
            for module_index, variant in enumerate(chosen_variants)
            if module_index != backbone_index
        }
        if (
            goes
            and not any(chosen_variants[backbone_index].shards % variant.shards for variant in chosen_variants)
            and not (alike and len(other_choices) > 1)
        ):
            variants.append(_join_variant(chosen_variants, backbone_index, backbone.overhead_s))
            recompute.append(tuple(variant.recompute for variant in chosen_variants))
            shards.append(tuple(variant.shards for variant in chosen_variants))
            chosen = indices
    profile = replace(backbone, ways=tuple(variants), weights=_mean_weights(profiles, chosen))
    return JoinedModules(
        profile=profile,
        modules=tuple(profile.name for profile in profiles),
        recompute=tuple(recompute),
        shards=tuple(shards),
        profiles=tuple(profiles),
    )


def _join_variant(own: Sequence[ModuleVariant], place: int, overhead_s: float) -> ModuleVariant:
    """Return the backbone's variant with the modules before it in its first layer, and those behind it in its last.

    A module with fewer shards has proportionally more replicas. Its time per sample of the backbone and its part of the
    optimizer state are divided by that factor.
    """
    shards = own[place].shards

    def lump_layers(name: str, over: np.ufunc = np.add, more: float = 0.0, divided: bool = False) -> Array:
        layers = np.array(getattr(own[place], name), dtype=np.float64)
        for module_index, variant in enumerate(own):
            if module_index != place:
                end = 0 if module_index < place else -1
                part = variant.shards / shards if divided else 1.0
                layers[end] = over(layers[end], over.reduce(getattr(variant, name)) * part + more)
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
    """[sampled batch, sample]: mean cost of the samples over the modules, weighted by their time for an average
    sample."""
    seconds = [float(profile.ways[variant].sample_s.sum()) for profile, variant in zip(profiles, ways, strict=True)]
    ragged = [profile.weights.shape for profile in profiles if profile.weights.size]
    total_s = fsum(seconds)
    if not ragged or not total_s:
        return np.ones((1, 0))
    weights: Array = np.zeros(ragged[0])
    for profile, own_s in zip(profiles, seconds, strict=True):
        weights = weights + own_s / total_s * (profile.weights if profile.weights.size else 1.0)
    return weights
