"""The cheapest forms for all values of a program, exactly, by dynamic programming over the frontier.

Operators are taken in order. What matters of the past is in which forms every value is held that is still to be read:
that is the state. A value is converted when it is first needed in a form, and what it was converted to stays, so a
conversion is paid once and shared by all that read it. Costs add up, so fixing the order loses nothing (reference:
HAP's program synthesis, whose A* visits the same states in no order; measurements in its notes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

WHOLE, PARTIAL = 0, 1
"""Forms are small numbers here: I is 0, P is 1, G(d) is 2 + d."""

ALIKE = 7
"""Of a parameter: whole, and so is its gradient on every device (in the place of G(5), which no parameter has)."""

BITS = 8
"""Of the state, for each value: G(5) is the last form."""

ALL = (1 << BITS) - 1
"""Every form of one value."""

COMPARED = 8
"""The cheapest states that every other is compared with, to drop what they can become for no more."""


def split_along(dim: int) -> int:
    """The form G(dim)."""
    return 2 + dim


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute an operator."""

    needs: tuple[int, ...]
    "The form of every input."
    gives: int
    "The form of its output."
    cost_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """One operator, or (without inputs) a parameter that chooses its form."""

    inputs: tuple[int, ...]
    "Numbers of values; one may come twice."
    output: int
    ways: tuple[Way, ...]


Move = tuple[int, int, int]
"""A conversion: (value, from form, to form)."""

Conversions = Mapping[tuple[int, int], float]
"""(from form, to form) -> seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A program with everything priced."""

    steps: tuple[Step, ...]
    conversions: tuple[Conversions, ...]
    "Of every value, by its number."
    given: Mapping[int, int]
    "The forms of values that come from outside."
    wanted: Mapping[int, int] = field(default_factory=dict)
    "The forms in which values are handed on."


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A cheapest program."""

    cost_s: float
    ways: tuple[int, ...]
    "Of every step: the number of its way."
    before: tuple[tuple[Move, ...], ...]
    "Of every step: the conversions in front of it, in order."
    after: tuple[Move, ...]
    "The conversions of what is handed on."


@dataclass(slots=True)
class _Trail:
    """How a state was reached."""

    earlier: _Trail | None
    way: int
    moves: tuple[Move, ...]


def solve(problem: Problem) -> Solution | None:
    """The cheapest program; None where there is none."""
    return next(iter(solve_ends(problem, [problem.wanted]).values()), None)


def solve_ends(problem: Problem, ends: Sequence[Mapping[int, int]]) -> dict[int, Solution]:
    """The cheapest program for each of several ways to hand values on, in one pass: by number, where there is one.

    All `ends` name the same values.
    """
    frontier = _Frontier(problem, ends)
    states: dict[int, tuple[float, _Trail | None]] = {frontier.start(): (0.0, None)}
    for place, step in enumerate(problem.steps):
        states = frontier.advance(place, step, states)
    found: dict[int, Solution] = {}
    for number, end in enumerate(ends):
        best: tuple[float, _Trail] | None = None
        for state, (cost, trail) in states.items():
            for _, extra, moves in frontier.reached(state, tuple(end.items())):
                if best is None or cost + extra < best[0]:
                    best = cost + extra, _Trail(trail, -1, moves)
        if best is not None:
            found[number] = _solution(*best)
    return found


class _Frontier:
    def __init__(self, problem: Problem, ends: Sequence[Mapping[int, int]]) -> None:
        self.problem = problem
        self.last: dict[int, int] = {}
        for place, step in enumerate(problem.steps):
            for value in step.inputs:
                self.last[value] = place
        for value in ends[0]:
            self.last[value] = len(problem.steps)
        self.slots: dict[int, int] = {}
        "Value -> its place in the state, while it is alive."
        self.free: list[int] = []
        self.fills: dict[tuple[int, int, int], float] = {}
        self.known: dict[tuple[int, int, int], list[tuple[int, float, tuple[Move, ...]]]] = {}

    def start(self) -> int:
        state = 0
        for value, form in self.problem.given.items():
            if value in self.last:
                state |= 1 << (self._take(value) + form)
        return state

    def advance(
        self, place: int, step: Step, states: Mapping[int, tuple[float, _Trail | None]]
    ) -> dict[int, tuple[float, _Trail | None]]:
        """The states after a step."""
        held = {value: self.slots[value] for value in step.inputs}
        dying = [value for value in held if self.last[value] == place]
        drop = 0
        for value in dying:
            drop |= ALL << held[value]
        keeps = step.output in self.last
        after: dict[int, tuple[float, _Trail | None]] = {}
        made: list[tuple[int, float, int, _Trail | None, tuple[Move, ...]]] = []
        for state, (cost, trail) in states.items():
            for number, way in enumerate(step.ways):
                for reached, extra, moves in self.reached(state, tuple(zip(step.inputs, way.needs, strict=True))):
                    made.append((reached & ~drop, cost + extra + way.cost_s, number, trail, moves))
        for value in dying:
            self.free.append(self.slots.pop(value))
        slot = self._take(step.output) if keeps else 0
        for reached, cost, number, trail, moves in made:
            state = reached | (1 << (slot + step.ways[number].gives) if keeps else 0)
            if state not in after or cost < after[state][0]:
                after[state] = cost, _Trail(trail, number, moves)
        return self._undominated(after)

    def _undominated(self, states: Mapping[int, tuple[float, _Trail | None]]) -> dict[int, tuple[float, _Trail | None]]:
        """Without states that cost as much as a cheaper one with the conversions that make it hold all they hold."""
        kept: dict[int, tuple[float, _Trail | None]] = {}
        cheapest: list[tuple[int, float]] = []
        for state, reached in sorted(states.items(), key=lambda item: item[1][0]):
            if any(self._to_hold_s(other, state, reached[0] - cost) for other, cost in cheapest):
                continue
            kept[state] = reached
            if len(cheapest) < COMPARED:
                cheapest.append((state, reached[0]))
        return kept

    def _to_hold_s(self, state: int, wanted: int, budget_s: float) -> bool:
        """Whether conversions for no more than this make a state hold all that another one holds."""
        if not wanted & ~state:
            return True
        for value, slot in self.slots.items():
            have, want = state >> slot & ALL, wanted >> slot & ALL
            if want & ~have:
                key = (value, have, want)
                if key not in self.fills:
                    self.fills[key] = self._fill_s(value, have, want)
                budget_s -= self.fills[key]
                if budget_s < 0:
                    return False
        return True

    def _fill_s(self, value: int, mask: int, wanted: int) -> float:
        """Seconds of some conversions that add the wanted forms of a value; infinite where there are none."""
        total = 0.0
        for form in range(BITS):
            if wanted >> form & 1 and not mask >> form & 1:
                paths = self._paths(value, mask, form)
                if not paths:
                    return float("inf")
                mask, seconds, _ = paths[0]
                total += seconds
        return total

    def reached(self, state: int, needs: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, float, tuple[Move, ...]]]:
        """Every way to have all of `needs` (value, form): (state, seconds, conversions)."""
        if not needs:
            yield state, 0.0, ()
            return
        (value, form), rest = needs[0], needs[1:]
        slot = self.slots[value]
        mask = state >> slot & ALL
        for more, seconds, moves in self._paths(value, mask, form):
            for final, others_s, others in self.reached(state | more << slot, rest):
                yield final, seconds + others_s, (*moves, *others)

    def _paths(self, value: int, mask: int, form: int) -> list[tuple[int, float, tuple[Move, ...]]]:
        """Conversions that make `form` of a value from the forms in `mask`: (all forms then held, seconds, moves)."""
        key = (value, mask, form)
        if key not in self.known:
            found = sorted(self._walks(value, mask, form, 1 << form), key=lambda one: (one[1], len(one[2])))
            best: list[tuple[int, float, tuple[Move, ...]]] = []
            for one in found:
                if not any(one[0] & ~other[0] == 0 for other in best):
                    best.append(one)
            self.known[key] = best
        return self.known[key]

    def _walks(self, value: int, mask: int, form: int, passed: int) -> Iterator[tuple[int, float, tuple[Move, ...]]]:
        if mask >> form & 1:
            yield mask, 0.0, ()
            return
        for (source, target), seconds in self.problem.conversions[value].items():
            if target == form and not passed >> source & 1:
                for held, earlier_s, moves in self._walks(value, mask, source, passed | 1 << source):
                    yield held | 1 << form, earlier_s + seconds, (*moves, (value, source, form))

    def _take(self, value: int) -> int:
        self.slots[value] = self.free.pop() if self.free else BITS * len(self.slots)
        return self.slots[value]


def _solution(cost_s: float, trail: _Trail) -> Solution:
    ways: list[int] = []
    before: list[tuple[Move, ...]] = []
    after = trail.moves
    at = trail.earlier
    while at is not None:
        ways.append(at.way)
        before.append(at.moves)
        at = at.earlier
    return Solution(cost_s=cost_s, ways=tuple(reversed(ways)), before=tuple(reversed(before)), after=after)
