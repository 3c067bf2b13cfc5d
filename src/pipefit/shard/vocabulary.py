"""The layers whose vocabulary Megatron's programs split: embedding, head and loss (Shoeybi et al., 2019, section 3).

Each device holds a run of the words: it looks up its own tokens, computes its own logits, and adds its share of the
loss. A head is split only with the loss behind it, and a table only in all layers that use it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from pipefit.model.graph import Graph, Operator, Shape, Size, shapes_of
from pipefit.model.ops import KINDS
from pipefit.shard.columns import column_linears, units_downstream
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
    graphs = {layer.key: layer.graph for chain in chains for layer in chain}
    heads = {key for key, graph in graphs.items() if gives_logits(graph)}
    losses = {key for key, graph in graphs.items() if takes_logits(graph)}
    split = heads | losses | {key for key, graph in graphs.items() if token_tables(graph)}
    split -= {key for key in split if layer_vocabularies(graphs[key]) & {*undivided}}
    tables = {key: (split_tables(graph, False), split_tables(graph, True)) for key, graph in graphs.items()}
    while unsplit := _single_layers(chains, heads & split, losses & split) | _half_split_layers(chains, tables, split):
        split -= unsplit
    return frozenset(split)


def _single_layers(chains: Sequence[Sequence[LayerUse]], heads: set[str], losses: set[str]) -> set[str]:
    """Return the keys of heads without a loss behind them, and of losses without a head."""
    single = set()
    for chain in chains:
        keys = [None, *(layer.key for layer in chain), None]
        for before, key, after in zip(keys, keys[1:], keys[2:], strict=False):
            if key is not None and ((key in heads and after not in losses) or (key in losses and before not in heads)):
                single.add(key)
    return single


def _half_split_layers(
    chains: Sequence[Sequence[LayerUse]], tables: Mapping[str, tuple[set[str], set[str]]], split: set[str]
) -> set[str]:
    """Return the keys in `split` of layers with a table that another layer holds whole.

    `tables`: key -> local names of the tables that a layer splits (without, with) its vocabulary.
    """
    layers = [(layer, tables[layer.key][layer.key in split]) for chain in chains for layer in chain]
    held_whole = {
        layer.parameters[spec.name]
        for layer, names in layers
        for spec in layer.graph.parameters
        if spec.name not in names
    }
    return {
        layer.key
        for layer, names in layers
        if layer.key in split and any(layer.parameters[name] in held_whole for name in names)
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
        sizes.add(hidden_shape(graph)[-1])
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
    if len(activations) != 1 or graph.parameters or graph.hidden_output is not None:
        return False
    if not any(labels_at(shapes_of(graph), operator).kinds for operator in graph.operators):
        return False  # no operator reduces over the parts of a vocabulary
    hidden = activations[0]
    return len(hidden.shape) > 1 and units_downstream(graph, hidden.name, len(hidden.shape) - 1) > 0


def hidden_shape(graph: Graph) -> Shape:
    """Return the shape of the hidden state that a layer takes from the layer before."""
    assert graph.hidden_input is not None
    return graph.find_tensor(graph.hidden_input).shape
