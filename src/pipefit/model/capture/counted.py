"""What the loss of a captured model is divided by: the labels that count, or the numbers that it adds up.

A captured loss is a sum (`capture/whole.py`). Where it is a cross-entropy, only labels that are not its `ignore_index`
count, as the model itself sees them: shifted, or made of an input. Any other sum is divided by how many numbers it adds
up for a row; sums of several terms by the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.errors import ModelError
from pipefit.model.graph import Graph, Model, element_count

PASSING = {"cast", "reshape", "mul", "div", "neg"}
"""Kinds of one input that a sum passes through on its way to the loss: a sum times a number is still one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDivisor:
    """How to count what a step's loss is divided by."""

    per_row: int = 0
    "Where every row has as many; 0: the labels of the step are counted."
    labels: Graph | None = None
    "From the inputs of a step to the labels as the cross-entropy sees them; no parameters."
    ignore_index: int = -100
    "The label that does not count."


def loss_divisor(model: Model) -> LossDivisor:
    """How to count for the model's last layer. Raises ModelError where its labels are made of hidden states."""
    graph = model.layer_graph(model.layers[-1])
    producers = {name: operator for operator in graph.operators for name in operator.outputs}
    name = graph.outputs[0]
    while name in producers and producers[name].kind in PASSING and not any(producers[name].inputs[1:]):
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
    """What makes the value `name`."""
    wanted, operators = {name}, []
    for operator in reversed(graph.operators):
        if wanted & {*operator.outputs}:
            wanted |= {*operator.inputs}
            operators.append(operator)
    operators.reverse()
    inputs = tuple(tensor for tensor in graph.inputs if tensor.name in wanted)
    if any(tensor.role == "activation" for tensor in inputs) or wanted & {spec.name for spec in graph.parameters}:
        raise ModelError(
            "The labels of the loss are computed by the model, so nobody can count them before a step.",
            where=next((operator.source for operator in reversed(operators) if operator.source), "loss"),
            seen="labels made of hidden states or parameters",
            allowed="labels that are an input, or made of inputs",
        )
    return Graph(
        inputs=inputs,
        outputs=(name,),
        operators=tuple(operators),
        parameters=(),
        tensors=tuple(graph.find_tensor(output) for operator in operators for output in operator.outputs),
    )
