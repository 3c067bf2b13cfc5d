"""A program to be searched, with every cost as a function of the shares.

On one kind of device a pass of an operator takes the larger of a few straight lines in the device's fraction of what is
split (computing and moving, roofline); a padded collective is a straight line in n x the largest fraction. With
fractions put in it is a problem for `frontier`; with a solution put in it is a linear program for `shares`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipefit.cost.comm.lowerings import Lowered, Parts
from pipefit.layout import split
from pipefit.shard.conversions import Conversions
from pipefit.shard.frontier import Move, Problem, Solution, Step, Way

Line = tuple[float, float]
"""Seconds = first + second x fraction."""

Lines = tuple[Line, ...]
"""The largest of them counts; none is 0 s."""

WHOLE_CUT = -1
"""The cut of what is not split. Every other cut is a number of units, the same in all layers; 0 is any fraction."""


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
    parts: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    "By cut: every device's fraction."


@dataclass(frozen=True, slots=True)
class Toll:
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

    ahead: tuple[Lowered, ...] = ()
    "Lowerings of its collective."
    back: tuple[Lowered, ...] = ()
    "And of what its backward does."
    earlier: int = WHOLE_CUT
    "Of an all-to-all, the cut of what was split before."

    def able(self, fractions: Fractions) -> bool:
        """Whether these fractions leave every device a unit of its cuts."""
        return self.cut in fractions.worst and self.earlier in fractions.worst

    def seconds(self, fractions: Fractions) -> float:
        seconds = self.line[0] + self.line[1] * fractions.padding[self.cut]
        for one, parts in self.lowerings(fractions):
            seconds += one.seconds(*parts)
        return seconds

    def lowerings(self, fractions: Fractions) -> tuple[tuple[Lowered, tuple[Parts, ...]], ...]:
        """The cheapest of them with these fractions, forward and backward, each with the parts that it moves; none
        where nothing is to be chosen."""
        if not self.ahead:
            return ()
        parts: tuple[Parts, ...] = (fractions.parts[self.cut],)
        if self.earlier != WHOLE_CUT:
            parts = (fractions.parts[self.earlier], *parts)
        ways = (self.ahead, parts), (self.back, parts[::-1])
        return tuple((_cheapest(each, moved), moved) for each, moved in ways)

    def how(self, fractions: Fractions) -> str:
        """The cheapest lowerings in a word: `grouped`, or `padded+alltoallv` where the backward has another one; ''
        where nothing is to be chosen, or both are padded."""
        names = tuple(dict.fromkeys(one.name for one, _ in self.lowerings(fractions)))
        return "" if names in ((), ("padded",)) else "+".join(names)


def _cheapest(ways: Sequence[Lowered], parts: tuple[Parts, ...]) -> Lowered:
    """The first whose price no other is really below: sums in another order round otherwise."""
    least = min(one.seconds(*parts) for one in ways)
    return next(one for one in ways if one.seconds(*parts) <= least * (1 + 1e-9))


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
    held: Line = (0.0, 0.0)
    "Bytes that stay on a device: a parameter with gradient and state, or what the backward needs."
    talk: Toll | None = None
    "Collectives inside the operator, forward and backward."

    def forward_s(self, fractions: Fractions, kind: int) -> float:
        return self._pass_s(0, fractions, kind)

    def backward_s(self, fractions: Fractions, kind: int) -> float:
        return self._pass_s(1, fractions, kind) + self._pass_s(2, fractions, kind)

    def _pass_s(self, number: int, fractions: Fractions, kind: int) -> float:
        if not self.passes:
            return 0.0
        held = fractions.worst[self.cut][kind]
        return max((first + second * held for first, second in self.passes[number][kind]), default=0.0)

    def cost_s(self, fractions: Fractions, kinds: int, exposed: float = 1.0) -> float:
        """The slowest device's forward and its backward, the reduction, and what of what comes once is `exposed`."""
        toll_s = sum(toll.seconds(fractions) for toll in (self.toll, self.talk) if toll)
        each = range(kinds)
        slowest = max(self.forward_s(fractions, k) for k in each) + max(self.backward_s(fractions, k) for k in each)
        return slowest + toll_s + exposed * self.once_s


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
    given: Mapping[int, int]
    wanted: Mapping[int, int]

    def at(
        self, fractions: Fractions, byte_price_s: float = 0.0, exposed: float = 1.0
    ) -> tuple[Problem, tuple[tuple[int, ...], ...]]:
        """The problem for these fractions, and for every step the numbers of the ways that are possible with them.
        `byte_price_s` makes every byte that stays cost so many seconds, where memory is scarce; reductions of gradients
        count as far as they are `exposed`."""

        def held_s(one: OpenWay | Toll) -> float:
            return byte_price_s * (one.held[0] + one.held[1] * max(fractions.worst[one.cut])) if byte_price_s else 0.0

        def ways_at(ways: tuple[OpenWay, ...]) -> tuple[tuple[Way, ...], tuple[int, ...]]:
            able = tuple(
                number
                for number, way in enumerate(ways)
                if way.cut in fractions.worst
                and all(toll.able(fractions) for toll in (way.toll, way.talk) if toll is not None)
            )
            costs = [ways[n].cost_s(fractions, self.members.kinds, exposed) + held_s(ways[n]) for n in able]
            found = tuple(Way(ways[n].needs, ways[n].gives, cost) for n, cost in zip(able, costs, strict=True))
            return found, able

        def tolls_at(tolls: Mapping[tuple[int, int], Toll]) -> Conversions:
            return {
                move: toll.seconds(fractions) + held_s(toll) for move, toll in tolls.items() if toll.able(fractions)
            }

        each = {id(step.ways): step.ways for step in self.steps}  # steps that are alike have the same ways
        priced = {key: ways_at(ways) for key, ways in each.items()}
        steps = [Step(step.inputs, step.output, priced[id(step.ways)][0]) for step in self.steps]
        numbers = [priced[id(step.ways)][1] for step in self.steps]
        moves = {key: tolls_at(tolls) for key, tolls in {id(tolls): tolls for tolls in self.tolls}.items()}
        conversions = [moves[id(tolls)] for tolls in self.tolls]
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
            if way.talk is not None:
                meet(way.talk)
            ways.append(way)
            if way.toll is not None:
                meet(way.toll)
        for value, source, target in self.after:
            meet(self.template.tolls[value][source, target])
        return [*found, Stretch(tuple(tolls), tuple(ways))]

    def parts(self) -> list[OpenWay | Toll]:
        """The ways and the conversions that were chosen."""
        ways: list[OpenWay | Toll] = [
            step.ways[number] for step, number in zip(self.template.steps, self.ways, strict=True)
        ]
        moves = [move for each in (*self.before, self.after) for move in each]
        return [*ways, *(self.template.tolls[value][source, target] for value, source, target in moves)]


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


def held_fractions(cuts: Iterable[int], shares: Sequence[float], members: Members) -> Fractions:
    """What the devices hold of these cuts: whole units, as the runtime cuts them; shares are whole numbers then."""
    worst: dict[int, tuple[float, ...]] = {WHOLE_CUT: (1.0,) * members.kinds}
    padding = {WHOLE_CUT: 1.0}
    parts: dict[int, tuple[float, ...]] = {}
    for units in cuts:
        if units:
            each = [(stop - start) / units for start, stop in split(units, [int(share) for share in shares])]
        else:
            each = [share / sum(shares) for share in shares]
        if min(each) > 0:
            worst[units] = tuple(
                max(part for part, kind in zip(each, members.kind, strict=True) if kind == number)
                for number in range(members.kinds)
            )
            padding[units] = len(each) * max(each)
            parts[units] = tuple(each)
    return Fractions(worst, padding, parts)
