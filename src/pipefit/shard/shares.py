"""Shares of the devices for a fixed program, by a linear program (HiGHS), and their rounding to integers.

The variables are the fraction of every device kind, and the forward and backward time of every segment between two
collectives. A segment takes as long as its slowest device, including its replicated work (reference: HAP's load
balancer, which had one row per operator and no constants). Memory rows bound the fractions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum, gcd
from typing import Any

from pipefit.cost.comm.lowerings import LoweredCollective, PortLoads
from pipefit.cost.pipeline.overlap import LayerGradient, hidden_s
from pipefit.layout import split_by_shares
from pipefit.shard.template import (
    WHOLE_CUT,
    AxisMembers,
    ChosenProgram,
    ComputeSegment,
    ConversionCost,
    HeldFractions,
    Lines,
    OpenOption,
    held_fractions,
)

Weights = tuple[float, ...]
"""One weight per position of the shard axis; the sum is 1."""

LEAST_UNITS = 0.6
"""Least part of a unit of the coarsest cut for a device before rounding, so that rounding leaves it one unit."""


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """The memory of one device kind: bytes = whole_bytes + split_bytes x fraction, up to a limit."""

    whole_bytes: float
    split_bytes: float
    limit_bytes: float


def best_weights(
    stretches: Sequence[tuple[ComputeSegment, int]],
    members: AxisMembers,
    least: float,
    rooms: Sequence[MemoryRoom] = (),
    around: HeldFractions | None = None,
) -> Weights | None:
    """Return the fractions that minimise the time of these segments with their counts, or None if memory allows none.

    Devices of one kind get equal fractions, because costs depend only on the largest fraction of a kind. `least` is the
    smallest allowed fraction. Collectives use their cheapest lowerings at the fractions `around`.
    """
    program = _ShareProgram(members, least, around)
    for room, fraction in zip(rooms, program.fraction, strict=False):
        program.add_row({fraction: room.split_bytes / room.limit_bytes}, 1.0 - room.whole_bytes / room.limit_bytes)
    for stretch, times in stretches:
        program.add_segment(stretch, float(times))
    fractions = program.solve_fractions()
    return None if fractions is None else tuple(fractions[kind] for kind in members.kind)


class _ShareProgram:
    """A linear program: rows `terms <= bound` over non-negative variables."""

    def __init__(self, members: AxisMembers, least: float, around: HeldFractions | None) -> None:
        self.members, self.around = members, around
        self.costs: list[float] = []
        self.rows: list[tuple[dict[int, float], float]] = []
        self.fraction = [self.add_variable() for _ in range(members.kind_count)]
        self.widest = self.add_variable()
        for fraction in self.fraction:
            self.add_row({fraction: -1.0}, -least)
            self.add_row({fraction: float(len(members.kind)), self.widest: -1.0}, 0.0)
        self.rounds: dict[int, tuple[PortLoads, list[int]]] = {}
        "Identity of port loads -> the loads, and a variable per round in seconds per byte."

    def add_variable(self, cost: float = 0.0) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def add_row(self, terms: dict[int, float], bound: float) -> None:
        self.rows.append((terms, bound))

    def add_segment(self, stretch: ComputeSegment, times: float) -> None:
        """Add the forward and backward time of a segment, and its collectives."""
        for conversion in stretch.conversions:
            if conversion.cut != WHOLE_CUT:
                self.costs[self.widest] += times * conversion.line[1]
            for lowering, _ in conversion.cheapest_lowerings(self.around) if self.around is not None else ():
                self.add_collective(lowering, times)
        for passes in ((0,), (1, 2)):
            segment_s = self.add_variable(times)
            for kind, fraction in enumerate(self.fraction):
                terms, constant = {segment_s: -1.0}, 0.0
                for lines, cut in _pass_lines(stretch.ways, passes, kind):
                    constant += self._add_lines(lines, cut, fraction, terms)
                self.add_row(terms, -constant)

    def add_collective(self, one: LoweredCollective, times: float) -> None:
        """Add the time of a collective: the busiest port in every round."""
        if one.name == "padded" and one.rounds.loads[0].ndim == 2:
            self.costs[self.widest] += times * one.slope
            return
        if id(one.rounds) not in self.rounds:
            variables = []
            for loads, constant in one.rounds.as_lines(len(self.members.kind)):
                variables.append(self.add_variable())
                rows = {tuple(self._by_kind(load)) for load in loads}
                for row in rows:
                    self.add_row({**dict(zip(self.fraction, row, strict=True)), variables[-1]: -1.0}, -constant)
            self.rounds[id(one.rounds)] = one.rounds, variables
        for variable in self.rounds[id(one.rounds)][1]:
            self.costs[variable] += times * one.slope

    def _by_kind(self, load: Sequence[float]) -> list[float]:
        """Return the load of a port per fraction of each device kind."""
        totals = [0.0] * self.members.kind_count
        for seconds, kind in zip(load, self.members.kind, strict=True):
            totals[kind] += float(seconds)
        return totals

    def _add_lines(self, lines: Lines, cut: int, fraction: int, terms: dict[int, float]) -> float:
        """Add one operator's pass to a row and return its constant part."""
        if not lines:
            return 0.0
        if cut == WHOLE_CUT:
            return max(first + second for first, second in lines)
        if len(lines) == 1:
            terms[fraction] = terms.get(fraction, 0.0) + lines[0][1]
            return lines[0][0]
        slowest = self.add_variable()
        for first, second in lines:
            self.add_row({fraction: second, slowest: -1.0}, -first)
        terms[slowest] = 1.0
        return 0.0

    def solve_fractions(self) -> Sequence[float] | None:
        """Return the fractions of the device kinds, or None if there is no solution."""
        import numpy as np
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        entries = [(row_index, *term) for row_index, (terms, _) in enumerate(self.rows) for term in terms.items()]
        places, variables, factors = zip(*entries, strict=True)
        scale = max(*self.costs, 1e-12)  # seconds are small relative to HiGHS's tolerances
        matrix = csr_array((factors, (places, variables)), shape=(len(self.rows), len(self.costs)))
        total = np.zeros((1, len(self.costs)))
        total[0, self.fraction] = self.members.device_counts
        result: Any = linprog(
            np.array(self.costs) / scale,
            A_ub=matrix,
            b_ub=np.array([bound for _, bound in self.rows]),
            A_eq=total,
            b_eq=[1.0],
            method="highs",
        )
        return None if result.x is None else [float(result.x[fraction]) for fraction in self.fraction]


def _pass_lines(ways: Sequence[OpenOption], passes: Sequence[int], kind: int) -> Iterator[tuple[Lines, int]]:
    for option in ways:
        for number in passes if option.passes else ():
            yield option.passes[number][kind], option.cut


def nearest_shares(weights: Weights) -> tuple[int, ...]:
    """Return the smallest integer shares within 0.1 % (of the total) of these weights."""
    candidates = round_weights(weights, ())

    def share_error(shares: tuple[int, ...]) -> float:
        return max(abs(share / sum(shares) - weight) for share, weight in zip(shares, weights, strict=True))

    return next((shares for shares in candidates if share_error(shares) <= 1e-3), candidates[-1])


def count_segments(chain: Sequence[ChosenProgram]) -> list[tuple[ComputeSegment, int]]:
    """Return the distinct segments of consecutive layers, with their counts.

    The last segment of a layer continues in the next layer, unless that begins with a collective.
    """
    known: dict[int, list[ComputeSegment]] = {}
    pieces: list[list[tuple[int, int]]] = []
    for chosen in chain:
        segments = known.setdefault(id(chosen), [])
        segments.extend(chosen.compute_segments() if not segments else ())
        for index, stretch in enumerate(segments):
            if pieces and not any(conversion.meets for conversion in stretch.conversions):
                pieces[-1].append((id(chosen), index))
            else:
                pieces.append([(id(chosen), index)])
    counted = []
    for piece, times in Counter(map(tuple, pieces)).items():
        parts = [known[owner][index] for owner, index in piece]
        conversions = tuple(conversion for part in parts for conversion in part.conversions)
        counted.append((ComputeSegment(conversions, tuple(option for part in parts for option in part.ways)), times))
    return counted


def cost_s(
    stretches: Sequence[tuple[ComputeSegment, int]], members: AxisMembers, shares: Sequence[int]
) -> float | None:
    """Return the seconds of a microbatch after rounding, with its part of the costs per iteration.

    Devices synchronise at collectives only. The result is None if the shares leave a device without a unit of a split.
    """
    cuts = cuts_of(stretches)
    fractions = held_fractions(cuts, shares, members)
    if any(cut not in fractions.worst for cut in cuts):
        return None
    return fsum(times * stretch.cost_s(fractions, members.kind_count) for stretch, times in stretches)


def overlapped_reduction_s(
    chain: Sequence[ChosenProgram], shares: Sequence[Sequence[int]], bucket_s: float, microbatches: int
) -> float:
    """Return the overlapped seconds of the gradient reductions, divided by the microbatches.

    Overlap is counted bucket by bucket (`cost/pipeline/overlap.py`); a full bucket takes `bucket_s`, and sizes are
    given in seconds. `shares` are those of every program.
    """
    pieces: dict[tuple[int, Sequence[int]], list[LayerGradient]] = {}
    for key, (chosen, layer_shares) in {
        (id(program), program_shares): (program, program_shares)
        for program, program_shares in zip(chain, shares, strict=True)
    }.items():
        template, kinds = chosen.template, range(chosen.template.members.kind_count)
        fractions = held_fractions(template.cuts, layer_shares, template.members)
        options = [step.ways[number] for step, number in zip(template.steps, chosen.ways, strict=True)]
        pieces[key] = [
            (microbatches * option.once_s, max(option.backward_s(fractions, kind) for kind in kinds))
            for option in options
        ]
    all_pieces = [
        piece
        for program, program_shares in zip(chain, shares, strict=True)
        for piece in pieces[id(program), program_shares]
    ]
    return hidden_s(fsum(size for size, _ in all_pieces), all_pieces, bucket_s) / microbatches


def cuts_of(stretches: Sequence[tuple[ComputeSegment, int]]) -> list[int]:
    """Return the cuts in use, coarsest first."""
    cuts = {option.cut for stretch, _ in stretches for option in stretch.ways}
    cuts |= {
        cut
        for stretch, _ in stretches
        for conversion in stretch.conversions
        for cut in (conversion.cut, conversion.earlier)
    }
    return sorted(cuts - {WHOLE_CUT})


def held_bytes(chain: Sequence[ChosenProgram], shares: Sequence[float]) -> tuple[float, ...]:
    """Return the bytes held on the fullest device of every kind, for one microbatch.

    They are the parameters with gradients and optimizer state, the saved activations of every layer, and the largest
    weight gathered for use.
    """
    members = chain[0].template.members
    totals = [transient_bytes(chain)] * members.kind_count
    for chosen, times in _distinct_programs(chain):
        fractions = held_fractions(chosen.template.cuts, shares, members)
        by_cut: dict[int, float] = defaultdict(float)
        for part in chosen.chosen_parts():
            by_cut[WHOLE_CUT] += times * part.held[0]
            by_cut[part.cut] += times * part.held[1]
        for kind in range(members.kind_count):
            totals[kind] += fsum(size * fractions.worst[cut][kind] for cut, size in by_cut.items())
    return tuple(totals)


def transient_bytes(chain: Sequence[ChosenProgram]) -> float:
    """Return the bytes of the largest sharded weight gathered for an operator, or of its gradient."""
    return max(
        (
            part.passing
            for chosen, _ in _distinct_programs(chain)
            for part in chosen.chosen_parts()
            if isinstance(part, ConversionCost)
        ),
        default=0.0,
    )


def memory_rooms(chain: Sequence[ChosenProgram], limits: Sequence[float]) -> tuple[MemoryRoom, ...]:
    """Return the memory of every device kind as a line in its fraction; `limits` are the free bytes."""
    parts = [(part.held, times) for chosen, times in _distinct_programs(chain) for part in chosen.chosen_parts()]
    fixed_bytes = transient_bytes(chain) + fsum(times * held[0] for held, times in parts)
    split_ = fsum(times * held[1] for held, times in parts)
    return tuple(MemoryRoom(fixed_bytes, split_, limit) for limit in limits)


def _distinct_programs(chain: Sequence[ChosenProgram]) -> list[tuple[ChosenProgram, int]]:
    """Return the distinct programs of a chain, with their counts."""
    times = Counter(map(id, chain))
    return [(chosen, times[key]) for key, chosen in {id(chosen): chosen for chosen in chain}.items()]


def least_fraction(cuts: Sequence[int]) -> float:
    """Return the smallest fraction that gets a unit of the coarsest of these cuts after rounding."""
    units = [cut for cut in cuts if cut > 0]
    return LEAST_UNITS / min(units) if units else 0.0


def round_weights(weights: Weights, units: Sequence[int]) -> list[tuple[int, ...]]:
    """Return integer shares near these weights, small numbers first; every device gets at least one.

    The totals are the units of every cut, and finer numbers.
    """
    exact = [round(weight * 1e9) for weight in weights]
    rounded: dict[tuple[int, ...], None] = {}
    for total in sorted({*(unit for unit in units if 0 < unit <= 4096), *range(2, 17), 32, 64, 100, 1000}):
        if total >= len(weights):
            counts = [max(1, stop - start) for start, stop in split_by_shares(total, exact)]
            common = gcd(*counts)
            rounded[tuple(count // common for count in counts)] = None
    return list(rounded)
