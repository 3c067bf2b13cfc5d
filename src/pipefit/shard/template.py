"""A program before the search, with every cost as a function of the shares.

On one device kind, the time of an operator's pass is the maximum of a few linear functions of the device's fraction
(compute and memory traffic, roofline). A padded collective is linear in n x the largest fraction. For given fractions
the template is a problem for `frontier`; for a given solution it is a linear program for `shares`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

from pipefit.cost.comm.lowerings import LoweredCollective, SplitFractions
from pipefit.layout import split_by_shares
from pipefit.shard.conversions import Conversions
from pipefit.shard.frontier import FormProblem, FormSolution, KnownParts, Move, PricedOption, PricedStep

Line = tuple[float, float]
"""Seconds = first + second x fraction."""

Lines = tuple[Line, ...]
"""Lines whose maximum counts; an empty tuple means 0 s."""

WHOLE_CUT = -1
"""The cut of unsplit dimensions. Every other cut is a number of units, the same in all layers; 0 is any fraction."""


@dataclass(frozen=True, slots=True)
class AxisMembers:
    """The devices of a shard axis, by kind."""

    kind: tuple[int, ...]
    "Kind number of every position, below `kind_count`."

    @property
    def kind_count(self) -> int:
        return max(self.kind) + 1

    @property
    def device_counts(self) -> tuple[int, ...]:
        return tuple(self.kind.count(number) for number in range(self.kind_count))


@dataclass(frozen=True, slots=True)
class HeldFractions:
    """The fractions of all cuts on the devices."""

    worst: Mapping[int, tuple[float, ...]]
    "By cut: the largest fraction on every device kind. Cuts that leave a device without a unit are missing."
    padding: Mapping[int, float]
    "By cut: n x the largest fraction."
    parts: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    "By cut: every device's fraction."


@dataclass(frozen=True, slots=True)
class ConversionCost:
    """The cost of a conversion: seconds = first + second x n x the largest fraction of its cut, plus the cheapest
    lowerings.

    The lowerings are those of its forward and its backward collective.
    """

    line: Line
    cut: int = WHOLE_CUT
    meets: bool = True
    "Whether devices synchronise; a local slice does not."
    held: Line = (0.0, 0.0)
    "Bytes of the result, as a line in the fraction of its cut."
    passing: float = 0.0
    "Transient bytes while one operator runs: a gathered weight, or its gradient."

    ahead: tuple[LoweredCollective, ...] = ()
    "Lowerings of the forward collective."
    back: tuple[LoweredCollective, ...] = ()
    "Lowerings of the backward collective."
    earlier: int = WHOLE_CUT
    "For an all-to-all, the cut of the source dimension."

    def can_split(self, fractions: HeldFractions) -> bool:
        """Return whether these fractions leave every device a unit of its cuts."""
        return self.cut in fractions.worst and self.earlier in fractions.worst

    def conversion_s(self, fractions: HeldFractions) -> float:
        seconds = self.line[0] + self.line[1] * fractions.padding[self.cut]
        for lowering, parts in self.cheapest_lowerings(fractions):
            seconds += lowering.lowered_s(*parts)
        return seconds

    def cheapest_lowerings(
        self, fractions: HeldFractions
    ) -> tuple[tuple[LoweredCollective, tuple[SplitFractions, ...]], ...]:
        """Return the cheapest lowerings at these fractions, forward and backward, each with its parts.

        The result is empty if there is no choice.
        """
        if not self.ahead:
            return ()
        parts: tuple[SplitFractions, ...] = (fractions.parts[self.cut],)
        if self.earlier != WHOLE_CUT:
            parts = (fractions.parts[self.earlier], *parts)
        directions = (self.ahead, parts), (self.back, parts[::-1])
        return tuple((_cheapest_lowering(options, moved), moved) for options, moved in directions)

    def lowering_names(self, fractions: HeldFractions) -> str:
        """Return the cheapest lowerings as text: `grouped`, or `padded+alltoallv` if the backward differs.

        The text is empty if there is no choice, or both are padded.
        """
        names = tuple(dict.fromkeys(lowering.name for lowering, _ in self.cheapest_lowerings(fractions)))
        return "" if names in ((), ("padded",)) else "+".join(names)


def _cheapest_lowering(ways: Sequence[LoweredCollective], parts: tuple[SplitFractions, ...]) -> LoweredCollective:
    """Return the first lowering with the least price, up to rounding (sums in another order round differently)."""
    least = min(lowering.lowered_s(*parts) for lowering in ways)
    return next(lowering for lowering in ways if lowering.lowered_s(*parts) <= least * (1 + 1e-9))


@dataclass(frozen=True, slots=True)
class OpenOption:
    """One way to compute an operator, with costs as functions of the fraction."""

    needs: tuple[int, ...]
    gives: int
    cut: int = WHOLE_CUT
    passes: tuple[tuple[Lines, ...], ...] = ()
    "[forward, input gradient, weight gradient][device kind]."
    reduction: ConversionCost | None = None
    "The reduction of its partial result."
    once_s: float = 0.0
    "Seconds once an iteration, divided by the microbatches."
    held: Line = (0.0, 0.0)
    "Bytes held on a device: a parameter with gradient and state, or saved activations."
    talk: ConversionCost | None = None
    "Collectives inside the operator, forward and backward."

    def forward_s(self, fractions: HeldFractions, kind: int) -> float:
        return self._pass_s(0, fractions, kind)

    def backward_s(self, fractions: HeldFractions, kind: int) -> float:
        return self._pass_s(1, fractions, kind) + self._pass_s(2, fractions, kind)

    def _pass_s(self, number: int, fractions: HeldFractions, kind: int) -> float:
        if not self.passes:
            return 0.0
        held = fractions.worst[self.cut][kind]
        return max((first + second * held for first, second in self.passes[number][kind]), default=0.0)

    def step_s(self, fractions: HeldFractions, kinds: int) -> float:
        """Return the seconds of the slowest device's forward and backward, and the reduction."""
        conversions_s = fsum(
            conversion.conversion_s(fractions) for conversion in (self.reduction, self.talk) if conversion
        )
        kind_numbers = range(kinds)
        slowest = max(self.forward_s(fractions, k) for k in kind_numbers) + max(
            self.backward_s(fractions, k) for k in kind_numbers
        )
        return slowest + conversions_s

    def cost_s(self, fractions: HeldFractions, kinds: int) -> float:
        """Return `step_s` with the cost per iteration."""
        return self.step_s(fractions, kinds) + self.once_s


@dataclass(frozen=True, slots=True)
class OpenStep:
    inputs: tuple[int, ...]
    output: int
    ways: tuple[OpenOption, ...]


@dataclass(frozen=True, kw_only=True)
class LayerTemplate:
    """A layer's program before its forms and shares are chosen."""

    members: AxisMembers
    steps: tuple[OpenStep, ...]
    conversion_costs: tuple[Mapping[tuple[int, int], ConversionCost], ...]
    "Costs by (source form, target form), for every value."
    cuts: tuple[int, ...]
    given: Mapping[int, int]
    wanted: Mapping[int, int]


class PricedTemplate:
    """A template with its costs at the devices' fractions, from which problems for all prices of memory follow."""

    def __init__(self, template: LayerTemplate, fractions: HeldFractions) -> None:
        self.template = template
        kinds = template.members.kind_count
        distinct = {id(step.ways): step.ways for step in template.steps}  # equal steps share their options
        self._able = {
            key: tuple(number for number, option in enumerate(options) if _is_possible(option, fractions))
            for key, options in distinct.items()
        }
        self._options = {
            key: [
                (options[n], options[n].step_s(fractions, kinds), _held_bytes(options[n], fractions))
                for n in self._able[key]
            ]
            for key, options in distinct.items()
        }
        self._at_price: _PricedBytes | None = None
        self._moves = {
            key: [
                (move, conversion.conversion_s(fractions), _held_bytes(conversion, fractions))
                for move, conversion in conversions.items()
                if conversion.can_split(fractions)
            ]
            for key, conversions in {id(conversions): conversions for conversions in template.conversion_costs}.items()
        }

    def problem_at(
        self, byte_price_s: float = 0.0, exposed: float = 1.0
    ) -> tuple[FormProblem, tuple[tuple[int, ...], ...]]:
        """Return the problem, and the numbers of the possible options of every step.

        `byte_price_s` is the price in seconds of every byte held, if memory is scarce. `exposed` is the part of
        gradient reductions that counts.
        """
        template = self.template
        if self._at_price is None or self._at_price.byte_price_s != byte_price_s:
            self._at_price = _PricedBytes(self._options, self._moves, byte_price_s)
        priced, moves = self._at_price.options_at(exposed), self._at_price.moves
        problem = FormProblem(
            steps=tuple(PricedStep(step.inputs, step.output, priced[id(step.ways)]) for step in template.steps),
            conversions=tuple(moves[id(conversions)] for conversions in template.conversion_costs),
            given=template.given,
            wanted=template.wanted,
            parts=self._at_price.parts,
        )
        return problem, tuple(self._able[id(step.ways)] for step in template.steps)


_TimedOptions = Mapping[int, Sequence[tuple[OpenOption, float, float]]]
"""By the identity of a step's options: (option, seconds, bytes held)."""

_TimedMoves = Mapping[int, Sequence[tuple[tuple[int, int], float, float]]]
"""By the identity of a value's conversions: (move, seconds, bytes held)."""


class _PricedBytes:
    """The costs of a template at one price of a byte; only options with gradient reductions depend on their part."""

    def __init__(self, options: _TimedOptions, moves: _TimedMoves, byte_price_s: float) -> None:
        self.options, self.byte_price_s = options, byte_price_s
        self.moves: dict[int, Conversions] = {
            key: {move: seconds + byte_price_s * held for move, seconds, held in entries}
            for key, entries in moves.items()
        }
        self.parts = KnownParts()
        self.reduced = {key for key, entries in options.items() if any(option.once_s for option, _, _ in entries)}
        self.unreduced = {key: self._price_options(key, 0.0) for key in options if key not in self.reduced}

    def options_at(self, exposed: float) -> Mapping[int, tuple[PricedOption, ...]]:
        """Return the options of every step, if this part of gradient reductions counts."""
        return {**self.unreduced, **{key: self._price_options(key, exposed) for key in self.reduced}}

    def _price_options(self, key: int, exposed: float) -> tuple[PricedOption, ...]:
        return tuple(
            PricedOption(option.needs, option.gives, step_s + exposed * option.once_s + self.byte_price_s * held)
            for option, step_s, held in self.options[key]
        )


def _is_possible(option: OpenOption, fractions: HeldFractions) -> bool:
    """Return whether the fractions leave every device a unit of the option's cuts."""
    conversions = [conversion for conversion in (option.reduction, option.talk) if conversion is not None]
    return option.cut in fractions.worst and all(conversion.can_split(fractions) for conversion in conversions)


def _held_bytes(option: OpenOption | ConversionCost, fractions: HeldFractions) -> float:
    """Return the bytes held on the fullest device."""
    return option.held[0] + option.held[1] * max(fractions.worst[option.cut])


@dataclass(frozen=True, slots=True)
class ChosenProgram:
    """A template with an option for every step, and its conversions."""

    template: LayerTemplate
    ways: tuple[int, ...]
    "Numbers of the template's options."
    before: tuple[tuple[Move, ...], ...]
    after: tuple[Move, ...]

    def compute_segments(self) -> list[ComputeSegment]:
        """Return the segments between two collectives, in order, each with the preceding collectives."""
        segments: list[ComputeSegment] = []
        conversions: list[ConversionCost] = []
        options: list[OpenOption] = []

        def add_conversion(conversion: ConversionCost) -> None:
            nonlocal conversions, options
            if options and conversion.meets:
                segments.append(ComputeSegment(tuple(conversions), tuple(options)))
                conversions, options = [], []
            conversions.append(conversion)

        for step, number, moves in zip(self.template.steps, self.ways, self.before, strict=True):
            for value, source, target in moves:
                add_conversion(self.template.conversion_costs[value][source, target])
            option = step.ways[number]
            if option.talk is not None:
                add_conversion(option.talk)
            options.append(option)
            if option.reduction is not None:
                add_conversion(option.reduction)
        for value, source, target in self.after:
            add_conversion(self.template.conversion_costs[value][source, target])
        return [*segments, ComputeSegment(tuple(conversions), tuple(options))]

    def chosen_parts(self) -> list[OpenOption | ConversionCost]:
        """Return the chosen options and conversions."""
        options: list[OpenOption | ConversionCost] = [
            step.ways[number] for step, number in zip(self.template.steps, self.ways, strict=True)
        ]
        moves = [move for conversions in (*self.before, self.after) for move in conversions]
        return [*options, *(self.template.conversion_costs[value][source, target] for value, source, target in moves)]


@dataclass(frozen=True, slots=True)
class ComputeSegment:
    """Collectives, and the computation between them and the next collective."""

    conversions: tuple[ConversionCost, ...]
    ways: tuple[OpenOption, ...]

    def cost_s(self, fractions: HeldFractions, kinds: int) -> float:
        forward = max(fsum(option.forward_s(fractions, k) for option in self.ways) for k in range(kinds))
        backward = max(fsum(option.backward_s(fractions, k) for option in self.ways) for k in range(kinds))
        moved = fsum(conversion.conversion_s(fractions) for conversion in self.conversions)
        return forward + backward + moved + fsum(option.once_s for option in self.ways)


def choose_program(template: LayerTemplate, numbers: Sequence[Sequence[int]], solution: FormSolution) -> ChosenProgram:
    """Return the program of a solution of `PricedTemplate.problem_at`."""
    option_numbers = tuple(able[number] for able, number in zip(numbers, solution.ways, strict=True))
    return ChosenProgram(template, option_numbers, solution.before, solution.after)


def held_fractions(cuts: Iterable[int], shares: Sequence[float], members: AxisMembers) -> HeldFractions:
    """Return the devices' fractions of these cuts: full units, as the runtime cuts them, for integer shares."""
    worst: dict[int, tuple[float, ...]] = {WHOLE_CUT: (1.0,) * members.kind_count}
    padding = {WHOLE_CUT: 1.0}
    parts: dict[int, tuple[float, ...]] = {}
    for units in cuts:
        if units:
            fractions = [
                (stop - start) / units for start, stop in split_by_shares(units, [int(share) for share in shares])
            ]
        else:
            total = fsum(shares)
            fractions = [share / total for share in shares]
        if min(fractions) > 0:
            worst[units] = tuple(
                max(part for part, kind in zip(fractions, members.kind, strict=True) if kind == number)
                for number in range(members.kind_count)
            )
            padding[units] = len(fractions) * max(fractions)
            parts[units] = tuple(fractions)
    return HeldFractions(worst, padding, parts)
