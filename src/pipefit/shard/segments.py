"""Shares of their own for parts of a model: where devices differ in how fast they compute and how fast they move, or
memory holds one part and not another, the embedding, the blocks and the head of a model want other shares.

From the best common shares on: for runs of layers, the linear program gives the shares that are best for them alone,
with the memory that the others leave; those that lower the price of the whole chain, resharing included, are taken,
and the forms are searched again for them, until nothing improves. So the result never costs more than common shares.
Equal layers, and layers that share parameters, keep the same shares.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipefit.errors import PlanError
from pipefit.layout import IDENTITY
from pipefit.model.graph import Layer
from pipefit.shard.chain import Chains, Link, Shares, borders_s, stream_forms, with_shares
from pipefit.shard.shares import (
    beside_s,
    best_weights,
    cost_s,
    cuts_of,
    held_bytes,
    least_fraction,
    passing_bytes,
    rooms,
    rounded,
    stretches_of,
)
from pipefit.shard.synthesize import ROUNDS, Synthesized, fits, limits
from pipefit.shard.template import Fractions, Members, Stretch, held_fractions

SEARCHED = 3
"""Of the shares that are tried for a run of layers, so many of the cheapest have their forms searched again."""


def segmented(chains: Chains, layers: Sequence[Layer], found: Synthesized) -> Synthesized:
    """`found` with shares of their own for runs of layers, where that is cheaper and fits in memory. For whole models:
    others hand their hidden state to stages that know only the group's shares."""
    classes = alike(layers)
    first, last = chains.model.layer_graph(layers[0]), chains.model.layer_graph(layers[-1])
    ends = {*stream_forms(first, True), *stream_forms(last, False)}
    if chains.setting.reshare_s is None or len(classes) < 2 or ends != {IDENTITY}:
        return found
    prices = _Prices(chains, layers)
    best = _Segmented(found.links, (found.shares,) * len(layers), found.cost_s, fits(chains, found.held_bytes))
    for _ in range(ROUNDS):
        before = best.cost_s
        for run in _runs(classes):
            best = min((best, *_tried(chains, layers, prices, best, run)), key=lambda one: (not one.fits, one.cost_s))
        if best.cost_s >= before * (1 - 1e-6):
            break
    group = Counter(best.shares).most_common(1)[0][0]
    return Synthesized(
        links=with_shares(layers, best.links, best.shares, group),
        shares=group,
        cost_s=best.cost_s,
        held_bytes=prices.held(best.links, best.shares),
    )


def alike(layers: Sequence[Layer]) -> list[list[int]]:
    """The places of layers that must have the same shares: equal ones, and those that share a parameter."""
    parent: dict[str, str] = {}

    def find(key: str) -> str:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for layer in layers:
        for name in layer.parameters.values():
            parent[find(f"parameter {name}")] = find(layer.graph)
    classes: dict[str, list[int]] = {}
    for place, layer in enumerate(layers):
        classes.setdefault(find(layer.graph), []).append(place)
    return list(classes.values())


@dataclass(frozen=True, slots=True)
class _Segmented:
    """A program with the shares of every layer."""

    links: tuple[Link, ...]
    shares: tuple[Shares, ...]
    cost_s: float
    fits: bool


@dataclass
class _Prices:
    """What programs of these layers cost with shares of their own; equal parts are priced once."""

    chains: Chains
    layers: Sequence[Layer]
    _known: dict[object, tuple[list[Link], float | None]] = field(default_factory=dict)

    def of(self, links: Sequence[Link], shares: Sequence[Shares]) -> _Segmented | None:
        """None where the shares leave a device without a unit, or a border cannot be crossed."""
        total = borders_s(self.chains, self.layers, links, shares)
        for part in _parts(shares):
            seconds = self._part(list(links[part.start : part.stop]), shares[part.start])
            if seconds is None:
                return None
            total += seconds
        if total == float("inf"):
            return None
        setting = self.chains.setting
        if setting.overlap:
            chain = [link.choice for link in links]
            total -= setting.overlap * beside_s(chain, shares, setting.bucket_s, setting.microbatches)
        return _Segmented(tuple(links), tuple(shares), total, fits(self.chains, self.held(links, shares)))

    def _part(self, links: list[Link], shares: Shares) -> float | None:
        key = (*map(id, links), shares)
        if key not in self._known:
            stretches = stretches_of([link.choice for link in links])
            self._known[key] = links, cost_s(stretches, self.chains.setting.members, shares)
        return self._known[key][1]

    def held(self, links: Sequence[Link], shares: Sequence[Shares]) -> tuple[float, ...]:
        """What stays on the fullest device of every kind."""
        totals = [0.0] * self.chains.setting.members.kinds
        passing = 0.0
        for part in _parts(shares):
            chain = [link.choice for link in links[part.start : part.stop]]
            each = passing_bytes(chain)
            passing = max(passing, each)
            for kind, size in enumerate(held_bytes(chain, shares[part.start])):
                totals[kind] += size - each
        return tuple(total + passing for total in totals)


def _parts(shares: Sequence[Shares]) -> Iterator[range]:
    """Runs of layers with the same shares."""
    for _, places in itertools.groupby(range(len(shares)), key=lambda place: shares[place]):
        first, *others = places
        yield range(first, others[-1] + 1 if others else first + 1)


def _runs(classes: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The places of layers that change their shares together: each class, some from the front, some to the end."""
    count = len(classes)
    runs = [
        *((i, i + 1) for i in range(count)),
        *((0, i) for i in range(2, count)),
        *((i, count) for i in range(1, count - 1)),
    ]
    for start, stop in dict.fromkeys(runs):
        yield sorted(itertools.chain.from_iterable(classes[start:stop]))


def _tried(
    chains: Chains, layers: Sequence[Layer], prices: _Prices, now: _Segmented, run: Sequence[int]
) -> Iterator[_Segmented]:
    """The same with other shares for the layers at these places: forms as they are, and the best with forms anew."""
    tried = []
    for shares in _options(chains, prices, now, run):
        each = tuple(shares if place in run else now.shares[place] for place in range(len(layers)))
        priced = prices.of(now.links, each) if each != now.shares else None
        if priced is not None:
            tried.append(priced)
    yield from tried
    for one in sorted(tried, key=lambda one: (not one.fits, one.cost_s))[:SEARCHED]:
        try:
            links = chains.search(layers, one.shares[0], one.shares)
        except PlanError:
            continue
        priced = prices.of(links, one.shares)
        if priced is not None:
            yield priced


def _options(chains: Chains, prices: _Prices, now: _Segmented, run: Sequence[int]) -> list[Shares]:
    """Shares to try for the layers at these places: the best for them alone, and those of the others."""
    members, own = chains.setting.members, {*run}
    chain = [now.links[place].choice for place in run]
    stretches: list[tuple[Stretch, int]] = []
    for part in _parts([now.shares[place] if place in own else () for place in range(len(now.shares))]):
        if part.start in own:
            stretches += stretches_of([now.links[place].choice for place in part])
    cuts = cuts_of(stretches)
    everything = prices.held(now.links, now.shares)
    mine = prices.held([now.links[place] for place in run], [now.shares[place] for place in run])
    left = [limit - (all_ - own_) for limit, all_, own_ in zip(limits(chains), everything, mine, strict=True)]
    around = _around(cuts, [*dict.fromkeys(now.shares[place] for place in run)], members)
    weights = (
        best_weights(stretches, members, least_fraction(cuts), rooms(chain, left), around) if min(left) > 0 else None
    )
    found = dict.fromkeys(now.shares)
    return [*found, *(each for each in (rounded(weights, cuts) if weights else ()) if each not in found)]


def _around(cuts: Sequence[int], shares: Sequence[Shares], members: Members) -> Fractions:
    """The fractions around which collectives are lowered: by the first of these shares that leaves every device a unit
    of all cuts, though its layer has only some of them; else by even ones, which always do."""
    for each in (*shares, (1,) * len(members.kind)):
        found = held_fractions(cuts, each, members)
        if all(cut in found.worst for cut in cuts):
            break
    return found
