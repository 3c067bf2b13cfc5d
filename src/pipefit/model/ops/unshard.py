"""unshard(weight): all-gathers a parameter that is stored sharded over the shard axis, for one operator.

The word is from PyTorch's fully sharded data parallelism (FSDP2; ZeRO-3: Rajbhandari et al., 2020). An operator whose
kind lists the weight in `gathers` gathers it in its forward and, if the input gradient needs it, again in the backward.
It frees the weight at once, and reduce-scatters the weight gradient in every microbatch. A weight of any other operator
(a norm's scale) is gathered once and kept by autograd; its gradient is reduced as soon as it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Graph, ParameterSpec, Shape
from pipefit.model.ops.kind import OperatorKind

_WEIGHTS: dict[int, tuple[Graph, Mapping[str, ParameterSpec]]] = {}
"""Results of `stored_weights` by the identity of the graph, which the entry keeps alive."""

MOST_KNOWN = 1024


def stored_weights(graph: Graph) -> Mapping[str, ParameterSpec]:
    """The parameters of a graph by name, including gathered weights under the names that operators read."""
    if id(graph) not in _WEIGHTS:
        if len(_WEIGHTS) >= MOST_KNOWN:
            _WEIGHTS.clear()
        _WEIGHTS[id(graph)] = graph, _find_weights(graph)
    return _WEIGHTS[id(graph)][1]


def _find_weights(graph: Graph) -> Mapping[str, ParameterSpec]:
    weights = {spec.name: spec for spec in graph.parameters}
    for operator in graph.operators:
        if operator.kind == "unshard":
            name, stored = operator.outputs[0], weights[operator.inputs[0]]
            shape = tuple(int(size) for size in graph.find_tensor(name).shape)
            weights[name] = ParameterSpec(name=name, shape=shape, trainable=stored.trainable)
    return weights


def gathers_of(graph: Graph, name: str) -> int:
    """Number of all-gathers by the operator that uses a sharded weight. 0: it is gathered once and kept, or several
    operators use it."""
    from pipefit.model.ops.table import KINDS

    users = [operator for operator in graph.operators if name in operator.inputs]
    if len(users) != 1:
        return 0
    return KINDS[users[0].kind].count_gathers(users[0], users[0].inputs.index(name))


def _whole_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    weight, dim = inputs[0], attributes["dim"]
    assert weight is not None
    return ((*weight[:dim], attributes["size"], *weight[dim + 1 :]),)


OPERATORS = (
    OperatorKind(
        kind="unshard",
        summary="A parameter that is stored split along dim, gathered for one operator.",
        inputs=("weight",),
        attributes={"dim": "the dimension along which it is stored split", "size": "all of it"},
        shapes=_whole_shapes,
        boundary=True,
    ),
)
