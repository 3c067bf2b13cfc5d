"""A program to be searched, with every cost as a function of the shares.

On one kind of device a pass of an operator takes the larger of a few straight lines in the device's fraction of what is
split (computing and moving, roofline); a padded collective is a straight line in n x the largest fraction. With
fractions put in it is a problem for `frontier`; with a solution put in it is a linear program for `shares`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipefit.cost.comm.lowerings import LoweredCollective, Parts
from pipefit.layout import split_by_shares
from pipefit.shard.conversions import Conversions
from pipefit.shard.frontier import FormProblem, FormSolution, Move, PricedOption, PricedStep

Line = tuple[float, float]
"""Seconds = first + second x fraction."""

Lines = tuple[Line, ...]
"""The largest of them counts; none is 0 s."""

WHOLE_CUT = -1
"""The cut of what is not split. Every other cut is a number of units, the same in all layers; 0 is any fraction."""


@dataclass(frozen=True, slots=True)
class AxisMembers:
    """Who works together: the devices of a shard axis, by kind."""

    kind: tuple[int, ...]
    "Of every position: a number below `kind_count`."

    @property
    def kind_count(self) -> int:
        return max(self.kind) + 1

    @property
    def device_counts(self) -> tuple[int, ...]:
        return tuple(self.kind.count(number) for number in range(self.kind_count))


@dataclass(frozen=True, slots=True)
class HeldFractions:
    """What the devices hold of everything that is split."""

    worst: Mapping[int, tuple[float, ...]]
    "By cut: the largest fraction on every kind of device. A cut that leaves a device without a unit is not there."
    padding: Mapping[int, float]
    "By cut: n x the largest fraction."
    parts: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    "By cut: every device's fraction."


@dataclass(frozen=True, slots=True)
class ConversionCost:
    """A conversion: seconds = first + second x n x the largest fraction of its cut, and the cheapest lowerings of what
    it does forward and backward."""

    line: Line
    cut: int = WHOLE_CUT
    meets: bool = True
    "Whether devices wait for each other; a local slice does not."
    held: Line = (0.0, 0.0)
    "Bytes that the result takes, in the fraction of its cut."
    passing: float = 0.0
    "Bytes that are there only while one operator runs: a weight that is gathered for it, or the gradient."

    ahead: tuple[LoweredCollective, ...] = ()
    "Lowerings of its collective."
    back: tuple[LoweredCollective, ...] = ()
    "And of what its backward does."
    earlier: int = WHOLE_CUT
    "Of an all-to-all, the cut of what was split before."

    def can_split(self, fractions: HeldFractions) -> bool:
        """Whether these fractions leave every device a unit of its cuts."""
        return self.cut in fractions.worst and self.earlier in fractions.worst

    def conversion_s(self, fractions: HeldFractions) -> float:
        seconds = self.line[0] + self.line[1] * fractions.padding[self.cut]
        for lowering, parts in self.cheapest_lowerings(fractions):
            seconds += lowering.lowered_s(*parts)
        return seconds

    def cheapest_lowerings(self, fractions: HeldFractions) -> tuple[tuple[LoweredCollective, tuple[Parts, ...]], ...]:
        """The cheapest of them with these fractions, forward and backward, each with the parts that it moves; none
        where nothing is to be chosen."""
        if not self.ahead:
            return ()
        parts: tuple[Parts, ...] = (fractions.parts[self.cut],)
        if self.earlier != WHOLE_CUT:
            parts = (fractions.parts[self.earlier], *parts)
        directions = (self.ahead, parts), (self.back, parts[::-1])
        return tuple((_cheapest_lowering(options, moved), moved) for options, moved in directions)

    def lowering_names(self, fractions: HeldFractions) -> str:
        """The cheapest lowerings in a word: `grouped`, or `padded+alltoallv` where the backward has another one; ''
        where nothing is to be chosen, or both are padded."""
        names = tuple(dict.fromkeys(lowering.name for lowering, _ in self.cheapest_lowerings(fractions)))
        return "" if names in ((), ("padded",)) else "+".join(names)


def _cheapest_lowering(ways: Sequence[LoweredCollective], parts: tuple[Parts, ...]) -> LoweredCollective:
    """The first whose price no other is really below: sums in another order round otherwise."""
    least = min(lowering.lowered_s(*parts) for lowering in ways)
    return next(lowering for lowering in ways if lowering.lowered_s(*parts) <= least * (1 + 1e-9))


@dataclass(frozen=True, slots=True)
class OpenOption:
    """A way to compute an operator, by fraction."""

    needs: tuple[int, ...]
    gives: int
    cut: int = WHOLE_CUT
    passes: tuple[tuple[Lines, ...], ...] = ()
    "[forward, input gradient, weight gradient][kind of device]."
    toll: ConversionCost | None = None
    "A reduction that is part of it."
    once_s: float = 0.0
    "Once an iteration, as its part of a microbatch."
    held: Line = (0.0, 0.0)
    "Bytes that stay on a device: a parameter with gradient and state, or what the backward needs."
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

    def cost_s(self, fractions: HeldFractions, kinds: int, exposed: float = 1.0) -> float:
        """The slowest device's forward and its backward, the reduction, and what of what comes once is `exposed`."""
        toll_s = sum(toll.conversion_s(fractions) for toll in (self.toll, self.talk) if toll)
        kind_numbers = range(kinds)
        slowest = max(self.forward_s(fractions, k) for k in kind_numbers) + max(self.backward_s(fractions, k) for k in kind_numbers)
        return slowest + toll_s + exposed * self.once_s


@dataclass(frozen=True, slots=True)
class OpenStep:
    inputs: tuple[int, ...]
    output: int
    ways: tuple[OpenOption, ...]


@dataclass(frozen=True, kw_only=True)
class LayerTemplate:
    """A layer's program with everything open: forms and shares."""

    members: AxisMembers
    steps: tuple[OpenStep, ...]
    tolls: tuple[Mapping[tuple[int, int], ConversionCost], ...]
    "Of every value: (from form, to form)."
    cuts: tuple[int, ...]
    given: Mapping[int, int]
    wanted: Mapping[int, int]

    def problem_at(
        self, fractions: HeldFractions, byte_price_s: float = 0.0, exposed: float = 1.0
    ) -> tuple[FormProblem, tuple[tuple[int, ...], ...]]:
        """The problem for these fractions, and for every step the numbers of the ways that are possible with them.
        `byte_price_s` makes every byte that stays cost so many seconds, where memory is scarce; reductions of gradients
        count as far as they are `exposed`."""

        def held_s(one: OpenOption | ConversionCost) -> float:
            return byte_price_s * (one.held[0] + one.held[1] * max(fractions.worst[one.cut])) if byte_price_s else 0.0

        def options_at(ways: tuple[OpenOption, ...]) -> tuple[tuple[PricedOption, ...], tuple[int, ...]]:
            able = tuple(
                number
                for number, option in enumerate(ways)
                if option.cut in fractions.worst
                and all(toll.can_split(fractions) for toll in (option.toll, option.talk) if toll is not None)
            )
            costs = [ways[n].cost_s(fractions, self.members.kind_count, exposed) + held_s(ways[n]) for n in able]
            options = tuple(PricedOption(ways[n].needs, ways[n].gives, cost) for n, cost in zip(able, costs, strict=True))
            return options, able

        def costs_at(tolls: Mapping[tuple[int, int], ConversionCost]) -> Conversions:
            return {
                move: toll.conversion_s(fractions) + held_s(toll)
                for move, toll in tolls.items()
                if toll.can_split(fractions)
            }

        distinct = {id(step.ways): step.ways for step in self.steps}  # steps that are alike have the same ways
        priced = {key: options_at(options) for key, options in distinct.items()}
        steps = [PricedStep(step.inputs, step.output, priced[id(step.ways)][0]) for step in self.steps]
        numbers = [priced[id(step.ways)][1] for step in self.steps]
        moves = {key: costs_at(tolls) for key, tolls in {id(tolls): tolls for tolls in self.tolls}.items()}
        conversions = [moves[id(tolls)] for tolls in self.tolls]
        problem = FormProblem(steps=tuple(steps), conversions=tuple(conversions), given=self.given, wanted=self.wanted)
        return problem, tuple(numbers)


@dataclass(frozen=True, slots=True)
class ChosenProgram:
    """A template with a way for every step, and its conversions."""

    template: LayerTemplate
    ways: tuple[int, ...]
    "Numbers of the template's ways."
    before: tuple[tuple[Move, ...], ...]
    after: tuple[Move, ...]

    def compute_segments(self) -> list[ComputeSegment]:
        """What is computed between two collectives, in order, each with the collective in front of it."""
        segments: list[ComputeSegment] = []
        tolls: list[ConversionCost] = []
        options: list[OpenOption] = []

        def add_conversion(toll: ConversionCost) -> None:
            nonlocal tolls, options
            if options and toll.meets:
                segments.append(ComputeSegment(tuple(tolls), tuple(options)))
                tolls, options = [], []
            tolls.append(toll)

        for step, number, moves in zip(self.template.steps, self.ways, self.before, strict=True):
            for value, source, target in moves:
                add_conversion(self.template.tolls[value][source, target])
            option = step.ways[number]
            if option.talk is not None:
                add_conversion(option.talk)
            options.append(option)
            if option.toll is not None:
                add_conversion(option.toll)
        for value, source, target in self.after:
            add_conversion(self.template.tolls[value][source, target])
        return [*segments, ComputeSegment(tuple(tolls), tuple(options))]

    def chosen_parts(self) -> list[OpenOption | ConversionCost]:
        """The ways and the conversions that were chosen."""
        options: list[OpenOption | ConversionCost] = [
            step.ways[number] for step, number in zip(self.template.steps, self.ways, strict=True)
        ]
        moves = [move for conversions in (*self.before, self.after) for move in conversions]
        return [*options, *(self.template.tolls[value][source, target] for value, source, target in moves)]


@dataclass(frozen=True, slots=True)
class ComputeSegment:
    """Collectives, and what devices do between them and the next."""

    tolls: tuple[ConversionCost, ...]
    ways: tuple[OpenOption, ...]

    def cost_s(self, fractions: HeldFractions, kinds: int) -> float:
        forward = max(sum(option.forward_s(fractions, k) for option in self.ways) for k in range(kinds))
        backward = max(sum(option.backward_s(fractions, k) for option in self.ways) for k in range(kinds))
        moved = sum(toll.conversion_s(fractions) for toll in self.tolls)
        return forward + backward + moved + sum(option.once_s for option in self.ways)


def choose_program(template: LayerTemplate, numbers: Sequence[Sequence[int]], solution: FormSolution) -> ChosenProgram:
    """What a solution of `template.at(...)` means."""
    option_numbers = tuple(able[number] for able, number in zip(numbers, solution.ways, strict=True))
    return ChosenProgram(template, option_numbers, solution.before, solution.after)


def held_fractions(cuts: Iterable[int], shares: Sequence[float], members: AxisMembers) -> HeldFractions:
    """What the devices hold of these cuts: whole units, as the runtime cuts them; shares are whole numbers then."""
    worst: dict[int, tuple[float, ...]] = {WHOLE_CUT: (1.0,) * members.kind_count}
    padding = {WHOLE_CUT: 1.0}
    parts: dict[int, tuple[float, ...]] = {}
    for units in cuts:
        if units:
            fractions = [(stop - start) / units for start, stop in split_by_shares(units, [int(share) for share in shares])]
        else:
            fractions = [share / sum(shares) for share in shares]
        if min(fractions) > 0:
            worst[units] = tuple(
                max(part for part, kind in zip(fractions, members.kind, strict=True) if kind == number)
                for number in range(members.kind_count)
            )
            padding[units] = len(fractions) * max(fractions)
            parts[units] = tuple(fractions)
    return HeldFractions(worst, padding, parts)
