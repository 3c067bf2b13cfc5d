"""Joining of program steps along values with a single reader: the same optimum with far fewer steps.

If a value has one reader, its forms matter to no other step. For every pair of options of its maker and its reader the
cheapest conversion is known, so both become one step with the remaining options (variable elimination, as in
probabilistic networks: Bertele and Brioschi, 1972). Parameters are absorbed by their readers, branches by their sums,
and a chain of layers becomes one step. Dominated options are dropped. Equal parts of a program, such as repeated
layers, are joined once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipefit.shard.conversions import FormConverter

MAX_OPTION_PAIRS = 40_000
"""Largest number of option pairs for joining two steps; beyond it the search over states is cheaper."""


class JointOption(NamedTuple):
    """One way to compute all steps of a block."""

    needs: tuple[int, ...]
    "The set of forms read, for every input."
    gives: int
    cost_s: float
    parts: tuple[int, int]
    "Option numbers of the two joined blocks (maker, reader); for a single step (its option, -1)."


Joints = tuple[JointOption, ...]

KnownJoints = dict[object, tuple[Joints, tuple[object, ...]]]
"""Options of pairs of blocks. Their keys contain identities, so the second part of a value holds the objects."""


@dataclass(frozen=True, slots=True, eq=False)
class StepBlock:
    """One step, or several joined steps."""

    inputs: tuple[int, ...]
    "Distinct input values."
    output: int
    ways: Joints
    place: int
    "Index of the last step in the block."
    joined: tuple[StepBlock, StepBlock] | None = None
    "The joined maker and reader; None for a single step."

    def step_picks(self, number: int) -> Iterable[tuple[int, int]]:
        """Yield (index, option number) of every step in the block."""
        waiting: list[tuple[StepBlock, int]] = [(self, number)]
        while waiting:
            block, option = waiting.pop()
            first, second = block.ways[option].parts
            if block.joined is None:
                yield block.place, first
            else:
                waiting += [(block.joined[0], first), (block.joined[1], second)]


@dataclass
class BlockJoiner:
    """Joins the blocks of one program."""

    converters: Sequence[FormConverter]
    "The converter of every value; values with equal conversions share one."
    given: Mapping[int, int]
    kept: frozenset[int]
    "Outgoing values."
    joints: KnownJoints = field(default_factory=dict)
    "Joined options, which may be shared with other programs."

    def join_blocks(self, blocks: Sequence[StepBlock]) -> list[StepBlock]:
        """Return the program without values that have a single reader, unless the joined block would have too many
        options.
        """
        readers: dict[int, set[int]] = defaultdict(set)
        for block in blocks:
            for value in block.inputs:
                readers[value].add(block.place)
        makers: dict[int, StepBlock] = {}
        left: dict[int, StepBlock] = {}
        for block in blocks:
            refused: set[int] = set()
            while True:
                able = [v for v in block.inputs if len(readers[v]) == 1 and v not in self.kept and v not in refused]
                value = next((v for v in able if v in makers or v in self.given), -1)
                if value < 0:
                    break
                maker = makers.get(value)
                if maker is None:
                    block = self._feed_value(block, value)
                    continue
                if len(maker.ways) * len(block.ways) > MAX_OPTION_PAIRS:
                    refused.add(value)
                    continue
                for operand in maker.inputs:
                    readers[operand] = readers[operand] - {maker.place} | {block.place}
                del left[maker.place]
                block = self._join_pair(maker, block, value)
            left[block.place] = makers[block.output] = block
        return list(left.values())

    def drop_dominated(self, block: StepBlock) -> StepBlock:
        """Return the block without dominated options."""
        options = self._undominated_options(block.ways, block.inputs, block.output)
        return StepBlock(block.inputs, block.output, options, block.place, block.joined)

    def _feed_value(self, block: StepBlock, value: int) -> StepBlock:
        """Return the block with the conversions of an incoming value included."""
        slot = block.inputs.index(value)
        have, converter = 1 << self.given[value], self.converters[value]
        best: dict[tuple[int, tuple[int, ...]], JointOption] = {}
        for option in block.ways:
            seconds = option.cost_s + converter.cheapest_s(have, option.needs[slot])
            key = option.gives, option.needs[:slot] + option.needs[slot + 1 :]
            if seconds < (best[key].cost_s if key in best else float("inf")):
                best[key] = JointOption(key[1], option.gives, seconds, option.parts)
        inputs = block.inputs[:slot] + block.inputs[slot + 1 :]
        options = self._undominated_options(tuple(best.values()), inputs, block.output)
        return StepBlock(inputs, block.output, options, block.place, block.joined)

    def _join_pair(self, maker: StepBlock, reader: StepBlock, value: int) -> StepBlock:
        slot = reader.inputs.index(value)
        around = [operand for operand in reader.inputs if operand != value]
        inputs = tuple(dict.fromkeys((*around, *maker.inputs)))
        places = tuple(map(inputs.index, maker.inputs)), tuple(map(inputs.index, around))
        kin = tuple(self.converters[v] for v in (value, *inputs, reader.output))
        key = id(maker.ways), id(reader.ways), slot, places, tuple(map(id, kin))
        if key not in self.joints:
            pairs = _pair_options(maker.ways, reader.ways, slot, places, len(inputs), self.converters[value])
            options = self._undominated_options(pairs, inputs, reader.output)
            self.joints[key] = options, (maker.ways, reader.ways, kin)
        return StepBlock(inputs, reader.output, self.joints[key][0], reader.place, (maker, reader))

    def _undominated_options(self, ways: Joints, inputs: Sequence[int], output: int) -> Joints:
        """Return the options without those that another option, plus conversions, can replace at no extra cost."""
        between_s = self.converters[output].between_s
        bounds = [self.converters[value].bound_s for value in inputs]
        undominated: list[JointOption] = []
        rivals: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
        "By result: (cost, needs) of the options above, which get dearer."
        for option in sorted(ways, key=lambda one: one.cost_s):
            needs, gives, cost_s, _ = option
            if any(
                _is_replaceable(cost_s, needs, cheaper, between_s[form][gives], bounds)
                for form, cheaper in rivals.items()
            ):
                continue
            undominated.append(option)
            rivals.setdefault(gives, []).append((cost_s, needs))
        return tuple(undominated)


def _is_replaceable(
    cost_s: float,
    needs: tuple[int, ...],
    rivals: Sequence[tuple[float, tuple[int, ...]]],
    output_s: float,
    bounds: Sequence[Callable[[int, int], float]],
) -> bool:
    """Return whether a rival, plus conversions, costs no more than an option with these needs.

    `rivals` are (cost, needs), which get dearer. `output_s` are the seconds to convert their result, and `bounds` give
    the seconds to convert every input.
    """
    for rival_s, wanted in rivals:
        left_s = cost_s - rival_s - output_s
        if left_s < 0:
            return False
        if wanted == needs:
            return True
        for bound_s, have, want in zip(bounds, needs, wanted, strict=True):
            if want & ~have:
                left_s -= bound_s(have, want)
                if left_s < 0:
                    break
        else:
            return True
    return False


def _pair_options(
    makers: Joints,
    readers: Joints,
    own: int,
    places: tuple[tuple[int, ...], tuple[int, ...]],
    count: int,
    converter: FormConverter,
) -> Joints:
    """Return all pairs of options of maker and reader, the cheapest for each combination of needs and result.

    `own` is the reader's input that the maker produces; `places` are the slots of the inputs of maker and reader among
    `count` inputs.
    """
    by_form: dict[int, list[tuple[int, float, tuple[int, ...]]]] = defaultdict(list)
    for number, maker in enumerate(makers):
        by_form[maker.gives].append((number, maker.cost_s, maker.needs))
    from_maker, from_reader = places
    apart = from_reader + from_maker == tuple(range(count))
    best: dict[tuple[int, tuple[int, ...]], tuple[float, int, int]] = {}
    for second, reader in enumerate(readers):
        gives, wanted = reader.gives, reader.needs[own]
        around = reader.needs[:own] + reader.needs[own + 1 :]
        for form, options in by_form.items():
            base_s = reader.cost_s + converter.cheapest_s(1 << form, wanted)
            if base_s == float("inf"):
                continue
            for first, maker_s, needs in options:
                both = around + needs if apart else _united_needs(around, from_reader, needs, from_maker, count)
                key = gives, both
                seconds = base_s + maker_s
                if key not in best or seconds < best[key][0]:
                    best[key] = seconds, first, second
    return tuple(JointOption(needs, gives, seconds, (a, b)) for (gives, needs), (seconds, a, b) in best.items())


def _united_needs(
    around: tuple[int, ...], around_slots: tuple[int, ...], needs: tuple[int, ...], slots: tuple[int, ...], count: int
) -> tuple[int, ...]:
    """Return the sets of forms read by two blocks, at these slots among `count` inputs."""
    united = [0] * count
    for slot, mask in zip(around_slots + slots, around + needs, strict=True):
        united[slot] |= mask
    return tuple(united)
