"""Exact search of the cheapest forms for all values of a program, by dynamic programming over the frontier.

Values with a single reader are eliminated first (`joining.py`), which leaves few steps of most programs. The remaining
steps are processed in order. The state holds, for every value still to be read, the set of forms in which it exists. A
value is converted when a form is first needed, and the result is kept, so a conversion is paid once for all readers.
Costs are additive, so the fixed order loses no optimum (reference: HAP's program synthesis, whose A* visits the same
states without an order; measurements in its notes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipefit.shard.conversions import BITS, Conversions, FormConverter
from pipefit.shard.joining import BlockJoiner, JointOption, Joints, KnownJoints, StepBlock

REPLICATED, PARTIAL = 0, 1
"""Forms are small integers here: I is 0, P is 1, G(d) is 2 + d."""

EVERYWHERE = 7
"""Form of a parameter that is replicated and has its full gradient on every device (in the slot of G(5), which no
parameter has).
"""

ALL = (1 << BITS) - 1
"""The set of all forms of one value."""

COMPARED = 32
"""Number of cheapest states with which every state is compared to prune it."""


def form_number_along(dim: int) -> int:
    """Return the number of the form G(dim)."""
    return 2 + dim


class PricedOption(NamedTuple):
    """One way to compute an operator, with its cost."""

    needs: tuple[int, ...]
    "The required form of every input."
    gives: int
    "The form of its output."
    cost_s: float


@dataclass(frozen=True, slots=True)
class PricedStep:
    """One operator, or (without inputs) a parameter that chooses its form."""

    inputs: tuple[int, ...]
    "Numbers of values; a value may occur twice."
    output: int
    ways: tuple[PricedOption, ...]


Move = tuple[int, int, int]
"""A conversion: (value, from form, to form)."""


class KnownParts:
    """Converters and joined options shared by problems whose steps and conversions are mostly the same objects.

    The keys contain identities, so the values hold the objects.
    """

    def __init__(self) -> None:
        self._by_identity: dict[int, tuple[Conversions, FormConverter]] = {}
        self._by_items: dict[object, FormConverter] = {}
        self.options: dict[object, tuple[Joints, tuple[PricedOption, ...]]] = {}
        "Undominated options of single steps."
        self.joints: KnownJoints = {}

    def find_converter(self, conversions: Conversions) -> FormConverter:
        """Return the converter of a value; values with equal conversions share one."""
        key = id(conversions)
        if key not in self._by_identity:
            items = tuple(conversions.items())
            if items not in self._by_items:
                self._by_items[items] = FormConverter(conversions)
            self._by_identity[key] = conversions, self._by_items[items]
        return self._by_identity[key][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormProblem:
    """A program with the prices of all options and conversions."""

    steps: tuple[PricedStep, ...]
    conversions: tuple[Conversions, ...]
    "Conversions of every value, by its number."
    given: Mapping[int, int]
    "The forms of incoming values."
    wanted: Mapping[int, int] = field(default_factory=dict)
    "The required forms of outgoing values."
    parts: KnownParts = field(default_factory=KnownParts, compare=False, repr=False)
    "Results that similar problems share."


@dataclass(frozen=True, slots=True, kw_only=True)
class FormSolution:
    """A cheapest program."""

    cost_s: float
    ways: tuple[int, ...]
    "The number of the chosen option of every step."
    before: tuple[tuple[Move, ...], ...]
    "The conversions before every step, in order."
    after: tuple[Move, ...]
    "The conversions of outgoing values."


_Trail = tuple["_Trail", int] | None
"""The history of a state: the trail of its predecessor, and the option of the last block."""

_States = Mapping[int, tuple[float, _Trail]]


@dataclass(frozen=True, slots=True)
class PendingSolution:
    """A cheapest program whose options and conversions are not listed yet: most are never used."""

    problem: FormProblem
    converters: Sequence[FormConverter]
    ends: tuple[Mapping[int, int], Mapping[int, int]]
    cost_s: float
    blocks: Sequence[StepBlock]
    trail: _Trail

    def build_solution(self) -> FormSolution:
        """Return the program."""
        picks = _trace_picks(self.blocks, self.trail)
        return _build_solution(self.problem, self.converters, self.ends, self.cost_s, picks)


def solve_program(problem: FormProblem) -> FormSolution | None:
    """Return the cheapest program, or None if there is none."""
    pending = solve_between(problem, [problem.given], [problem.wanted]).get((0, 0))
    return None if pending is None else pending.build_solution()


def solve_between(
    problem: FormProblem, starts: Sequence[Mapping[int, int]], ends: Sequence[Mapping[int, int]]
) -> dict[tuple[int, int], PendingSolution]:
    """Return the cheapest program for each pair (index in `starts`, index in `ends`) that has one, mostly in one pass.

    `starts` are alternative forms of incoming values (instead of `problem.given`), `ends` of outgoing values. All
    `starts` name the same values, and so do all `ends`.
    """
    converters = [problem.parts.find_converter(conversions) for conversions in problem.conversions]
    fixed = {value: form for value, form in starts[0].items() if all(start[value] == form for start in starts)}
    joiner = BlockJoiner(converters, fixed, frozenset(ends[0]), problem.parts.joints)
    blocks = joiner.join_blocks(_build_blocks(problem, converters, joiner))
    solutions: dict[tuple[int, int], PendingSolution] = {}
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
                solutions[first, second] = PendingSolution(problem, converters, (start, end), cost, blocks, trail)
    return solutions


def _build_blocks(problem: FormProblem, converters: Sequence[FormConverter], joiner: BlockJoiner) -> list[StepBlock]:
    """Return every step as a block; equal steps share their options."""
    known = problem.parts.options
    blocks = []
    for index, step in enumerate(problem.steps):
        inputs = tuple(dict.fromkeys(step.inputs))
        slots = tuple(inputs.index(value) for value in step.inputs)
        key = id(step.ways), slots, tuple(id(converters[value]) for value in (*inputs, step.output))
        if key not in known:
            block = StepBlock(inputs, step.output, _build_joints(step.ways, slots, len(inputs)), index)
            known[key] = joiner.drop_dominated(block).ways, step.ways
        blocks.append(StepBlock(inputs, step.output, known[key][0], index))
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
    """The states of the search: for every live value, the set of its forms in its own bit slot."""

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
        "Live value -> its bit position in the state."
        self.free: list[int] = []

    def start_state(self, given: Mapping[int, int]) -> int:
        state = 0
        for value, form in given.items():
            if value in self.last:
                state |= 1 << (self._take_slot(value) + form)
        return state

    def advance_states(self, place: int, block: StepBlock, states: _States) -> _States:
        """Return the states after a block."""
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
        """Return the states without dominated ones.

        A state is dominated if a cheaper state, plus the conversions to all its forms, costs no more.
        """
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
        """Return whether conversions for at most `budget_s` give `state` all forms of `wanted`."""
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
        """Yield (state, seconds) of every possibly optimal way to satisfy all `needs` (value, set of forms)."""
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
    """Return the option of every step, by its index."""
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
    """Return the program with these options between given incoming and outgoing forms.

    Every value is converted by its cheapest tree, when a form is first needed.
    """
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
        """Yield the missing conversions for a form, in order."""
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
