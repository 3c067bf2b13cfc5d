"""The layers whose vocabulary Megatron's programs split: embedding, head and loss (Shoeybi et al., 2019, section 3).

Each device holds a run of the words: it looks up its own tokens, computes its own logits, and adds its share of the
loss. A head is split only with the loss behind it, and a table only in all layers that use it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from pipefit.model.graph import Graph, Operator, Size, TensorSpec
from pipefit.model.ops import KINDS
from pipefit.shard.columns import column_linears, graph_shapes, units_downstream
from pipefit.shard.program import labels_at


class LayerUse(NamedTuple):
    """A layer of a model's chain."""

    key: str
    "Key of its graph; layers with one key run one program."
    graph: Graph
    parameters: Mapping[str, str]
    "Local parameter name -> global name."


def vocabulary_graphs(chains: Iterable[Sequence[LayerUse]], undivided: Collection[int] = ()) -> frozenset[str]:
    """Return the keys of the graphs whose vocabulary can be split in every layer that runs them.

    Vocabularies of the sizes `undivided` have too few words for the devices.
    """
    chains = [*chains]
    neighbours = [pair for chain in chains for pair in pairwise(chain)]
    pairs = [(head, loss) for head, loss in neighbours if gives_logits(head.graph) and takes_logits(loss.graph)]
    split = {layer.key for pair in pairs for layer in pair}
    split |= {layer.key for chain in chains for layer in chain if token_tables(layer.graph)}
    split -= {layer.key for chain in chains for layer in chain if layer_vocabularies(layer.graph) & {*undivided}}
    while unsplit := _single_layers(chains, split) | _layers_with_whole_tables(chains, split):
        split -= unsplit
    return frozenset(split)


def _single_layers(chains: Sequence[Sequence[LayerUse]], split: set[str]) -> set[str]:
    """Return the keys in `split` of heads without a split loss behind them, and of losses without a split head."""
    single = set()
    for chain in chains:
        for before, layer, after in zip((None, *chain), chain, (*chain[1:], None), strict=False):
            if layer.key not in split:
                continue
            if gives_logits(layer.graph) and not (after and after.key in split and takes_logits(after.graph)):
                single.add(layer.key)
            if takes_logits(layer.graph) and not (before and before.key in split and gives_logits(before.graph)):
                single.add(layer.key)
    return single


def _layers_with_whole_tables(chains: Sequence[Sequence[LayerUse]], split: set[str]) -> set[str]:
    """Return the keys in `split` of layers with a table that another layer holds whole."""
    layers = [(layer, split_tables(layer.graph, layer.key in split)) for chain in chains for layer in chain]
    held_whole = {
        layer.parameters[spec.name]
        for layer, tables in layers
        for spec in layer.graph.parameters
        if spec.name not in tables
    }
    return {
        layer.key
        for layer, tables in layers
        if layer.key in split and any(layer.parameters[table] in held_whole for table in tables)
    }


def split_tables(graph: Graph, split_vocabulary: bool) -> set[str]:
    """Return the weights that a layer's program splits along their first dimension, with or without the vocabulary."""
    columns = column_linears(graph, split_vocabulary and gives_logits(graph))
    names = {graph.operators[place].inputs[1] for place in columns} & {spec.name for spec in graph.parameters}
    return names | token_tables(graph) if split_vocabulary else names


def layer_vocabularies(graph: Graph) -> set[Size]:
    """Return the numbers of words of a layer's token tables and logits."""
    sizes: set[Size] = {graph.find_parameter(name).shape[0] for name in token_tables(graph)}
    if gives_logits(graph):
        sizes.add(graph.find_tensor(graph.outputs[0]).shape[-1])
    if takes_logits(graph):
        sizes.add(hidden_input(graph).shape[-1])
    return sizes


def token_tables(graph: Graph) -> set[str]:
    """Return the parameters of a layer in which tokens are looked up, and which nothing else reads."""
    tables = {operator.inputs[1] for operator in graph.operators if looks_up_tokens(graph, operator)}
    read_otherwise = {
        name for operator in graph.operators if not looks_up_tokens(graph, operator) for name in operator.inputs
    }
    parameters = {spec.name for spec in graph.parameters}
    return (tables & parameters) - read_otherwise


def looks_up_tokens(graph: Graph, operator: Operator) -> bool:
    """Return True for a lookup of the tokens of the text, not of positions or token types."""
    tokens = {tensor.name for tensor in graph.inputs if tensor.role == "tokens"}
    return KINDS[operator.kind].is_lookup and operator.inputs[0] in tokens


def gives_logits(graph: Graph) -> bool:
    """Return True if a column-parallel linear layer can make the output of the layer, which is not an embedding."""
    if any(looks_up_tokens(graph, operator) for operator in graph.operators):
        return False
    return len(column_linears(graph, split_output=True)) > len(column_linears(graph))


def takes_logits(graph: Graph) -> bool:
    """Return True for a cross-entropy without parameters whose hidden state can be split along its last dimension."""
    activations = [tensor for tensor in graph.inputs if tensor.role == "activation"]
    if len(activations) != 1 or graph.parameters or any(graph.find_tensor(name).shape for name in graph.outputs):
        return False
    if not any(labels_at(graph_shapes(graph), operator).kinds for operator in graph.operators):
        return False  # no operator reduces over the parts of a vocabulary
    hidden = activations[0]
    return len(hidden.shape) > 1 and units_downstream(graph, hidden.name, len(hidden.shape) - 1) > 0


def hidden_input(graph: Graph) -> TensorSpec:
    """Return the hidden state that a layer takes from the layer before."""
    return next(tensor for tensor in graph.inputs if tensor.role == "activation")
