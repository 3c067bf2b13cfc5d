"""Layouts next to a good one: a stage's end one layer on, another module recomputed, a grid in line one step finer, a
module on shared devices with twice or half as many microbatches together, replicas that divide images or samples, and
the optimizer state split or not.

The short list is made by a closed form that knows neither the order of actions nor what exactly a device holds at its
fullest. So the best layouts are changed a little, one thing at a time, as long as the simulator finds them faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.modules.costing import CostedModule
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.module_decisions import MultiModuleConfig

ROUNDS = 8

PAIRS = 1024
"""Of devices up to which images are divided: in some step any two may meet, and NCCL has a communicator for each."""


def polish_plan(start: EvaluatedPlan, around: Callable[[EvaluatedPlan], Sequence[EvaluatedPlan]]) -> EvaluatedPlan:
    """The best that is reached from `start` by going to the fastest of what is `around` while that is faster."""
    best = start
    for _ in range(ROUNDS):
        faster = min(around(best), key=lambda one: one.rank_key, default=best)
        if faster.rank_key[0] >= best.rank_key[0]:
            break
        best = faster
    return best


def neighbour_layouts(
    decisions: MultiModuleConfig,
    costed: Sequence[CostedModule],
    samples: int,
    images: Mapping[str, float],
    pins: Mapping[str, Any],
) -> Iterator[MultiModuleConfig]:
    """Every layout that differs in one thing, where a microbatch has so many samples, and a sample so many `images` of
    the modules that can divide them. What is pinned stays."""
    if "zero1" not in pins:
        modules = tuple((name, replace(own, zero1=not decisions.zero1)) for name, own in decisions.modules)
        yield replace(decisions, zero1=not decisions.zero1, modules=modules)
    for place, (name, own) in enumerate(decisions.modules):
        layers = len(costed[place].profile.ways[0].sample_s)
        free = not {f"{name}.shards", f"{name}.replicas"} & {*pins}
        for other in (*_cut_elsewhere(own, layers), *_toggle_recompute(own, f"{name}.recompute" in pins)):
            yield from _run_as(decisions, costed, place, other)
        able = images.get(name, 0.0) if (len(own.replicas) * len(own.shards)) ** 2 <= PAIRS else 0.0
        for divided in _division_choices(name in decisions.divided, able, f"{name}.divide" in pins):
            made = _with_division(decisions, name, divided)
            each = samples * decisions.multiple_of(name) * (images[name] if divided else 1.0)
            if made != decisions and 1 < len(own.replicas) <= each:
                yield made
            if free and name in (decisions.inline if not divided else (*decisions.inline, *decisions.guests)):
                most = len(dict(decisions.modules)[decisions.backbone].shards)
                for other in _change_grid(own, most if decisions.multiple_of(name) == 1 else 1, each):
                    yield from _run_as(made, costed, place, other)
        packed = costed[place].ways[0].load.space != "samples"
        if name in decisions.guests and packed and f"{name}.multiple" not in pins:
            pieces = samples * (images[name] if name in decisions.divided else 1.0)
            for multiple, other in _guest_multiples(decisions, name, own, pieces):
                if other == own or free:
                    multiples = {**dict(decisions.multiples), name: multiple}
                    made = _with_module(decisions, place, other)
                    yield replace(made, multiples=tuple((each, n) for each, n in multiples.items() if n > 1))


def _run_as(
    decisions: MultiModuleConfig, costed: Sequence[CostedModule], place: int, own: ParallelConfig
) -> Iterator[MultiModuleConfig]:
    """With a module that lies so, if it has a way to run so."""
    way = next((each for each in costed[place].ways if each.matches_decisions(own)), None)
    if way is not None:
        yield _with_module(decisions, place, replace(own, sharding=way.sharding))


def _division_choices(now: bool, images: float, pinned: bool) -> list[bool]:
    """Whether images are divided: as it is, and where samples have several images, the other way too."""
    return [now] if pinned or (images <= 1.0 and not now) else [now, not now]


def _with_division(decisions: MultiModuleConfig, name: str, divided: bool) -> MultiModuleConfig:
    """With the images of a module divided, or its samples."""
    others = [one for one in decisions.divided if one != name]
    return replace(decisions, divided=tuple([*others, name] if divided else others))


def _with_module(decisions: MultiModuleConfig, place: int, own: ParallelConfig) -> MultiModuleConfig:
    """With this in the place of what a module has."""
    made = (decisions.modules[place][0], own)
    return replace(decisions, modules=(*decisions.modules[:place], made, *decisions.modules[place + 1 :]))


def _guest_multiples(
    decisions: MultiModuleConfig, name: str, own: ParallelConfig, pieces: float
) -> Iterator[tuple[int, ParallelConfig]]:
    """Twice, four times and half as many microbatches together as a guest takes, of so many samples or images: several
    only without shards, a unit for every lane, and one of those for every replica."""
    whole = replace(own, replicas=(1,) * (len(own.replicas) * len(own.shards)), shards=(1,), sharding="none")
    now = decisions.multiple_of(name)
    least = max(2 * now, math.ceil(len(whole.replicas) / pieces))
    for multiple, other in [(least, whole), (2 * least, whole), *([(now // 2, own)] if now % 2 == 0 else [])]:
        units, rest = divmod(decisions.microbatches, multiple)
        if not rest and units >= decisions.copy_count(name) and len(other.replicas) <= multiple * pieces:
            yield multiple, other


def _cut_elsewhere(own: ParallelConfig, layers: int) -> Iterator[ParallelConfig]:
    for place, cut in enumerate(own.cuts):
        for other in (cut - 1, cut + 1):
            cuts = (*own.cuts[:place], other, *own.cuts[place + 1 :])
            if all(one < two for one, two in pairwise((0, *cuts, layers))):
                yield replace(own, cuts=cuts)


def _toggle_recompute(own: ParallelConfig, pinned: bool) -> Iterator[ParallelConfig]:
    if not pinned:
        yield replace(own, recompute=("full",) if own.recompute == ("none",) else ("none",))


def _change_grid(own: ParallelConfig, most: int, pieces: float) -> Iterator[ParallelConfig]:
    """As many devices of the lane in another grid: half the shards, where each replica has something then of so many
    samples or images, or twice as many."""
    replicas, shards = len(own.replicas), len(own.shards)
    if shards % 2 == 0 and 2 * replicas <= pieces:
        yield replace(own, replicas=(1,) * (2 * replicas), shards=(1,) * (shards // 2))
    if replicas % 2 == 0 and most % (2 * shards) == 0 and replicas // 2 <= pieces:
        yield replace(own, replicas=(1,) * (replicas // 2), shards=(1,) * (2 * shards))
