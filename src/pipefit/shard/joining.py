"""Joining of program steps along values with a single reader: the same optimum with far fewer steps.

If a value has one reader, its forms matter to no other step. For every pair of options of its maker and its reader the
cheapest conversion is known, so both become one step with the remaining options (variable elimination, as in
probabilistic networks: Bertele and Brioschi, 1972). Parameters are absorbed by their readers, branches by their sums,
and a chain of layers becomes one step. Dominated options are dropped. Equal parts of a program, such as repeated
layers, are joined once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipefit.shard.conversions import FormConverter

MAX_OPTION_PAIRS = 40_000
"""Largest number of option pairs for joining two steps; beyond it the search over states is cheaper."""


@dataclass(frozen=True, slots=True)
class JointOption:
    """One way to compute all steps of a block."""

    needs: tuple[int, ...]
    "The set of forms read, for every input."
    gives: int
    cost_s: float
    parts: tuple[int, int]
    "Option numbers of the two joined blocks (maker, reader); for a single step (its option, -1)."


Joints = tuple[JointOption, ...]


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
    _known: dict[object, tuple[Joints, tuple[object, ...]]] = field(default_factory=dict)

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
        kin = tuple(id(self.converters[v]) for v in (value, *inputs, reader.output))
        key = id(maker.ways), id(reader.ways), slot, places, kin
        if key not in self._known:
            pairs = _pair_options(maker.ways, reader.ways, slot, places, len(inputs), self.converters[value])
            options = self._undominated_options(pairs, inputs, reader.output)
            self._known[key] = options, (maker.ways, reader.ways)  # kept alive: the key contains their ids
        return StepBlock(inputs, reader.output, self._known[key][0], reader.place, (maker, reader))

    def _undominated_options(self, ways: Joints, inputs: Sequence[int], output: int) -> Joints:
        """Return the options without those that another option, plus conversions, can replace at no extra cost."""
        output_converter = self.converters[output]
        read = [self.converters[value] for value in inputs]
        undominated: list[JointOption] = []
        for option in sorted(ways, key=lambda one: one.cost_s):
            for rival in undominated:
                left_s = option.cost_s - rival.cost_s - output_converter.bound_s(1 << rival.gives, 1 << option.gives)
                if left_s < 0:
                    continue
                for converter, have, want in zip(read, option.needs, rival.needs, strict=True):
                    if want & ~have:
                        left_s -= converter.bound_s(have, want)
                if left_s >= 0:
                    break
            else:
                undominated.append(option)
        return tuple(undominated)


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
    by_form: dict[int, list[tuple[int, JointOption]]] = defaultdict(list)
    for number, option in enumerate(makers):
        by_form[option.gives].append((number, option))
    from_maker, from_reader = places
    best: dict[tuple[int, tuple[int, ...]], tuple[float, int, int]] = {}
    for second, reader in enumerate(readers):
        wanted = reader.needs[own]
        around = [0] * count
        for slot, mask in zip(from_reader, reader.needs[:own] + reader.needs[own + 1 :], strict=True):
            around[slot] = mask
        for form, options in by_form.items():
            base_s = reader.cost_s + converter.cheapest_s(1 << form, wanted)
            if base_s == float("inf"):
                continue
            for first, maker in options:
                needs = around.copy()
                for slot, mask in zip(from_maker, maker.needs, strict=True):
                    needs[slot] |= mask
                key = reader.gives, tuple(needs)
                seconds = base_s + maker.cost_s
                if key not in best or seconds < best[key][0]:
                    best[key] = seconds, first, second
    return tuple(JointOption(needs, gives, seconds, (a, b)) for (gives, needs), (seconds, a, b) in best.items())
