"""Steps of a program joined where one alone reads what another makes: the same optimum with far fewer steps.

If a value has one reader, its forms are nobody else's business: for every way of the reader and of the maker the
cheapest conversion between them is known at once, and both become one step with the ways that remain (variable
elimination, as in probabilistic networks: Bertele and Brioschi, 1972). Parameters vanish in the operators that read
them, branches in their sums, and a chain of layers becomes one step. Ways that another one can stand in for are
dropped; equal parts of a program, such as repeated layers, are joined once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipefit.shard.conversions import FormConverter

WIDEST = 40_000
"""Pairs of ways that two steps may have to be joined: with more the search over states is cheaper."""


@dataclass(frozen=True, slots=True)
class JointOption:
    """One way to compute all steps of a block."""

    needs: tuple[int, ...]
    "Of every input: the set of forms that are read."
    gives: int
    cost_s: float
    parts: tuple[int, int]
    "Numbers of the ways of the block that was joined and of the one that it was joined to; of a step, (its way, -1)."


Joints = tuple[JointOption, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepBlock:
    """A step, or several joined ones."""

    inputs: tuple[int, ...]
    "Every value once."
    output: int
    ways: Joints
    place: int
    "Of the last step in it."
    joined: tuple[StepBlock, StepBlock] | None = None
    "The maker and the reader that it was made of."

    def step_picks(self, number: int) -> Iterable[tuple[int, int]]:
        """(place, number of its way) of every step in it."""
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
    "Of every value; values with equal conversions share one."
    given: Mapping[int, int]
    kept: frozenset[int]
    "Values that are handed on."
    _known: dict[object, tuple[Joints, tuple[object, ...]]] = field(default_factory=dict)

    def join_blocks(self, blocks: Sequence[StepBlock]) -> list[StepBlock]:
        """The program with every value gone that one block alone reads, where that has not too many ways."""
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
                if len(maker.ways) * len(block.ways) > WIDEST:
                    refused.add(value)
                    continue
                for operand in maker.inputs:
                    readers[operand] = readers[operand] - {maker.place} | {block.place}
                del left[maker.place]
                block = self._join_pair(maker, block, value)
            left[block.place] = makers[block.output] = block
        return list(left.values())

    def drop_dominated(self, block: StepBlock) -> StepBlock:
        """The block without ways that another one can stand in for."""
        options = self._undominated_options(block.ways, block.inputs, block.output)
        return StepBlock(block.inputs, block.output, options, block.place, block.joined)

    def _feed_value(self, block: StepBlock, value: int) -> StepBlock:
        """The block with a value that comes from outside converted in it."""
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
            self._known[key] = options, (maker.ways, reader.ways)  # kept alive: the key has their identities
        return StepBlock(inputs, reader.output, self._known[key][0], reader.place, (maker, reader))

    def _undominated_options(self, ways: Joints, inputs: Sequence[int], output: int) -> Joints:
        """Without ways that cost as much as another one together with the conversions that make up for it."""
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
    """Every way of the maker with every way of the reader, which reads what is made as its input `own`; `places` are
    those of the inputs of both among `count`. Of those with the same needs and result, the cheapest."""
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
