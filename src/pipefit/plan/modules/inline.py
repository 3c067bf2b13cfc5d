"""Layouts with the small modules in line with the largest one: the one before it on its first lane, the one behind it
on its last, in its replicas and shards.

Such a layout is one of a single module, whose first and last layer do the small modules' work as well. So that one is
made, and costed as all are (`options.py`): cut where its slowest lane is fastest, by the closed form of `orchestrate`,
its memory filled as 1F1B fills it. Where samples differ in several modules, the joined module's samples differ as they
do on average; the simulator knows each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array
from pipefit.cost.work import Recompute
from pipefit.plan.modules.options import Options, obeying, options_of
from pipefit.plan.modules.orchestrate import NEAR, Arrangement, ModuleLayout, Orchestration, backbone_of
from pipefit.plan.modules.profile import ModuleProfile, Way

SHORT = 16
"""Layouts that are handed on: the best by the closed form, and the best if all reductions were hidden, which the
simulator knows how far they are."""

EVERY = 128
"""Devices up to which every module is free in what it recomputes; with more, those beside the backbone are alike."""


def inline_layouts(
    profiles: Sequence[ModuleProfile],
    devices: int,
    batch: int,
    limit_bytes: float,
    *,
    counts: Iterable[int] | None = None,
    passes: Sequence[NDArray[np.bool_]] = (),
    fixed: Mapping[str, Mapping[str, int]] | None = None,
) -> Orchestration:
    """The layouts with the least closed-form step that have all other modules in line with the backbone, which stands
    beside each of them, SHORT with what reductions take and SHORT without. Arguments as those of `orchestrate`."""
    free = all(len({way.recompute for way in one.ways}) > 1 for one in profiles)
    fixed, whole = fixed or {}, joined(profiles, passes, alike=free and devices > EVERY)
    replicas = {own["replicas"] for own in fixed.values() if "replicas" in own}
    given = {**fixed.get(whole.profile.name, {}), **({"replicas": max(replicas)} if replicas else {})}
    each = list(counts) if counts is not None else [count for count in range(1, batch + 1) if batch % count == 0]
    if not whole.profile.ways or len(replicas) > 1:
        each = []
    found: list[tuple[int, Options]] = []
    best_s = np.inf
    for bound_s, count in sorted((whole.least_s(count, batch, devices), count) for count in each):
        if bound_s > best_s * (1 + NEAR):
            break
        options = options_of(whole.profile, count, batch // count, devices, limit_bytes, given)
        found.append((count, obeying(options, given)))
        best_s = min(best_s, float(_waits_s(*found[-1]).min(initial=np.inf)))
    reduce_s = np.concatenate([np.zeros(0), *(one.reduce_s for _, one in found)])
    step_s = np.concatenate([np.zeros(0), *itertools.starmap(_waits_s, found)]) + reduce_s
    starts = np.cumsum([0, *(one.size for _, one in found)])
    best: list[Arrangement] = []
    for index in sorted({*_least(step_s), *_least(step_s - reduce_s)}, key=lambda index: (step_s[index], index)):
        at = int(np.searchsorted(starts, index, "right")) - 1
        count, options = found[at]
        layouts = whole.apart(options, int(index - starts[at]))
        best.append(Arrangement(microbatches=count, modules=layouts, step_s=float(step_s[index])))
    return Orchestration(best=tuple(best), considered=len(step_s), combined=len(best))


def _waits_s(microbatches: int, options: Options) -> Array:
    """The step of every layout, but for adding up gradients."""
    found: Array = options.through_s + (microbatches - 1) * options.slowest_s
    return found


def _least(seconds: Array) -> list[int]:
    """Where the SHORT least are."""
    found: list[int] = np.argsort(seconds, kind="stable")[:SHORT].tolist()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """All modules as one."""

    profile: ModuleProfile
    "With the backbone's name and layers."
    modules: tuple[str, ...]
    recompute: tuple[tuple[Recompute, ...], ...]
    "Of every way, what each module recomputes."

    def least_s(self, microbatches: int, batch: int, devices: int) -> float:
        """Less than any step of so many microbatches, reductions apart: as `orchestrate` has it, of one module."""
        samples, ways = batch // microbatches, self.profile.ways
        mean = float(self.profile.weights.mean()) if self.profile.weights.size else 1.0
        sums = [(way.shards, float(way.fixed_s.sum()), mean * float(way.sample_s.sum())) for way in ways]
        through_s = min(fixed_s + sample_s for _, fixed_s, sample_s in sums)
        work_s = min(shards * (fixed_s + samples * sample_s) for shards, fixed_s, sample_s in sums)
        return through_s + (microbatches - 1) * work_s / devices

    def apart(self, options: Options, index: int) -> tuple[ModuleLayout, ...]:
        """What a layout is for each of the modules."""
        number = int(options.way[index])
        way, replicas = self.profile.ways[number], int(options.replicas[index])
        return tuple(
            ModuleLayout(
                module=name,
                replicas=replicas,
                shards=way.shards,
                cuts=way.cuts.bounds[options.row[index]][1:-1] if name == self.profile.name else (),
                recompute=recompute,
                inline=name != self.profile.name,
            )
            for name, recompute in zip(self.modules, self.recompute[number], strict=True)
        )


def joined(profiles: Sequence[ModuleProfile], passes: Sequence[NDArray[np.bool_]] = (), alike: bool = False) -> Joined:
    """All modules as one: a way for every way of each of them with equally many shards; where they may be `alike`, of
    those with others than the backbone that recompute differently none. `passes` as in `orchestrate`."""
    place = backbone_of(profiles)
    backbone = profiles[place]
    ways, recompute, chosen = [], [], (0,) * len(profiles)
    for each in itertools.product(*(range(len(profile.ways)) for profile in profiles)):
        own = [profile.ways[index] for profile, index in zip(profiles, each, strict=True)]
        goes = all(table[one, two] for table, (one, two) in zip(passes, itertools.pairwise(each), strict=False))
        again = {way.recompute for at, way in enumerate(own) if at != place}
        if goes and len({way.shards for way in own}) == 1 and not (alike and len(again) > 1):
            ways.append(_way(own, place, backbone.overhead_s))
            recompute.append(tuple(way.recompute for way in own))
            chosen = each
    profile = replace(backbone, ways=tuple(ways), weights=_weights(profiles, chosen))
    return Joined(profile=profile, modules=tuple(one.name for one in profiles), recompute=tuple(recompute))


def _way(own: Sequence[Way], place: int, overhead_s: float) -> Way:
    """The backbone's way with what lies before it in its first layer, and what lies behind it in its last."""

    def lumped(name: str, over: np.ufunc = np.add, more: float = 0.0) -> Array:
        layers = np.array(getattr(own[place], name), dtype=np.float64)
        for at, way in enumerate(own):
            if at != place:
                end = 0 if at < place else -1
                layers[end] = over(layers[end], over.reduce(getattr(way, name)) + more)
        return layers

    return Way(
        shards=own[place].shards,
        recompute=own[place].recompute,
        fixed_s=lumped("fixed_s", more=overhead_s),
        sample_s=lumped("sample_s"),
        static_bytes=lumped("static_bytes"),
        state_bytes=lumped("state_bytes"),
        saved_bytes=lumped("saved_bytes"),
        passing_bytes=lumped("passing_bytes", np.maximum),
        gradient_bytes=lumped("gradient_bytes"),
    )


def _weights(profiles: Sequence[ModuleProfile], ways: Sequence[int]) -> Array:
    """[sampled batch, sample]: the mean of what samples cost in the modules, by their time for an average one."""
    seconds = [float(profile.ways[way].sample_s.sum()) for profile, way in zip(profiles, ways, strict=True)]
    ragged = [profile.weights.shape for profile in profiles if profile.weights.size]
    if not ragged or not sum(seconds):
        return np.ones((1, 0))
    found: Array = np.zeros(ragged[0])
    for profile, own_s in zip(profiles, seconds, strict=True):
        found = found + own_s / sum(seconds) * (profile.weights if profile.weights.size else 1.0)
    return found
