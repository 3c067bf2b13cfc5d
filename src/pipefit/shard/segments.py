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
from pipefit.shard.chain import ChainLink, ChainSearch, Shares, hidden_state_forms, total_resharing_s, with_shares
from pipefit.shard.shares import (
    best_weights,
    cost_s,
    count_segments,
    cuts_of,
    held_bytes,
    least_fraction,
    memory_rooms,
    overlapped_reduction_s,
    round_weights,
    transient_bytes,
)
from pipefit.shard.synthesize import ROUNDS, SynthesizedProgram, fits_in_memory, memory_limits
from pipefit.shard.template import AxisMembers, ComputeSegment, HeldFractions, held_fractions

SEARCHED = 3
"""Of the shares that are tried for a run of layers, so many of the cheapest have their forms searched again."""


def segment_shares(chains: ChainSearch, layers: Sequence[Layer], found: SynthesizedProgram) -> SynthesizedProgram:
    """`found` with shares of their own for runs of layers, where that is cheaper and fits in memory. For whole models:
    others hand their hidden state to stages that know only the group's shares."""
    classes = group_tied_layers(layers)
    first, last = chains.model.layer_graph(layers[0]), chains.model.layer_graph(layers[-1])
    ends = {*hidden_state_forms(first, True), *hidden_state_forms(last, False)}
    if chains.setting.reshare_s is None or len(classes) < 2 or ends != {IDENTITY}:
        return found
    prices = _SegmentPrices(chains, layers)
    best = _SegmentedProgram(
        found.links, (found.shares,) * len(layers), found.cost_s, fits_in_memory(chains, found.held_bytes)
    )
    for _ in range(ROUNDS):
        before = best.cost_s
        for run in _class_runs(classes):
            best = min(
                (best, *_try_shares(chains, layers, prices, best, run)), key=lambda one: (not one.fits, one.cost_s)
            )
        if best.cost_s >= before * (1 - 1e-6):
            break
    group = Counter(best.shares).most_common(1)[0][0]
    return SynthesizedProgram(
        links=with_shares(layers, best.links, best.shares, group),
        shares=group,
        cost_s=best.cost_s,
        held_bytes=prices.fullest_bytes(best.links, best.shares),
    )


def group_tied_layers(layers: Sequence[Layer]) -> list[list[int]]:
    """The places of layers that must have the same shares: equal ones, and those that share a parameter."""
    parent: dict[str, str] = {}

    def find_root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for layer in layers:
        for name in layer.parameters.values():
            parent[find_root(f"parameter {name}")] = find_root(layer.graph)
    classes: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        classes.setdefault(find_root(layer.graph), []).append(index)
    return list(classes.values())


@dataclass(frozen=True, slots=True)
class _SegmentedProgram:
    """A program with the shares of every layer."""

    links: tuple[ChainLink, ...]
    shares: tuple[Shares, ...]
    cost_s: float
    fits: bool


@dataclass
class _SegmentPrices:
    """What programs of these layers cost with shares of their own; equal parts are priced once."""

    chains: ChainSearch
    layers: Sequence[Layer]
    _known: dict[object, tuple[list[ChainLink], float | None]] = field(default_factory=dict)

    def price_program(self, links: Sequence[ChainLink], shares: Sequence[Shares]) -> _SegmentedProgram | None:
        """None where the shares leave a device without a unit, or a border cannot be crossed."""
        total = total_resharing_s(self.chains, self.layers, links, shares)
        for part in _equal_share_runs(shares):
            seconds = self._price_part(list(links[part.start : part.stop]), shares[part.start])
            if seconds is None:
                return None
            total += seconds
        if total == float("inf"):
            return None
        setting = self.chains.setting
        if setting.overlap_share:
            chain = [link.choice for link in links]
            total -= setting.overlap_share * overlapped_reduction_s(
                chain, shares, setting.bucket_s, setting.microbatches
            )
        return _SegmentedProgram(
            tuple(links), tuple(shares), total, fits_in_memory(self.chains, self.fullest_bytes(links, shares))
        )

    def _price_part(self, links: list[ChainLink], shares: Shares) -> float | None:
        key = (*map(id, links), shares)
        if key not in self._known:
            stretches = count_segments([link.choice for link in links])
            self._known[key] = links, cost_s(stretches, self.chains.setting.axis_members, shares)
        return self._known[key][1]

    def fullest_bytes(self, links: Sequence[ChainLink], shares: Sequence[Shares]) -> tuple[float, ...]:
        """What stays on the fullest device of every kind."""
        totals = [0.0] * self.chains.setting.axis_members.kind_count
        passing = 0.0
        for part in _equal_share_runs(shares):
            chain = [link.choice for link in links[part.start : part.stop]]
            transient = transient_bytes(chain)
            passing = max(passing, transient)
            for kind, size in enumerate(held_bytes(chain, shares[part.start])):
                totals[kind] += size - transient
        return tuple(total + passing for total in totals)


def _equal_share_runs(shares: Sequence[Shares]) -> Iterator[range]:
    """Runs of layers with the same shares."""
    for _, places in itertools.groupby(range(len(shares)), key=lambda place: shares[place]):
        first, *rest = places
        yield range(first, rest[-1] + 1 if rest else first + 1)


def _class_runs(classes: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The places of layers that change their shares together: each class, some from the front, some to the end."""
    count = len(classes)
    runs = [
        *((i, i + 1) for i in range(count)),
        *((0, i) for i in range(2, count)),
        *((i, count) for i in range(1, count - 1)),
    ]
    for start, stop in dict.fromkeys(runs):
        yield sorted(itertools.chain.from_iterable(classes[start:stop]))


def _try_shares(
    chains: ChainSearch, layers: Sequence[Layer], prices: _SegmentPrices, now: _SegmentedProgram, run: Sequence[int]
) -> Iterator[_SegmentedProgram]:
    """The same with other shares for the layers at these places: forms as they are, and the best with forms anew."""
    tried = []
    for shares in _share_options(chains, prices, now, run):
        layer_shares = tuple(shares if index in run else now.shares[index] for index in range(len(layers)))
        priced = prices.price_program(now.links, layer_shares) if layer_shares != now.shares else None
        if priced is not None:
            tried.append(priced)
    yield from tried
    for candidate in sorted(tried, key=lambda program: (not program.fits, program.cost_s))[:SEARCHED]:
        try:
            links = chains.search_programs(layers, candidate.shares[0], candidate.shares)
        except PlanError:
            continue
        priced = prices.price_program(links, candidate.shares)
        if priced is not None:
            yield priced


def _share_options(
    chains: ChainSearch, prices: _SegmentPrices, now: _SegmentedProgram, run: Sequence[int]
) -> list[Shares]:
    """Shares to try for the layers at these places: the best for them alone, and those of the others."""
    members, run_set = chains.setting.axis_members, {*run}
    chain = [now.links[index].choice for index in run]
    stretches: list[tuple[ComputeSegment, int]] = []
    for part in _equal_share_runs([now.shares[index] if index in run_set else () for index in range(len(now.shares))]):
        if part.start in run_set:
            stretches += count_segments([now.links[index].choice for index in part])
    cuts = cuts_of(stretches)
    everything = prices.fullest_bytes(now.links, now.shares)
    mine = prices.fullest_bytes([now.links[index] for index in run], [now.shares[index] for index in run])
    left = [limit - (all_ - own_) for limit, all_, own_ in zip(memory_limits(chains), everything, mine, strict=True)]
    around = _reference_fractions(cuts, [*dict.fromkeys(now.shares[index] for index in run)], members)
    weights = (
        best_weights(stretches, members, least_fraction(cuts), memory_rooms(chain, left), around)
        if min(left) > 0
        else None
    )
    options = dict.fromkeys(now.shares)
    return [*options, *(option for option in (round_weights(weights, cuts) if weights else ()) if option not in options)]


def _reference_fractions(cuts: Sequence[int], shares: Sequence[Shares], members: AxisMembers) -> HeldFractions:
    """The fractions around which collectives are lowered: by the first of these shares that leaves every device a unit
    of all cuts, though its layer has only some of them; else by even ones, which always do."""
    for candidate in (*shares, (1,) * len(members.kind)):
        fractions = held_fractions(cuts, candidate, members)
        if all(cut in fractions.worst for cut in cuts):
            break
    return fractions
