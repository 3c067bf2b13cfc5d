"""Megatron's tensor parallelism as one fixed shard program, with even or uneven shares.

Column-parallel linear layers, then attention by heads or pointwise operators, then a row-parallel linear layer and an
all-reduce (Shoeybi et al., 2019). With sequence parallelism the residual stream and its operators (norms, dropout) are
split along tokens, with an all-gather before the column layers and a reduce-scatter after the row layer (Korthikanti et
al., 2022); each device holds a run of the experts, and tokens are sent to their experts. Without it, stream and experts
are replicated on every device. The table of the embedding, the head and the loss can be split by vocabulary
(`vocabulary.py` finds where).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipefit.errors import PlanError
from pipefit.layout import IDENTITY, shard_form
from pipefit.model.graph import Graph, Operator, Shape
from pipefit.model.ops import KINDS
from pipefit.shard.choice import TOKENS, HeldForm, OperatorChoice, follow_split, split_along
from pipefit.shard.columns import column_linears
from pipefit.shard.experts import TOKEN_DIM, can_divide_experts, split_experts
from pipefit.shard.program import ShardedGraph, shard_graph
from pipefit.shard.rules import OperatorLabels
from pipefit.shard.vocabulary import gives_logits, hidden_shape, takes_logits, token_tables


def shard_program(
    graph: Graph, shares: Sequence[int], sequence_parallel: bool, split_vocabulary: bool = False
) -> ShardedGraph:
    """Return the Megatron program of one layer over a shard axis with these shares.

    The hidden state between layers has form I, or G1 (tokens) with `sequence_parallel`. With `split_vocabulary` (see
    `vocabulary.py`) an embedding looks tokens up in its part of the table, a head gives and a loss takes logits in form
    G of the last dimension. Raises PlanError if a device would get no head, no column or no word.
    """
    if sequence_parallel and not any(TOKENS in tensor.shape for tensor in graph.inputs):
        raise PlanError(
            "Megatron's sequence parallelism needs a variable number of tokens; this model has a fixed number.",
            where="sharding",
            seen="megatron-sp",
            next_step="--fix sharding=searched",
        )
    stream = HeldForm(shard_form(TOKEN_DIM) if sequence_parallel else IDENTITY)
    is_head = split_vocabulary and gives_logits(graph)
    is_loss = split_vocabulary and takes_logits(graph)
    takes = logits_form(hidden_shape(graph)) if is_loss else stream
    gives = logits_form(graph.find_tensor(graph.outputs[0]).shape) if is_head else stream
    tables = token_tables(graph) if split_vocabulary else set()
    columns = column_linears(graph, split_output=is_head)
    divides_experts = sequence_parallel and can_divide_experts(graph, shares, TOKEN_DIM)
    fed = {tensor.name for tensor in graph.inputs if tensor.role != "activation"}

    def choose_split(
        place: int, operator: Operator, labelled: OperatorLabels, held: Mapping[str, HeldForm]
    ) -> OperatorChoice | None:
        if place in columns:
            return OperatorChoice(KINDS[operator.kind].column_label, columns[place])
        if KINDS[operator.kind].is_attention:
            return OperatorChoice("heads", labelled.units["heads"])
        if operator.inputs[1:2] and operator.inputs[1] in tables:
            table = labelled.inputs[1]
            assert table is not None
            return OperatorChoice(table[0])
        if divides_experts and (experts := split_experts(labelled, TOKEN_DIM)):
            return experts
        if sequence_parallel and operator.inputs[:1] and operator.inputs[0] in fed:
            return split_along(labelled, TOKEN_DIM)
        return follow_split(operator, labelled, held)

    return shard_graph(graph, shares, takes, choose_split, gives)


def logits_form(shape: Shape) -> HeldForm:
    """Return the form of logits (..., V) of which each device holds a run of the words."""
    words = shape[-1]
    assert isinstance(words, int), f"the size of the vocabulary is fixed, not {words}"
    return HeldForm(shard_form(len(shape) - 1), words)
