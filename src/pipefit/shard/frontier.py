"""The cheapest forms for all values of a program, exactly, by dynamic programming over the frontier.

Values that one operator alone reads are joined away first (`joining.py`), which leaves little of most programs. What
is left is taken in order. What matters of the past is in which forms every value is held that is still to be read: that
is the state. A value is converted when it is first needed in a form, and what it was converted to stays, so a
conversion is paid once and shared by all that read it. Costs add up, so fixing the order loses nothing (reference:
HAP's program synthesis, whose A* visits the same states in no order; measurements in its notes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipefit.shard.conversions import BITS, Conversions, FormConverter
from pipefit.shard.joining import BlockJoiner, JointOption, Joints, StepBlock

WHOLE, PARTIAL = 0, 1
"""Forms are small numbers here: I is 0, P is 1, G(d) is 2 + d."""

ALIKE = 7
"""Of a parameter: whole, and so is its gradient on every device (in the place of G(5), which no parameter has)."""

ALL = (1 << BITS) - 1
"""Every form of one value."""

COMPARED = 32
"""The cheapest states that every other is compared with, to drop what they can become for no more."""


def form_number_along(dim: int) -> int:
    """The form G(dim)."""
    return 2 + dim


@dataclass(frozen=True, slots=True)
class PricedOption:
    """One way to compute an operator."""

    needs: tuple[int, ...]
    "The form of every input."
    gives: int
    "The form of its output."
    cost_s: float


@dataclass(frozen=True, slots=True)
class PricedStep:
    """One operator, or (without inputs) a parameter that chooses its form."""

    inputs: tuple[int, ...]
    "Numbers of values; one may come twice."
    output: int
    ways: tuple[PricedOption, ...]


Move = tuple[int, int, int]
"""A conversion: (value, from form, to form)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormProblem:
    """A program with everything priced."""

    steps: tuple[PricedStep, ...]
    conversions: tuple[Conversions, ...]
    "Of every value, by its number."
    given: Mapping[int, int]
    "The forms of values that come from outside."
    wanted: Mapping[int, int] = field(default_factory=dict)
    "The forms in which values are handed on."


@dataclass(frozen=True, slots=True, kw_only=True)
class FormSolution:
    """A cheapest program."""

    cost_s: float
    ways: tuple[int, ...]
    "Of every step: the number of its way."
    before: tuple[tuple[Move, ...], ...]
    "Of every step: the conversions in front of it, in order."
    after: tuple[Move, ...]
    "The conversions of what is handed on."


_Trail = tuple["_Trail", int] | None
"""How a state was reached: as the one before, and with which way of the last block."""

_States = Mapping[int, tuple[float, _Trail]]


def solve_program(problem: FormProblem) -> FormSolution | None:
    """The cheapest program; None where there is none."""
    return solve_between(problem, [problem.given], [problem.wanted]).get((0, 0))


def solve_between(
    problem: FormProblem, starts: Sequence[Mapping[int, int]], ends: Sequence[Mapping[int, int]]
) -> dict[tuple[int, int], FormSolution]:
    """The cheapest program for each of several forms of values that come in (in place of `problem.given`) and ways to
    hand values on, most of it in one pass: by their numbers, where there is one.

    All `starts` name the same values, and so do all `ends`.
    """
    converters = _build_converters(problem)
    fixed = {value: form for value, form in starts[0].items() if all(start[value] == form for start in starts)}
    joiner = BlockJoiner(converters, fixed, frozenset(ends[0]))
    blocks = joiner.join_blocks(_build_blocks(problem, converters, joiner))
    solutions: dict[tuple[int, int], FormSolution] = {}
    for first, start in enumerate(starts):
        frontier = _FormFrontier(blocks, converters, frozenset(ends[0]))
        states: _States = {frontier.start_state(start): (0.0, None)}
        for index, block in enumerate(blocks):
            states = frontier.advance_states(index, block, states)
        for second, end in enumerate(ends):
            needs = tuple((value, 1 << form) for value, form in end.items())
            able = [
                (cost + extra, trail)
                for state, (cost, trail) in states.items()
                for _, extra in frontier.reachable_states(state, needs)
            ]
            if able:
                cost, trail = min(able, key=lambda one: one[0])
                solutions[first, second] = _build_solution(
                    problem, converters, (start, end), cost, _trace_picks(blocks, trail)
                )
    return solutions


def _build_converters(problem: FormProblem) -> list[FormConverter]:
    """Of every value; values with equal conversions share one."""
    known: dict[object, FormConverter] = {}
    converters = []
    for conversions in problem.conversions:
        key = tuple(conversions.items())
        if key not in known:
            known[key] = FormConverter(conversions)
        converters.append(known[key])
    return converters


def _build_blocks(problem: FormProblem, converters: Sequence[FormConverter], joiner: BlockJoiner) -> list[StepBlock]:
    """Every step as a block; equal ones share their ways."""
    known: dict[object, Joints] = {}
    blocks = []
    for index, step in enumerate(problem.steps):
        inputs = tuple(dict.fromkeys(step.inputs))
        slots = tuple(inputs.index(value) for value in step.inputs)
        key = step.ways, slots, tuple(id(converters[value]) for value in (*inputs, step.output))
        if key not in known:
            block = StepBlock(inputs, step.output, _build_joints(step.ways, slots, len(inputs)), index)
            known[key] = joiner.drop_dominated(block).ways
        blocks.append(StepBlock(inputs, step.output, known[key], index))
    return blocks


def _build_joints(ways: Sequence[PricedOption], slots: tuple[int, ...], count: int) -> Joints:
    joints = []
    for number, option in enumerate(ways):
        needs = [0] * count
        for slot, form in zip(slots, option.needs, strict=True):
            needs[slot] |= 1 << form
        joints.append(JointOption(tuple(needs), option.gives, option.cost_s, (number, -1)))
    return tuple(joints)


class _FormFrontier:
    """The states of the search: for every value that is alive, the set of its forms, in a place of its own."""

    def __init__(
        self, blocks: Sequence[StepBlock], converters: Sequence[FormConverter], wanted: frozenset[int]
    ) -> None:
        self.converters = converters
        self.last: dict[int, int] = {}
        for index, block in enumerate(blocks):
            for value in block.inputs:
                self.last[value] = index
        for value in wanted:
            self.last[value] = len(blocks)
        self.slots: dict[int, int] = {}
        "Value -> its place in the state, while it is alive."
        self.free: list[int] = []

    def start_state(self, given: Mapping[int, int]) -> int:
        state = 0
        for value, form in given.items():
            if value in self.last:
                state |= 1 << (self._take_slot(value) + form)
        return state

    def advance_states(self, place: int, block: StepBlock, states: _States) -> _States:
        """The states after a block."""
        dying = [value for value in block.inputs if self.last[value] == place]
        drop = 0
        for value in dying:
            drop |= ALL << self.slots[value]
        successors: list[tuple[int, float, int, _Trail]] = []
        for number, option in enumerate(block.ways):
            needs = tuple(zip(block.inputs, option.needs, strict=True))
            for state, (cost, trail) in states.items():
                for reached, extra in self.reachable_states(state, needs):
                    successors.append((reached & ~drop, cost + extra + option.cost_s, number, trail))
        for value in dying:
            self.free.append(self.slots.pop(value))
        keeps = block.output in self.last
        slot = self._take_slot(block.output) if keeps else 0
        after: dict[int, tuple[float, _Trail]] = {}
        for state, cost, number, trail in successors:
            if keeps:
                state |= 1 << (slot + block.ways[number].gives)
            if state not in after or cost < after[state][0]:
                after[state] = cost, (trail, number)
        return self._drop_dominated(after)

    def _drop_dominated(self, states: _States) -> _States:
        """Without states that cost as much as a cheaper one with the conversions that make it hold all they hold."""
        undominated: dict[int, tuple[float, _Trail]] = {}
        cheapest: list[tuple[int, float]] = []
        for state, reached in sorted(states.items(), key=lambda item: item[1][0]):
            if any(self._can_hold(cheaper, state, reached[0] - cost) for cheaper, cost in cheapest):
                continue
            undominated[state] = reached
            if len(cheapest) < COMPARED:
                cheapest.append((state, reached[0]))
        return undominated

    def _can_hold(self, state: int, wanted: int, budget_s: float) -> bool:
        """Whether conversions for no more than this make a state hold all that another one holds."""
        if not wanted & ~state:
            return True
        for value, slot in self.slots.items():
            have, want = state >> slot & ALL, wanted >> slot & ALL
            if want & ~have:
                budget_s -= self.converters[value].bound_s(have, want)
                if budget_s < 0:
                    return False
        return True

    def reachable_states(self, state: int, needs: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, float]]:
        """Every way to have all of `needs` (value, set of forms) that may be the best: (state, seconds)."""
        if not needs:
            yield state, 0.0
            return
        (value, want), rest = needs[0], needs[1:]
        slot = self.slots[value]
        for more, seconds in self.converters[value].conversion_options(state >> slot & ALL, want):
            for final, others_s in self.reachable_states(state | more << slot, rest):
                yield final, seconds + others_s

    def _take_slot(self, value: int) -> int:
        self.slots[value] = self.free.pop() if self.free else BITS * len(self.slots)
        return self.slots[value]


def _trace_picks(blocks: Sequence[StepBlock], trail: _Trail) -> dict[int, int]:
    """The way of every step, by its place."""
    picks: dict[int, int] = {}
    for block in reversed(blocks):
        assert trail is not None
        trail, number = trail
        picks.update(block.step_picks(number))
    return picks


def _build_solution(
    problem: FormProblem,
    converters: Sequence[FormConverter],
    ends: tuple[Mapping[int, int], Mapping[int, int]],
    cost_s: float,
    picks: Mapping[int, int],
) -> FormSolution:
    """The program of these ways, between the forms of what comes in and goes out: every value converted by its cheapest
    tree, when a form is first needed."""
    start, end = ends
    option_numbers = tuple(picks[index] for index in range(len(problem.steps)))
    held = {value: 1 << form for value, form in start.items()}
    wanted: dict[int, int] = {value: 1 << form for value, form in end.items()}
    for step, number in zip(problem.steps, option_numbers, strict=True):
        held[step.output] = 1 << step.ways[number].gives
        for value, form in zip(step.inputs, step.ways[number].needs, strict=True):
            wanted[value] = wanted.get(value, 0) | 1 << form
    trees = {value: converters[value].conversion_tree(held[value], want) for value, want in wanted.items()}

    def missing_moves(value: int, form: int) -> Iterator[Move]:
        """What is missing for a form, in order."""
        if not held[value] >> form & 1:
            source = trees[value][form]
            yield from missing_moves(value, source)
            held[value] |= 1 << form
            yield value, source, form

    before = tuple(
        tuple(
            move
            for value, form in zip(step.inputs, step.ways[number].needs, strict=True)
            for move in missing_moves(value, form)
        )
        for step, number in zip(problem.steps, option_numbers, strict=True)
    )
    after = tuple(move for value, form in end.items() for move in missing_moves(value, form))
    return FormSolution(cost_s=cost_s, ways=option_numbers, before=before, after=after)
