"""Layouts next to a good one: a stage's end one layer on, another module recomputed, a grid in line one step finer, a
module on shared devices with twice or half as many microbatches together.

The short list is made by a closed form that knows neither the order of actions nor what exactly a device holds at its
fullest. So the best layouts are changed a little, one thing at a time, as long as the simulator finds them faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pipefit.plan.decisions import Decisions
from pipefit.plan.modules.costing import Costed
from pipefit.plan.modules.decisions import ModuleDecisions
from pipefit.plan.outcome import Evaluated

ROUNDS = 8


def polished(start: Evaluated, around: Callable[[Evaluated], Sequence[Evaluated]]) -> Evaluated:
    """The best that is reached from `start` by going to the fastest of what is `around` while that is faster."""
    best = start
    for _ in range(ROUNDS):
        faster = min(around(best), key=lambda one: one.rank, default=best)
        if faster.rank[0] >= best.rank[0]:
            break
        best = faster
    return best


def neighbours(
    decisions: ModuleDecisions, costed: Sequence[Costed], samples: int, pins: Mapping[str, Any]
) -> Iterator[ModuleDecisions]:
    """Every layout that differs in one thing, where a microbatch has so many samples. What is pinned stays."""
    for place, (name, own) in enumerate(decisions.modules):
        layers = len(costed[place].profile.ways[0].sample_s)
        others = [*_cut_elsewhere(own, layers), *_recomputed(own, f"{name}.recompute" in pins)]
        if name in decisions.inline and not {f"{name}.shards", f"{name}.replicas"} & {*pins}:
            most = len(dict(decisions.modules)[decisions.backbone].shards)
            others += _regridded(own, most, samples)
        for other in others:
            way = next((each for each in costed[place].ways if each.is_of(other)), None)
            if way is not None:
                yield _with(decisions, place, replace(other, sharding=way.sharding))
        if name in decisions.guests and f"{name}.multiple" not in pins:
            for multiple, other in _together(decisions, name, own, samples):
                if other == own or not {f"{name}.shards", f"{name}.replicas"} & {*pins}:
                    multiples = {**dict(decisions.multiples), name: multiple}
                    made = _with(decisions, place, other)
                    yield replace(made, multiples=tuple((each, n) for each, n in multiples.items() if n > 1))


def _with(decisions: ModuleDecisions, place: int, own: Decisions) -> ModuleDecisions:
    """With this in the place of what a module has."""
    made = (decisions.modules[place][0], own)
    return replace(decisions, modules=(*decisions.modules[:place], made, *decisions.modules[place + 1 :]))


def _together(decisions: ModuleDecisions, name: str, own: Decisions, samples: int) -> Iterator[tuple[int, Decisions]]:
    """Twice, four times and half as many microbatches together as a guest takes, of so many samples: several only
    without shards, a unit for every lane, and a sample of it for every replica."""
    whole = replace(own, replicas=(1,) * (len(own.replicas) * len(own.shards)), shards=(1,), sharding="none")
    now = decisions.multiple_of(name)
    least = max(2 * now, -(-len(whole.replicas) // samples))
    for multiple, other in [(least, whole), (2 * least, whole), *([(now // 2, own)] if now % 2 == 0 else [])]:
        units, rest = divmod(decisions.microbatches, multiple)
        if not rest and units >= decisions.copies(name) and len(other.replicas) <= multiple * samples:
            yield multiple, other


def _cut_elsewhere(own: Decisions, layers: int) -> Iterator[Decisions]:
    for place, cut in enumerate(own.cuts):
        for other in (cut - 1, cut + 1):
            cuts = (*own.cuts[:place], other, *own.cuts[place + 1 :])
            if all(one < two for one, two in pairwise((0, *cuts, layers))):
                yield replace(own, cuts=cuts)


def _recomputed(own: Decisions, pinned: bool) -> Iterator[Decisions]:
    if not pinned:
        yield replace(own, recompute=("full",) if own.recompute == ("none",) else ("none",))


def _regridded(own: Decisions, most: int, samples: int) -> Iterator[Decisions]:
    """As many devices of the lane in another grid: half the shards, or twice as many."""
    replicas, shards = len(own.replicas), len(own.shards)
    if shards % 2 == 0 and 2 * replicas <= samples:
        yield replace(own, replicas=(1,) * (2 * replicas), shards=(1,) * (shards // 2))
    if replicas % 2 == 0 and most % (2 * shards) == 0:
        yield replace(own, replicas=(1,) * (replicas // 2), shards=(1,) * (2 * shards))
