"""The divisor of a captured model's loss: the number of labels that count, or of summed elements.

A captured loss is a sum (`capture/whole.py`). For a cross-entropy, only labels other than its `ignore_index` count, as
the model itself sees them: shifted, or computed from an input. Any other sum is divided by its number of elements per
row; a sum of several terms is divided by the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.errors import ModelError
from pipefit.model.graph import Graph, Model, element_count

LINEAR_KINDS = {"cast", "reshape", "mul", "div", "neg"}
"""One-input kinds between a sum and the loss: the result is still a sum times a constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDivisor:
    """The rule for counting the divisor of a step's loss."""

    per_row: int = 0
    "Count per row if it is the same for every row; 0: the labels of the step are counted."
    labels: Graph | None = None
    "Graph from the inputs of a step to the labels of the cross-entropy; no parameters."
    ignore_index: int = -100
    "The label that does not count."


def loss_divisor(model: Model) -> LossDivisor:
    """Return the divisor rule of the model's last layer. Raises ModelError if its labels are computed from hidden
    states."""
    graph = model.layer_graph(model.layers[-1])
    producers = {name: operator for operator in graph.operators for name in operator.outputs}
    name = graph.outputs[0]
    while name in producers and producers[name].kind in LINEAR_KINDS and not any(producers[name].inputs[1:]):
        name = producers[name].inputs[0]
    last = producers.get(name)
    if last is not None and last.kind == "cross_entropy":
        return LossDivisor(
            labels=_label_graph(graph, last.inputs[1]), ignore_index=int(last.attributes["ignore_index"])
        )
    if last is not None and last.kind == "sum":
        return LossDivisor(per_row=max(1, element_count(graph.find_tensor(last.inputs[0]).shape, {"B": 1})))
    return LossDivisor(per_row=1)


def _label_graph(graph: Graph, name: str) -> Graph:
    """Return the graph that computes the value `name` from inputs."""
    wanted, operators = {name}, []
    for operator in reversed(graph.operators):
        if wanted & {*operator.outputs}:
            wanted |= {*operator.inputs}
            operators.append(operator)
    operators.reverse()
    inputs = tuple(tensor for tensor in graph.inputs if tensor.name in wanted)
    if any(tensor.role == "activation" for tensor in inputs) or wanted & {spec.name for spec in graph.parameters}:
        raise ModelError(
            "The labels of the loss are computed by the model, so they cannot be counted before a step.",
            where=next((operator.source for operator in reversed(operators) if operator.source), "loss"),
            seen="labels computed from hidden states or parameters",
            allowed="labels that are an input, or computed from inputs",
        )
    return Graph(
        inputs=inputs,
        outputs=(name,),
        operators=tuple(operators),
        parameters=(),
        tensors=tuple(graph.find_tensor(output) for operator in operators for output in operator.outputs),
    )
