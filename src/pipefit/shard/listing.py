"""A searched program as text and as data: forms, shares, collectives, and the cost of each line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum

from pipefit.cost.compute.shard_exchanges import operator_exchanges
from pipefit.model.graph import Graph, Layer, Model, Operator
from pipefit.model.ops.reshare import KIND as RESHARE
from pipefit.shard.chain import ChainLink
from pipefit.shard.pricing import ShardSetting
from pipefit.shard.recipe import write_program
from pipefit.shard.synthesize import SynthesizedProgram
from pipefit.shard.template import HeldFractions, held_fractions
from pipefit.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingLine:
    """One parameter or operator."""

    text: str
    forward_s: float = 0.0
    "Seconds on the slowest device; for a collective, forward and backward together."
    backward_s: float = 0.0
    once_s: float = 0.0
    "Seconds once an iteration, divided by the microbatches."


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerListing:
    """One distinct layer."""

    name: str
    "Name of the first such layer."
    times: int
    takes: str
    gives: str
    cost_s: float
    "The sum of its lines."
    recipe: str
    shares: tuple[int, ...]
    "The layer's shares if they are not the mesh's."
    lines: tuple[ListingLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramListing:
    """The program of a full model."""

    kinds: tuple[str, ...]
    "Kind of every device."
    shares: tuple[int, ...]
    rows: int
    tokens: int
    microbatches: int
    cost_s: float
    "Devices synchronise at collectives only, so the cost can be below the sum of the lines."
    held_bytes: dict[str, float]
    "Bytes on the fullest device of every kind: parameters, gradients, state, and saved activations of one backward."
    limit_bytes: dict[str, int]
    layers: tuple[LayerListing, ...]

    def listing_text(self) -> str:
        """Return the program with its costs as text."""
        size = f"{self.rows} rows x {self.tokens} tokens"
        lines = [
            f"devices {' '.join(self.kinds)}",
            f"shares {':'.join(map(str, self.shares))}",
            f"a microbatch of {size}, one of {self.microbatches}: {format_seconds(self.cost_s)} forward and backward",
        ]
        for kind, held in self.held_bytes.items():
            lines.append(f"memory of {kind}: {format_bytes(held)} of {format_bytes(self.limit_bytes[kind])}")
        for layer in self.layers:
            repeats = f" and {layer.times - 1} more like it" if layer.times > 1 else ""
            share_note = f" with shares {':'.join(map(str, layer.shares))}" if layer.shares else ""
            lines += [
                "",
                f"{layer.name}{repeats}{share_note}: {layer.takes} to {layer.gives}, {format_seconds(layer.cost_s)}",
            ]
            lines += [f"  {line.text}{_format_costs(line)}" for line in layer.lines]
        return "\n".join(lines) + "\n"


def _format_costs(line: ListingLine) -> str:
    parts = (("", line.forward_s), ("back ", line.backward_s), ("once ", line.once_s))
    told = ", ".join(f"{word}{format_seconds(seconds)}" for word, seconds in parts if seconds)
    return f"  # {told}" if told else ""


def list_program(
    model: Model, layers: Sequence[Layer], found: SynthesizedProgram, setting: ShardSetting
) -> ProgramListing:
    """Return the listing of the program of these layers."""
    first: dict[str, tuple[Layer, ChainLink]] = {}
    for layer, link in zip(layers, found.links, strict=True):
        first.setdefault(layer.graph, (layer, link))
    used = [layer.graph for layer in layers]
    return ProgramListing(
        kinds=tuple(kind.name for kind in setting.kinds),
        shares=found.shares,
        rows=setting.rows,
        tokens=setting.tokens,
        microbatches=setting.microbatches,
        cost_s=found.cost_s,
        held_bytes={kind.name: held for kind, held in zip(setting.distinct_kinds, found.held_bytes, strict=True)},
        limit_bytes={kind.name: kind.memory_bytes for kind in setting.distinct_kinds},
        layers=tuple(
            _list_layer(model, layer, link, setting, used.count(graph)) for graph, (layer, link) in first.items()
        ),
    )


def _list_layer(model: Model, layer: Layer, link: ChainLink, setting: ShardSetting, times: int) -> LayerListing:
    lines = tuple(_layer_lines(model, layer, link, setting))
    return LayerListing(
        name=layer.name,
        times=times,
        takes=str(link.takes),
        gives=str(link.gives),
        cost_s=fsum(line.forward_s + line.backward_s + line.once_s for line in lines),
        recipe=link.layer_recipe.recipe_text,
        shares=link.shares if link.around else (),
        lines=lines,
    )


def _layer_lines(model: Model, layer: Layer, link: ChainLink, setting: ShardSetting) -> Iterator[ListingLine]:
    """Yield the lines of a program's text, each with its cost."""
    template = link.layer.template
    fractions = held_fractions(template.cuts, link.shares, template.members)
    program = write_program(model.layer_graph(layer), link.shares, link.layer_recipe)
    _, _, *rest = program.program_text().splitlines()
    costs = {line.text: line for line in _parameter_lines(link, fractions)}
    moved = [_resharing_line(program.graphs[0], operator, setting) for operator in program.graphs[0].operators]
    operators = [*filter(None, moved[:1]), *_operator_lines(model, layer, link, fractions), *filter(None, moved[1:])]
    index = 0
    for text in rest:
        if text.startswith("parameter "):
            cost = costs[text.split(":")[0].removeprefix("parameter ")]
        elif text.startswith("return "):
            cost = ListingLine(text=text)
        else:
            cost, index = operators[index], index + 1
        yield ListingLine(text=text, forward_s=cost.forward_s, backward_s=cost.backward_s, once_s=cost.once_s)
    assert index == len(operators), "a line of the program has no cost"


def _resharing_line(graph: Graph, operator: Operator, setting: ShardSetting) -> ListingLine | None:
    """Return the cost of changing the shares of the hidden state, or None for any other operator."""
    if operator.kind != RESHARE:
        return None
    exchanges = operator_exchanges(graph, operator, setting.symbol_sizes, setting.precision)
    assert setting.reshare_s is not None
    seconds = 0.0
    for _, size, _, shares in (*exchanges.forward, *exchanges.input_gradient):
        seconds += setting.reshare_s(size, shares[: len(shares) // 2], shares[len(shares) // 2 :])
    return ListingLine(text="", forward_s=seconds)


def _parameter_lines(link: ChainLink, fractions: HeldFractions) -> Iterator[ListingLine]:
    """Yield the gradient reduction and the update of each parameter."""
    for index, step, number in zip(link.layer.operators, link.layer.template.steps, link.choice.ways, strict=True):
        if index == -1:
            seconds = step.ways[number].cost_s(fractions, link.layer.template.members.kind_count)
            yield ListingLine(text=link.layer.values[step.output], once_s=seconds)


def _operator_lines(model: Model, layer: Layer, link: ChainLink, fractions: HeldFractions) -> Iterator[ListingLine]:
    """Yield one line for every operator written by `ProgramWriter`, in its order."""
    graph = model.layer_graph(layer)
    template, choice = link.layer.template, link.choice
    kinds = range(template.members.kind_count)
    steps = zip(link.layer.operators, template.steps, choice.ways, choice.before, strict=True)
    for index, step, number, moves in steps:
        for value, source, target in moves:
            yield ListingLine(
                text="", forward_s=template.conversion_costs[value][source, target].conversion_s(fractions)
            )
        if index < 0:
            continue
        option = step.ways[number]
        yield ListingLine(
            text="",
            forward_s=max(option.forward_s(fractions, kind) for kind in kinds)
            + (option.talk.conversion_s(fractions) if option.talk else 0.0),
            backward_s=max(option.backward_s(fractions, kind) for kind in kinds),
        )
        if option.reduction is not None:
            yield ListingLine(text="", forward_s=option.reduction.conversion_s(fractions))
            operator = graph.operators[index]
            # the bias, added after the reduction
            yield from [ListingLine(text="") for name in operator.inputs[2:] if name]
    for value, source, target in choice.after:
        yield ListingLine(text="", forward_s=template.conversion_costs[value][source, target].conversion_s(fractions))
