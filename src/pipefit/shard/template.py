"""A program to be searched, with every cost as a function of the shares.

On one kind of device a pass of an operator takes the larger of a few straight lines in the device's fraction of what is
split (computing and moving, roofline); a padded collective is a straight line in n x the largest fraction. With
fractions put in it is a problem for `frontier`; with a solution put in it is a linear program for `shares`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipefit.layout import split
from pipefit.shard.frontier import Conversions, Move, Problem, Solution, Step, Way

Line = tuple[float, float]
"""Seconds = first + second x fraction."""

Lines = tuple[Line, ...]
"""The largest of them counts; none is 0 s."""

WHOLE_CUT = -1
"""The cut of what is not split."""


@dataclass(frozen=True, slots=True)
class Members:
    """Who works together: the devices of a shard axis, by kind."""

    kind: tuple[int, ...]
    "Of every position: a number below `kinds`."

    @property
    def kinds(self) -> int:
        return max(self.kind) + 1

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(self.kind.count(number) for number in range(self.kinds))


@dataclass(frozen=True, slots=True)
class Fractions:
    """What the devices hold of everything that is split."""

    worst: Mapping[int, tuple[float, ...]]
    "By cut: the largest fraction on every kind of device. A cut that leaves a device without a unit is not there."
    padding: Mapping[int, float]
    "By cut: n x the largest fraction."


@dataclass(frozen=True, slots=True)
class Toll:
    """A conversion: seconds = first + second x n x the largest fraction of its cut."""

    line: Line
    cut: int = WHOLE_CUT
    meets: bool = True
    "Whether devices wait for each other; a local slice does not."

    def seconds(self, fractions: Fractions) -> float:
        return self.line[0] + self.line[1] * fractions.padding[self.cut]


@dataclass(frozen=True, slots=True)
class OpenWay:
    """A way to compute an operator, by fraction."""

    needs: tuple[int, ...]
    gives: int
    cut: int = WHOLE_CUT
    passes: tuple[tuple[Lines, ...], ...] = ()
    "[forward, input gradient, weight gradient][kind of device]."
    toll: Toll | None = None
    "A reduction that is part of it."
    once_s: float = 0.0
    "Once an iteration, as its part of a microbatch."

    def forward_s(self, fractions: Fractions, kind: int) -> float:
        return self._pass_s(0, fractions, kind)

    def backward_s(self, fractions: Fractions, kind: int) -> float:
        return self._pass_s(1, fractions, kind) + self._pass_s(2, fractions, kind)

    def _pass_s(self, number: int, fractions: Fractions, kind: int) -> float:
        if not self.passes:
            return 0.0
        held = fractions.worst[self.cut][kind]
        return max((first + second * held for first, second in self.passes[number][kind]), default=0.0)

    def cost_s(self, fractions: Fractions, kinds: int) -> float:
        """The slowest device's forward and its backward, the reduction, and what comes once."""
        toll_s = self.toll.seconds(fractions) if self.toll else 0.0
        each = range(kinds)
        slowest = max(self.forward_s(fractions, k) for k in each) + max(self.backward_s(fractions, k) for k in each)
        return slowest + toll_s + self.once_s


@dataclass(frozen=True, slots=True)
class OpenStep:
    inputs: tuple[int, ...]
    output: int
    ways: tuple[OpenWay, ...]


@dataclass(frozen=True, kw_only=True)
class Template:
    """A layer's program with everything open: forms and shares."""

    members: Members
    steps: tuple[OpenStep, ...]
    tolls: tuple[Mapping[tuple[int, int], Toll], ...]
    "Of every value: (from form, to form)."
    cuts: tuple[int, ...]
    "Units of every cut: in so many parts it can be split; 0 is any fraction."
    given: Mapping[int, int]
    wanted: Mapping[int, int]

    def fractions(self, shares: Sequence[int]) -> Fractions:
        """What the devices hold of every cut after rounding: cut as the runtime cuts it, in whole units."""
        held = {}
        for number, units in enumerate(self.cuts):
            if units:
                held[number] = [(stop - start) / units for start, stop in split(units, shares)]
            else:
                held[number] = [share / sum(shares) for share in shares]
        return _fractions(held, self.members)

    def at(self, fractions: Fractions) -> tuple[Problem, tuple[tuple[int, ...], ...]]:
        """The problem for these fractions, and for every step the numbers of the ways that are possible with them."""
        steps, numbers = [], []
        for step in self.steps:
            able = tuple(
                number
                for number, way in enumerate(step.ways)
                if way.cut in fractions.worst and (way.toll is None or way.toll.cut in fractions.worst)
            )
            ways = [step.ways[number] for number in able]
            costs = [way.cost_s(fractions, self.members.kinds) for way in ways]
            steps.append(
                Step(
                    step.inputs,
                    step.output,
                    tuple(Way(way.needs, way.gives, cost) for way, cost in zip(ways, costs, strict=True)),
                )
            )
            numbers.append(able)
        conversions: list[Conversions] = [
            {move: toll.seconds(fractions) for move, toll in tolls.items() if toll.cut in fractions.worst}
            for tolls in self.tolls
        ]
        problem = Problem(steps=tuple(steps), conversions=tuple(conversions), given=self.given, wanted=self.wanted)
        return problem, tuple(numbers)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A template with a way for every step, and its conversions."""

    template: Template
    ways: tuple[int, ...]
    "Numbers of the template's ways."
    before: tuple[tuple[Move, ...], ...]
    after: tuple[Move, ...]

    def stretches(self) -> list[Stretch]:
        """What is computed between two collectives, in order, each with the collective in front of it."""
        found: list[Stretch] = []
        tolls: list[Toll] = []
        ways: list[OpenWay] = []

        def meet(toll: Toll) -> None:
            nonlocal tolls, ways
            if ways and toll.meets:
                found.append(Stretch(tuple(tolls), tuple(ways)))
                tolls, ways = [], []
            tolls.append(toll)

        for step, number, moves in zip(self.template.steps, self.ways, self.before, strict=True):
            for value, source, target in moves:
                meet(self.template.tolls[value][source, target])
            way = step.ways[number]
            ways.append(way)
            if way.toll is not None:
                meet(way.toll)
        for value, source, target in self.after:
            meet(self.template.tolls[value][source, target])
        return [*found, Stretch(tuple(tolls), tuple(ways))]

    def cost_s(self, fractions: Fractions) -> float:
        """Seconds with devices in step at collectives only: between two of them each goes at its own pace."""
        return sum(stretch.cost_s(fractions, self.template.members.kinds) for stretch in self.stretches())


@dataclass(frozen=True, slots=True)
class Stretch:
    """Collectives, and what devices do between them and the next."""

    tolls: tuple[Toll, ...]
    ways: tuple[OpenWay, ...]

    def cost_s(self, fractions: Fractions, kinds: int) -> float:
        forward = max(sum(way.forward_s(fractions, k) for way in self.ways) for k in range(kinds))
        backward = max(sum(way.backward_s(fractions, k) for way in self.ways) for k in range(kinds))
        moved = sum(toll.seconds(fractions) for toll in self.tolls)
        return forward + backward + moved + sum(way.once_s for way in self.ways)


def chosen(template: Template, numbers: Sequence[Sequence[int]], solution: Solution) -> Chosen:
    """What a solution of `template.at(...)` means."""
    ways = tuple(able[way] for able, way in zip(numbers, solution.ways, strict=True))
    return Chosen(template, ways, solution.before, solution.after)


def straight(weights: Sequence[float], members: Members, cuts: int) -> Fractions:
    """Fractions without rounding: every cut is held in proportion to `weights`, one for each position."""
    total = sum(weights)
    return _fractions({number: [weight / total for weight in weights] for number in range(cuts)}, members)


def _fractions(held: Mapping[int, Sequence[float]], members: Members) -> Fractions:
    worst: dict[int, tuple[float, ...]] = {WHOLE_CUT: (1.0,) * members.kinds}
    padding = {WHOLE_CUT: 1.0}
    for number, each in held.items():
        if min(each) <= 0:
            continue
        worst[number] = tuple(
            max(part for part, kind in zip(each, members.kind, strict=True) if kind == number_)
            for number_ in range(members.kinds)
        )
        padding[number] = len(each) * max(each)
    return Fractions(worst, padding)
