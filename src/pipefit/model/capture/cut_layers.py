"""Cuts the graph of a complete model into a chain of layers, at points where a single value passes on. Equal parts
become layers that share one graph.

Values that need no parameters (positions, masks, rotary tables: computed from constants and inputs that every device
has) are ignored at a cut: every layer that reads such a value recomputes it. The pieces between cuts are joined by the
names of their parameters: all pieces under one numbered name (`encoder.layer.3`) form one layer. A graph without a cut
stays one layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipefit.codec import content_digest
from pipefit.model.capture.rewrite import canonical_names, unused_name
from pipefit.model.graph import Graph, Layer, Operator, ParameterSpec, TensorSpec
from pipefit.model.ops import KINDS

WHOLE = "model"
"Name of the layer if a model has only one."


def cut_layers(graph: Graph) -> tuple[tuple[Layer, ...], dict[str, Graph]]:
    """(the chain, its graphs by hash). Parameters keep their names in the model as global ones."""
    shared = _shared_operators(graph) if graph.parameters else {}
    parts = _join_parts(_finest_parts(graph, shared))
    layers: list[Layer] = []
    graphs: dict[str, Graph] = {}
    known: dict[str, str] = {}
    names = [
        part.layer_name or ("head" if part is parts[-1] else "front" if part is parts[0] else "part") for part in parts
    ]
    names = _make_unique(names) if len(parts) > 1 else [WHOLE]
    takes = ""
    for part, name in zip(parts, names, strict=True):
        layer_graph, parameters = _layer_graph(graph, shared, part, takes)
        same = known.setdefault(content_digest(_without_sources(layer_graph)), layer_graph.hash)
        graphs.setdefault(same, layer_graph)
        layers.append(Layer(name=name, graph=same, parameters=parameters))
        takes = part.gives
    return tuple(layers), graphs


@dataclass(slots=True)
class _LayerPart:
    """Consecutive operators whose only result used later is one value."""

    operators: list[Operator]
    gives: str
    parameters: list[ParameterSpec] = field(default_factory=list)
    key: str = ""
    "The numbered name that all its parameters are under; '' if there is none."

    @property
    def is_light(self) -> bool:
        """Whether it has no matrix product: norms, tables."""
        return not any(KINDS[operator.kind].heavy for operator in self.operators)

    @property
    def layer_name(self) -> str:
        return self.key or _common_prefix(spec.name.rpartition(".")[0] for spec in self.parameters)


def _shared_operators(graph: Graph) -> dict[str, Operator]:
    """Value -> its operator, for values that need no parameters, no random numbers and no heavy work."""
    known = {tensor.name for tensor in graph.inputs}
    producers: dict[str, Operator] = {}
    for operator in graph.operators:
        free = operator.kind != "dropout" and not KINDS[operator.kind].heavy
        if free and all(name in known for name in operator.inputs if name):
            producers |= dict.fromkeys(operator.outputs, operator)
            known |= {*operator.outputs}
    return producers


def _finest_parts(graph: Graph, shared: Mapping[str, Operator]) -> list[_LayerPart]:
    """Cut the graph at every point where a single value passes on."""
    chain = [operator for operator in graph.operators if operator.outputs[0] not in shared]
    specs = {spec.name: spec for spec in graph.parameters}
    tensors = {tensor.name: tensor for tensor in graph.tensors}
    produced = {name for operator in chain for name in operator.outputs}
    last = {name: position for position, operator in enumerate(chain) for name in operator.inputs if name in produced}
    last |= dict.fromkeys(graph.outputs, len(chain))
    pieces: list[_LayerPart] = []
    alive: set[str] = set()
    begun = 0
    for position, operator in enumerate(chain):
        alive |= {name for name in operator.outputs if name in last}
        alive -= {name for name in operator.inputs if last.get(name) == position}
        end = position == len(chain) - 1
        if end or (specs and len(alive) == 1 and _can_cross_stages(tensors[next(iter(alive))])):
            piece = _LayerPart(chain[begun : position + 1], graph.outputs[0] if end else next(iter(alive)))
            read = {name for member in piece.operators for name in member.inputs}
            piece.parameters = [specs[name] for name in specs if name in read]
            piece.key = _block_name(_common_prefix(spec.name for spec in piece.parameters))
            pieces.append(piece)
            begun = position + 1
    return pieces


def _can_cross_stages(tensor: TensorSpec) -> bool:
    """Return whether stages can send a value: rows in front, compute dtype."""
    return tensor.dtype == "compute" and tensor.shape[:1] == ("B",) and "B" not in str(tensor.shape[1:])


def _join_parts(pieces: Sequence[_LayerPart]) -> list[_LayerPart]:
    """Join pieces to layers. Pieces under one numbered name are joined, unless they use a parameter again (layers that
    are applied several times). Other neighbours are joined if one of them has no matrix product."""
    parts: list[_LayerPart] = []
    for piece in _without_empty(pieces):
        if parts and _belongs_to(parts[-1], piece):
            _append_part(parts[-1], piece)
        else:
            parts.append(piece)
    return parts


def _belongs_to(before: _LayerPart, piece: _LayerPart) -> bool:
    again = {spec.name for spec in before.parameters} & {spec.name for spec in piece.parameters}
    return not again and before.key == piece.key and (bool(piece.key) or before.is_light or piece.is_light)


def _without_empty(pieces: Sequence[_LayerPart]) -> list[_LayerPart]:
    """Merge pieces without parameters into a neighbour, preferably one that is not a numbered block: merging would make
    such a block differ from the equal ones."""
    nonempty: list[_LayerPart] = []
    waiting: list[Operator] = []
    for position, piece in enumerate(pieces):
        if piece.parameters or len(pieces) == 1:
            piece.operators = [*waiting, *piece.operators]
            waiting = []
            nonempty.append(piece)
            continue
        after = next((later for later in pieces[position + 1 :] if later.parameters), None)
        if after is None or (nonempty and not waiting and (not nonempty[-1].key or after.key)):
            _append_part(nonempty[-1], piece)
        else:
            waiting += piece.operators
    return nonempty


def _append_part(part: _LayerPart, piece: _LayerPart) -> None:
    part.operators += piece.operators
    part.parameters += piece.parameters
    part.gives = piece.gives


def _common_prefix(names: Iterable[str]) -> str:
    """The longest common prefix of all names, in full words between dots."""
    words = [name.split(".") for name in names]
    front = []
    for column in zip(*words, strict=False):
        if len({*column}) > 1:
            break
        front.append(column[0])
    return ".".join(front)


def _block_name(name: str) -> str:
    """The name up to its last number (`h.3.attn` -> `h.3`); without a number, up to the first word that ends with a
    digit (`conv3.weight` -> `conv3`)."""
    words = name.split(".")
    numbers = [position for position, word in enumerate(words) if word.isdigit()]
    if numbers:
        return ".".join(words[: numbers[-1] + 1])
    numbers = [position for position, word in enumerate(words) if re.search(r"\d$", word)]
    return ".".join(words[: numbers[0] + 1]) if numbers else ""


def _layer_graph(
    graph: Graph, shared: Mapping[str, Operator], part: _LayerPart, takes: str
) -> tuple[Graph, dict[str, str]]:
    """Return the graph of one layer, and its parameters' local -> global names. `takes` is the value from the layer
    before."""
    operators = _with_shared(part.operators, shared)
    read = {name for operator in operators for name in operator.inputs}
    tensors = {tensor.name: tensor for tensor in (*graph.inputs, *graph.tensors)}
    inputs = [tensor for tensor in graph.inputs if tensor.name in read]
    local = _local_names([spec.name for spec in graph.parameters if spec.name in read], part.key)
    renamed = dict(local)
    if takes:
        hidden = unused_name("x", {*local.values(), *(tensor.name for tensor in inputs)}, "hidden")
        renamed[takes] = hidden
        inputs.insert(0, replace(tensors[takes], name=hidden, role="activation"))
    dropouts = 0
    written = []
    for operator in operators:
        attributes = dict(operator.attributes)
        if operator.kind == "dropout":  # numbered within the layer; the layer's index is part of the key
            attributes["index"], dropouts = dropouts, dropouts + 1
        written.append(
            replace(
                operator,
                inputs=tuple(renamed.get(name, name) for name in operator.inputs),
                attributes=attributes,
                source=_strip_block(operator.source, part.key),
            )
        )
    layer_graph = Graph(
        inputs=tuple(inputs),
        outputs=(part.gives,),
        operators=tuple(written),
        parameters=tuple(replace(spec, name=local[spec.name]) for spec in graph.parameters if spec.name in local),
        tensors=tuple(tensors[name] for operator in operators for name in operator.outputs),
    )
    return canonical_names(layer_graph), {short: name for name, short in local.items()}


def _with_shared(operators: Sequence[Operator], shared: Mapping[str, Operator]) -> list[Operator]:
    """Return the operators with the shared operators they need inserted before their first use."""
    ordered: list[Operator] = []
    there: set[str] = set()

    def add_needed(name: str) -> None:
        operator = shared.get(name)
        if operator is None or name in there:
            return
        for input_name in operator.inputs:
            add_needed(input_name)
        there.update(operator.outputs)
        ordered.append(operator)

    for operator in operators:
        for name in operator.inputs:
            add_needed(name)
        ordered.append(operator)
    return ordered


def _local_names(names: Sequence[str], key: str) -> dict[str, str]:
    """Names in the model -> names in the layer, without the block's prefix, so that equal blocks have equal names."""
    front = f"{key}." if key else ""
    short = {name: name.removeprefix(front) if front and name.startswith(front) else name for name in names}
    assert len({*short.values()}) == len(short), f"two parameters of one name in {key}"
    return short


def _strip_block(source: str, key: str) -> str:
    """Remove the block's prefix from a module path: `model.h.3.attn (Attention)` -> `attn (Attention)`."""
    path = source.removeprefix("model.")
    if not key or not path.startswith(key):
        return source
    rest = path[len(key) :]
    return rest[1:] if rest[:1] in (".", " ") else source


def _without_sources(graph: Graph) -> Graph:
    return replace(graph, operators=tuple(replace(operator, source="") for operator in graph.operators))


def _make_unique(names: Sequence[str]) -> list[str]:
    """Append a number to repeated names (a layer that is applied again)."""
    unique: list[str] = []
    times: dict[str, int] = {}
    for name in names:
        times[name] = times.get(name, 0) + 1
        unique.append(name if times[name] == 1 else f"{name}#{times[name]}")
    return unique
