"""Joint search of programs and shares: alternating optimisation from several starts (HAP's alternation, repaired).

The search finds a program for given shares, and the linear program finds shares for a given program. The alternation
ends if neither improves, which need not be the joint optimum, so it starts from several shares between even and
proportional to speed. A program, its shares and their cost are one record. Costs are computed after rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Generic, TypeVar

from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.errors import PlanError
from pipefit.model.graph import Layer
from pipefit.shard.chain import ChainLink, ChainSearch
from pipefit.shard.setting import ShardSetting
from pipefit.shard.shares import (
    Weights,
    best_weights,
    cost_s,
    count_segments,
    cuts_of,
    held_bytes,
    least_fraction,
    memory_rooms,
    nearest_shares,
    overlapped_reduction_s,
    round_weights,
)
from pipefit.shard.template import held_fractions
from pipefit.units import format_bytes

Program = TypeVar("Program")
SharesT = TypeVar("SharesT")

MAX_ALTERNATIONS = 12
"""Maximum number of alternations from one start; three are usual."""

EXPOSED = (1.0, 0.5, 0.0)
"""Parts of gradient reductions counted by the search in turn, if they overlap the backward."""

PRICES = 5
"""Number of prices per byte tried between one without effect and one that dominates all costs."""

DEAREST = 1e3
"""The highest price: filling a device's memory costs this many times the program."""


@dataclass(frozen=True, slots=True)
class ProgramRecord(Generic[Program, SharesT]):
    """A program, its shares, and the cost of both together."""

    program: Program
    shares: SharesT
    cost_s: float


ChainRecord = ProgramRecord[tuple[ChainLink, ...], tuple[int, ...]]
"""The programs of a chain of layers, and their shares."""


def alternate_searches(
    starts: Iterable[SharesT],
    search: Callable[[SharesT], Program | None],
    improve: Callable[[Program], Iterable[SharesT]],
    cost: Callable[[Program, SharesT], float | None],
) -> ProgramRecord[Program, SharesT] | None:
    """Return the best record over all starts, or None if no start has a program.

    `search` returns a program for shares and `improve` shares to try for a program. `cost` returns None if the two are
    incompatible.
    """
    best: ProgramRecord[Program, SharesT] | None = None
    for shares in starts:
        last: float | None = None
        for _ in range(MAX_ALTERNATIONS):
            program = search(shares)
            if program is None:
                break
            tried = [(cost(program, candidate), candidate) for candidate in (shares, *improve(program))]
            able = [ProgramRecord(program, candidate, seconds) for seconds, candidate in tried if seconds is not None]
            if not able:
                break
            cheapest = min(able, key=lambda record: record.cost_s)
            if best is None or cheapest.cost_s < best.cost_s:
                best = cheapest
            if last is not None and cheapest.cost_s >= last * (1 - 1e-9):
                break
            last, shares = cheapest.cost_s, cheapest.shares
    return best


def start_weights(*speeds: Sequence[float]) -> list[Weights]:
    """Return start weights: even, proportional to each of these speeds, and the means of two or three of them."""
    count = len(speeds[0])
    totals = [(group, math.fsum(group)) for group in (*speeds, (1.0,) * count)]
    corners = [tuple(speed / total for speed in group) for group, total in totals]
    weights: dict[Weights, None] = {}
    for mixed in (group for size in (1, 2, 3) for group in combinations(corners, size)):
        weights[tuple(round(math.fsum(column) / len(mixed), 12) for column in zip(*mixed, strict=True))] = None
    return list(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesizedProgram:
    """A program for a chain of layers."""

    links: tuple[ChainLink, ...]
    shares: tuple[int, ...]
    cost_s: float
    "Seconds of a microbatch, forward and backward, with its part of the costs per iteration."
    held_bytes: tuple[float, ...]
    "Bytes held on the fullest device of every kind."


def synthesize_program(chains: ChainSearch, layers: Sequence[Layer], shares: Sequence[int] = ()) -> SynthesizedProgram:
    """Return `leanest_program`. Raises PlanError if there is no program, or none that fits in memory."""
    program = leanest_program(chains, layers, shares)
    if not fits_in_memory(chains, program.held_bytes):
        raise _no_program(chains, shares)
    return program


def cheapest_program(
    chains: ChainSearch, layers: Sequence[Layer], shares: Sequence[int] = ()
) -> SynthesizedProgram | None:
    """Return the cheapest program of consecutive layers, ignoring memory, or None if there is none.

    With `shares` the shares are fixed; otherwise the best ones are searched.
    """
    return _at_price(chains, layers, shares, 0.0)


def leanest_program(
    chains: ChainSearch, layers: Sequence[Layer], shares: Sequence[int] = (), found: SynthesizedProgram | None = None
) -> SynthesizedProgram:
    """Return the cheapest program of consecutive layers that fits in memory, or a program with few bytes if none fits.

    With `shares` the shares are fixed; otherwise the best ones are searched. `found` is the `cheapest_program`, if
    known. Raises PlanError if there is no program.
    """
    found = found or cheapest_program(chains, layers, shares)
    if found is not None and fits_in_memory(chains, found.held_bytes):
        return found
    high = DEAREST * (found.cost_s if found is not None else 1.0) / min(memory_limits(chains))
    best = _at_price(chains, layers, shares, high)
    if best is None:
        raise _no_program(chains, shares)
    if not fits_in_memory(chains, best.held_bytes):
        return best
    low = high / DEAREST**2
    for _ in range(PRICES):
        price = math.sqrt(low * high)
        found = _at_price(chains, layers, shares or best.shares, price)
        if found is None or not fits_in_memory(chains, found.held_bytes):
            low = price
            continue
        high = price
        best = min(best, found, key=lambda one: one.cost_s)
    return best


def _at_price(
    chains: ChainSearch, layers: Sequence[Layer], shares: Sequence[int], price_s: float
) -> SynthesizedProgram | None:
    """Return the best program if each byte held costs `price_s`; its `cost_s` excludes that price."""
    chains.byte_price_s = price_s
    record = _search_alternating(chains, layers, shares)
    chains.byte_price_s = 0.0
    return None if record is None else _finish_program(chains, record)


def memory_limits(chains: ChainSearch) -> tuple[float, ...]:
    """Return the bytes per device kind that all layers together may fill: `lanes` times the free memory of a device."""
    setting = chains.setting
    return tuple(setting.lanes * max(1.0, kind.memory_bytes - WORKSPACE_BYTES) for kind in setting.distinct_kinds)


def fits_in_memory(chains: ChainSearch, held: Sequence[float]) -> bool:
    """Return whether the bytes held fit on every device."""
    return all(size <= limit for size, limit in zip(held, memory_limits(chains), strict=True))


def _search_alternating(chains: ChainSearch, layers: Sequence[Layer], shares: Sequence[int]) -> ChainRecord | None:
    """Return the best record over several exposed parts of gradient reductions.

    All reductions count first, then, if they overlap the backward, smaller parts. The overlap is subtracted from each
    cost.
    """
    parts = EXPOSED if chains.setting.overlap_share else EXPOSED[:1]
    if shares:
        records = _search_parts(chains, layers, tuple(shares), parts)
    else:
        records = []
        starts = [nearest_shares(weights) for weights in start_weights(*chains.setting.device_speeds)]
        for chains.exposed in parts:
            records.append(_ChainAlternation(chains, layers, False).run_from(starts))
            best = min(filter(None, records), key=lambda record: record.cost_s, default=None)
            if best is not None:
                starts = [best.shares, nearest_shares(start_weights(chains.setting.device_speeds[0])[0])]
    chains.exposed = EXPOSED[0]
    return min(filter(None, records), key=lambda record: record.cost_s, default=None)


def _search_parts(
    chains: ChainSearch, layers: Sequence[Layer], shares: tuple[int, ...], parts: Sequence[float]
) -> list[ChainRecord | None]:
    """Return the record of each of these exposed parts, which fall.

    The cost of a program is linear in the part. So if the programs of the first and of the last part are the same, it
    is the cheapest of all parts between them.
    """

    def search_part(exposed: float) -> ChainRecord | None:
        chains.exposed = exposed
        return _ChainAlternation(chains, layers, True).run_from([shares])

    records = [search_part(parts[0])]
    if len(parts) > 1:
        last = search_part(parts[-1])
        if _record_key(records[0]) != _record_key(last):
            records += map(search_part, parts[1:-1])
        records.append(last)
    return records


def _record_key(record: ChainRecord | None) -> object:
    """Return a key that is equal for records of equal programs."""
    return None if record is None else _program_key(record.program)


def _program_key(links: tuple[ChainLink, ...]) -> object:
    """Return a key that is equal for equal programs, while a program with this key exists."""
    distinct = {id(link): link for link in links}
    numbers = {key: number for number, key in enumerate(distinct)}
    parts = tuple(
        (link.takes, link.gives, id(choice.template.steps), choice.ways, choice.before, choice.after)
        for link, choice in ((link, link.choice) for link in distinct.values())
    )
    return parts, tuple(numbers[id(link)] for link in links)


class _ProgramCosts:
    """The costs of one program, computed once for each shares."""

    def __init__(self, setting: ShardSetting, links: tuple[ChainLink, ...]) -> None:
        self.setting, self.chain = setting, [link.choice for link in links]
        self.stretches = count_segments(self.chain)
        self.known: dict[tuple[int, ...], tuple[float | None, tuple[float, ...]]] = {}

    def cost_and_bytes(self, shares: tuple[int, ...]) -> tuple[float | None, tuple[float, ...]]:
        """Return the seconds of a microbatch, and the bytes held on the fullest device of every kind.

        The seconds are None if the shares leave a device without a unit.
        """
        if shares not in self.known:
            seconds = self._shares_cost_s(shares)
            self.known[shares] = seconds, () if seconds is None else held_bytes(self.chain, shares)
        return self.known[shares]

    def _shares_cost_s(self, shares: tuple[int, ...]) -> float | None:
        setting = self.setting
        seconds = cost_s(self.stretches, setting.axis_members, shares)
        if seconds is None or not setting.overlap_share:
            return seconds
        return seconds - setting.overlap_share * overlapped_reduction_s(
            self.chain, [shares] * len(self.chain), setting.bucket_s, setting.microbatches
        )


def _costs_of(setting: ShardSetting, links: tuple[ChainLink, ...]) -> _ProgramCosts:
    """Return the costs of a program; equal programs of several prices and exposed parts share them."""
    return setting.make_once(("program costs", _program_key(links)), lambda: _ProgramCosts(setting, links))


class _ChainAlternation:
    """The functions of `alternate_searches` for a chain of layers."""

    def __init__(self, chains: ChainSearch, layers: Sequence[Layer], pinned: bool) -> None:
        self.chains, self.layers, self.pinned, self.members = chains, layers, pinned, chains.setting.axis_members
        self.programs: dict[tuple[int, ...], tuple[ChainLink, ...] | None] = {}
        self.costs: dict[int, tuple[tuple[ChainLink, ...], _ProgramCosts]] = {}
        "By the identity of a program: the program, which keeps its identity taken, and its costs."

    def run_from(self, first: Sequence[tuple[int, ...]]) -> ChainRecord | None:
        return alternate_searches(first, self.search_programs, self.improve_shares, self.record_cost_s)

    def search_programs(self, given: tuple[int, ...]) -> tuple[ChainLink, ...] | None:
        if given not in self.programs:
            try:
                self.programs[given] = self.chains.search_programs(self.layers, given)
            except PlanError:
                self.programs[given] = None
        return self.programs[given]

    def improve_shares(self, links: tuple[ChainLink, ...]) -> list[tuple[int, ...]]:
        if self.pinned:
            return []
        chain = [link.choice for link in links]
        stretches = _costs_of(self.chains.setting, links).stretches
        cuts = cuts_of(stretches)
        around = held_fractions(cuts, links[0].shares, self.members)
        least = least_fraction(cuts)
        weights = best_weights(stretches, self.members, least, memory_rooms(chain, memory_limits(self.chains)), around)
        weights = weights or best_weights(stretches, self.members, least, around=around)
        return [] if weights is None else round_weights(weights, cuts)

    def record_cost_s(self, links: tuple[ChainLink, ...], given: tuple[int, ...]) -> float | None:
        if id(links) not in self.costs:
            self.costs[id(links)] = links, _costs_of(self.chains.setting, links)
        seconds, held = self.costs[id(links)][1].cost_and_bytes(given)
        return None if seconds is None else seconds * _memory_penalty(self.chains, held)


def _memory_penalty(chains: ChainSearch, held: Sequence[float]) -> float:
    """Return the cost factor of a program that exceeds memory."""
    return 1 + 1e3 * max(max(0.0, size / limit - 1) for size, limit in zip(held, memory_limits(chains), strict=True))


def _finish_program(chains: ChainSearch, record: ChainRecord) -> SynthesizedProgram:
    _, held = _costs_of(chains.setting, record.program).cost_and_bytes(record.shares)
    return SynthesizedProgram(
        links=tuple(replace(link, shares=record.shares) for link in record.program),
        shares=record.shares,
        cost_s=record.cost_s / _memory_penalty(chains, held),
        held_bytes=held,
    )


def _no_program(chains: ChainSearch, shares: Sequence[int]) -> PlanError:
    sizes = ", ".join(f"{kind.name} {format_bytes(kind.memory_bytes)}" for kind in chains.setting.distinct_kinds)
    return PlanError(
        "No program of these layers fits in the memory of these devices.",
        where="shard program",
        seen=f"{len(chains.setting.kinds)} devices: {sizes}",
        next_step="take more devices, fewer rows in a microbatch, or other shares" if shares else "take more devices",
    )
