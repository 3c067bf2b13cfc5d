"""unshard(weight): a parameter that is stored split over the shard axis, gathered for the operator that uses all of it.

The word is that of PyTorch's fully sharded data parallelism (FSDP2; ZeRO-3: Rajbhandari et al., 2020). An operator
whose kind names the weight in `gathers` gathers it in its forward and, where the input gradient needs it, again; it
lets go of it at once, and its weight gradient is reduced and split in every microbatch. A weight of any other operator
(a norm's scale) is gathered once, kept by autograd, and its gradient reduced as it comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Graph, ParameterSpec, Shape
from pipefit.model.ops.kind import OperatorKind

_WEIGHTS: dict[int, tuple[Graph, Mapping[str, ParameterSpec]]] = {}
"""What `stored_weights` has found, by the identity of the graph, which is kept alive."""

MOST_KNOWN = 1024


def stored_weights(graph: Graph) -> Mapping[str, ParameterSpec]:
    """The parameters of a graph, and under the names that operators read them by those that are gathered for use."""
    if id(graph) not in _WEIGHTS:
        if len(_WEIGHTS) >= MOST_KNOWN:
            _WEIGHTS.clear()
        _WEIGHTS[id(graph)] = graph, _find_weights(graph)
    return _WEIGHTS[id(graph)][1]


def _find_weights(graph: Graph) -> Mapping[str, ParameterSpec]:
    found = {spec.name: spec for spec in graph.parameters}
    for operator in graph.operators:
        if operator.kind == "unshard":
            name, stored = operator.outputs[0], found[operator.inputs[0]]
            shape = tuple(int(size) for size in graph.find_tensor(name).shape)
            found[name] = ParameterSpec(name=name, shape=shape, trainable=stored.trainable)
    return found


def gathers_of(graph: Graph, name: str) -> int:
    """How often the operator that uses a weight gathers it where it is stored split; 0: it is gathered once and kept
    (or several operators use it)."""
    from pipefit.model.ops.table import KINDS

    users = [operator for operator in graph.operators if name in operator.inputs]
    return KINDS[users[0].kind].gathers.get(users[0].inputs.index(name), 0) if len(users) == 1 else 0


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
