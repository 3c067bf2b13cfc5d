"""From an operator graph to one Python function: the steps called in order on local variables.

The text of the function is written once per layer and compiled by Python itself: no dictionary lookups, no loop over
operators, every value dropped after its last use. `source` of the result is that text, for a person to read:

    def layer(record, x):
        positions = record.feed.positions
        n = op0(x, p0)
        q = op1(record, n, p1, None)
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipefit.model.graph import Graph
from pipefit.run.ops import Context, build_step


@dataclass(slots=True)
class LayerFunction:
    """One layer, ready to run: `call(record, x)` where x is the hidden state, or None for a layer without one."""

    call: Callable[..., Any]
    source: str
    takes_hidden: bool
    extra_inputs: tuple[str, ...]
    "Activations beside the hidden state, read from `record.extras`."
    extra_outputs: tuple[str, ...]
    "Outputs beside the first, written to `record.extras`."
    returns_loss: bool


class Writer:
    """Collects the lines of a layer's function and the objects that they name."""

    def __init__(self, graph: Graph, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.graph = graph
        self.bound: dict[str, Any] = {}
        self.locals: dict[str, str] = {}
        self.parameters = {spec.name: self.bind("p", parameters[spec.name]) for spec in graph.parameters}
        self.last_use = last_uses(graph)

    def bind(self, prefix: str, value: Any) -> str:
        """A fresh name for an object that the function refers to."""
        name = f"{prefix}{len(self.bound)}"
        self.bound[name] = value
        return name

    def local(self, tensor: str) -> str:
        """The local variable of a value; a Python identifier whatever the graph calls it."""
        if tensor not in self.locals:
            clean = "".join(c if c.isalnum() else "_" for c in tensor)
            self.locals[tensor] = f"v{len(self.locals)}_{clean}"
        return self.locals[tensor]

    def argument(self, name: str) -> str:
        if not name:
            return "None"
        return self.parameters.get(name) or self.local(name)

    def dead_after(self, index: int, names: Sequence[str]) -> str:
        """A `del` of the values whose last use was operator `index`; '' if there is none."""
        dead = [n for n in dict.fromkeys(names) if n and n not in self.parameters and self.last_use.get(n, -1) <= index]
        return f"del {', '.join(map(self.local, dead))}" if dead else ""


def last_uses(graph: Graph) -> dict[str, int]:
    """Index of the last operator that reads each value; outputs of the graph are never dead."""
    uses = {name: i for i, operator in enumerate(graph.operators) for name in operator.inputs if name}
    return uses | {name: len(graph.operators) for name in graph.outputs}


def compile_layer(
    graph: Graph, parameters: Mapping[str, torch.nn.Parameter], contexts: Sequence[Context]
) -> LayerFunction:
    """The function of one layer. `contexts` has one entry per operator of the graph."""
    writer = Writer(graph, parameters)
    hidden, lines = read_inputs(writer)
    for index, (operator, context) in enumerate(zip(graph.operators, contexts, strict=True)):
        lines += operator_lines(writer, index, operator, context)
    return finish(writer, hidden, lines)


def read_inputs(writer: Writer) -> tuple[str, list[str]]:
    """(local name of the hidden state or 'unused', the lines that fetch all other inputs)."""
    lines, hidden = [], "unused"
    for tensor in writer.graph.inputs:
        name = writer.local(tensor.name)
        if tensor.role != "activation":
            lines.append(f"{name} = record.feed.{tensor.role}")
        elif hidden == "unused":
            hidden = name
        else:
            lines.append(f"{name} = record.extras[{tensor.name!r}]")
    return hidden, lines


def operator_lines(writer: Writer, index: int, operator: Any, context: Context) -> list[str]:
    step = build_step(operator, context)
    arguments = ["record"] if step.wants_record else []
    arguments += [writer.argument(name) for name in operator.inputs]
    if step.prepare is not None:
        arguments.append(f"*{writer.bind('prepare', step.prepare)}(record)")
    targets = ", ".join(writer.local(name) for name in operator.outputs)
    lines = [f"{targets} = {writer.bind('op', step.call)}({', '.join(arguments)})"]
    dead = writer.dead_after(index, (*operator.inputs, *operator.outputs))
    return [*lines, dead] if dead else lines


def finish(writer: Writer, hidden: str, lines: list[str]) -> LayerFunction:
    graph = writer.graph
    extras = [f"record.extras[{name!r}] = {writer.local(name)}" for name in graph.outputs[1:]]
    body = [*lines, *extras, f"return {writer.local(graph.outputs[0])}"]
    names = ", ".join(writer.bound)
    source = f"def make({names}):\n    def layer(record, {hidden}):\n"
    source += "".join(f"        {line}\n" for line in body) + "    return layer\n"
    scope: dict[str, Any] = {}
    exec(compile(source, "<pipefit layer>", "exec"), scope)
    activations = [tensor.name for tensor in graph.inputs if tensor.role == "activation"]
    return LayerFunction(
        call=scope["make"](**writer.bound),
        source=source,
        takes_hidden=bool(activations),
        extra_inputs=tuple(activations[1:]),
        extra_outputs=tuple(graph.outputs[1:]),
        returns_loss=graph.tensor(graph.outputs[0]).shape == (),
    )
