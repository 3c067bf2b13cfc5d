"""Separate shares for parts of a model: embedding, blocks and head may need different shares.

Devices may differ in compute and memory rates, or have memory for one part only. Starting from the best common shares,
the linear program finds for each run of layers the shares that are best for it alone, with the memory left by the other
layers. Shares that lower the price of the full chain, including resharing, are accepted, and the forms are searched
again for them, until nothing improves. The result never costs more than common shares. Equal layers, and layers that
share parameters, keep equal shares.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipefit.errors import PlanError
from pipefit.layout import IDENTITY
from pipefit.model.graph import Layer
from pipefit.shard.chain import ChainLink, ChainSearch, hidden_state_forms, total_resharing_s, with_shares
from pipefit.shard.recipe import DeviceShares
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
from pipefit.shard.synthesize import MAX_ALTERNATIONS, SynthesizedProgram, fits_in_memory, memory_limits
from pipefit.shard.template import AxisMembers, ComputeSegment, HeldFractions, held_fractions

SEARCHED = 3
"""Number of cheapest share candidates of a run of layers for which the forms are searched again."""


def segment_shares(chains: ChainSearch, layers: Sequence[Layer], found: SynthesizedProgram) -> SynthesizedProgram:
    """Return `found` with separate shares for runs of layers, if that is cheaper and fits in memory.

    Only for full models: other chains pass their hidden state to stages that know only the mesh's shares.
    """
    classes = group_tied_layers(layers)
    first, last = chains.model.layer_graph(layers[0]), chains.model.layer_graph(layers[-1])
    ends = {*hidden_state_forms(first, True), *hidden_state_forms(last, False)}
    if chains.setting.reshare_s is None or len(classes) < 2 or ends != {IDENTITY}:
        return found
    prices = _SegmentPrices(chains, layers)
    best = _SegmentedProgram(
        found.links, (found.shares,) * len(layers), found.cost_s, fits_in_memory(chains, found.held_bytes)
    )
    for _ in range(MAX_ALTERNATIONS):
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
    """Return the indices of layers that must have equal shares: equal layers, and layers that share a parameter."""
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
    shares: tuple[DeviceShares, ...]
    cost_s: float
    fits: bool


@dataclass
class _SegmentPrices:
    """Prices of programs of these layers with separate shares; equal parts are priced once."""

    chains: ChainSearch
    layers: Sequence[Layer]
    _known: dict[object, tuple[list[ChainLink], float | None]] = field(default_factory=dict)

    def price_program(self, links: Sequence[ChainLink], shares: Sequence[DeviceShares]) -> _SegmentedProgram | None:
        """Return the priced program, or None if a device gets no unit or the hidden state cannot be reshared."""
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

    def _price_part(self, links: list[ChainLink], shares: DeviceShares) -> float | None:
        key = (*map(id, links), shares)
        if key not in self._known:
            stretches = count_segments([link.choice for link in links])
            self._known[key] = links, cost_s(stretches, self.chains.setting.axis_members, shares)
        return self._known[key][1]

    def fullest_bytes(self, links: Sequence[ChainLink], shares: Sequence[DeviceShares]) -> tuple[float, ...]:
        """Return the bytes held on the fullest device of every kind."""
        totals = [0.0] * self.chains.setting.axis_members.kind_count
        passing = 0.0
        for part in _equal_share_runs(shares):
            chain = [link.choice for link in links[part.start : part.stop]]
            transient = transient_bytes(chain)
            passing = max(passing, transient)
            for kind, size in enumerate(held_bytes(chain, shares[part.start])):
                totals[kind] += size - transient
        return tuple(total + passing for total in totals)


def _equal_share_runs(shares: Sequence[DeviceShares]) -> Iterator[range]:
    """Yield runs of layers with equal shares."""
    for _, places in itertools.groupby(range(len(shares)), key=lambda place: shares[place]):
        first, *rest = places
        yield range(first, rest[-1] + 1 if rest else first + 1)


def _class_runs(classes: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield the layer indices that change shares together: each class, leading classes, and trailing classes."""
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
    """Yield the program with other shares for the layers in `run`: with unchanged forms, and with new forms."""
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
) -> list[DeviceShares]:
    """Return shares to try for the layers in `run`: the best for these layers alone, and those of other layers."""
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
    return [
        *options,
        *(option for option in (round_weights(weights, cuts) if weights else ()) if option not in options),
    ]


def _reference_fractions(cuts: Sequence[int], shares: Sequence[DeviceShares], members: AxisMembers) -> HeldFractions:
    """Return the fractions at which collectives are lowered.

    They belong to the first of these shares that leaves every device a unit of all cuts; even shares always do.
    """
    for candidate in (*shares, (1,) * len(members.kind)):
        fractions = held_fractions(cuts, candidate, members)
        if all(cut in fractions.worst for cut in cuts):
            break
    return fractions
