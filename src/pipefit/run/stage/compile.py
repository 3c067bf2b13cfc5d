"""Translation of an operator graph to one Python function: the steps called in order on local variables.

The text of the function is written once per layer and compiled by Python itself: no dictionary lookups, no loop over
operators, every value dropped after its last use. `source` of the result is that text, for a person to read:

    def layer(record, x):
        positions = record.feed.positions
        n = op0(x, p0)
        q = op1(record, n, p1, None)
        ...

Under selective recomputation, and if regions are compiled, each pointwise region is a separate function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipefit.model.analysis.regions import OperatorRegion, arrange_regions
from pipefit.model.analysis.saved import effective_recompute, kept_values
from pipefit.model.graph import Graph
from pipefit.model.ops import KINDS
from pipefit.run.autograd.regions import recall_outputs, run_region
from pipefit.run.ops import OperatorContext, OperatorStep, build_step


@dataclass(frozen=True, slots=True)
class LayerFunction:
    """One layer, ready to run: `call(record, x)` with x the hidden state, or None for a layer without one."""

    call: Callable[..., Any]
    source: str
    extra_inputs: tuple[str, ...]
    "Activations besides the hidden state, read from `record.extras`."
    extra_outputs: tuple[str, ...]
    "Outputs after the first, written to `record.extras`."
    returns_loss: bool


def compile_layer(
    graph: Graph,
    parameters: Mapping[str, torch.nn.Parameter],
    contexts: Sequence[OperatorContext],
    recompute: Any = "none",
    backend: str | None = None,
) -> LayerFunction:
    """Return the function of one layer. `contexts` has one entry per operator; `backend` compiles the pointwise
    regions."""
    again = effective_recompute(graph, recompute) == "selective"
    members: set[int] = set()
    if again:
        members.update(kept_values(graph, "selective", contexts[0].dtype.itemsize).again)
    if backend is not None:
        members.update(i for i, operator in enumerate(graph.operators) if not KINDS[operator.kind].boundary)
    items = arrange_regions(graph, sorted(members)) if members else list(range(len(graph.operators)))
    writer = LayerWriter(graph, parameters, contexts, items)
    for position, item in enumerate(items):
        if isinstance(item, OperatorRegion):
            writer.write_region(position, item, again, backend)
        else:
            writer.write_operator(position, item)
    return writer.finish_layer()


class LayerWriter:
    """Collects the lines of a layer's function and the objects that it refers to."""

    def __init__(
        self,
        graph: Graph,
        parameters: Mapping[str, torch.nn.Parameter],
        contexts: Sequence[OperatorContext],
        items: Sequence[int | OperatorRegion],
    ) -> None:
        self.graph = graph
        self.contexts = contexts
        self.items = items
        self.bound: dict[str, Any] = {"recall": recall_outputs, "run_region": run_region}
        self.locals: dict[str, str] = {}
        self.lines: list[str] = []
        self.recipes: dict[str, tuple[str, int]] = {}
        "Value -> (local name of its recompute region, index among the region's results)."
        self.parameters = {spec.name: self.bind_object("p", parameters[spec.name]) for spec in graph.parameters}
        self.last_use = dict.fromkeys(graph.outputs, len(items))
        for position, item in enumerate(items):
            for name in self.item_inputs(item):
                self.last_use[name] = max(position, self.last_use.get(name, 0))
        self.hidden = self.read_inputs()

    def bind_object(self, prefix: str, value: Any) -> str:
        """Return a new name bound to an object of the function."""
        name = f"{prefix}{len(self.bound)}"
        self.bound[name] = value
        return name

    def local_name(self, tensor: str) -> str:
        """Return the local variable of a value, a valid Python identifier for any graph name."""
        if tensor not in self.locals:
            clean = "".join(c if c.isalnum() else "_" for c in tensor)
            self.locals[tensor] = f"v{len(self.locals)}_{clean}"
        return self.locals[tensor]

    def argument_name(self, name: str) -> str:
        if not name:
            return "None"
        return self.parameters.get(name) or self.local_name(name)

    def item_inputs(self, item: int | OperatorRegion) -> tuple[str, ...]:
        return item.inputs if isinstance(item, OperatorRegion) else self.graph.operators[item].inputs

    def read_inputs(self) -> str:
        """Write the lines that fetch the inputs; return the local name of the hidden state, or `unused`."""
        hidden = "unused"
        for tensor in self.graph.inputs:
            name = self.local_name(tensor.name)
            if tensor.role == "data":
                self.lines.append(f"{name} = record.feed.data[{tensor.name!r}]")
            elif tensor.role != "activation":
                self.lines.append(f"{name} = record.feed.{tensor.role}")
            elif hidden == "unused":
                hidden = name
            else:
                self.lines.append(f"{name} = record.extras[{tensor.name!r}]")
        return hidden

    def write_operator(self, place: int, index: int, last: bool = True) -> None:
        """Write the direct call of one operator. `last` of its item: dead values may be dropped."""
        operator = self.graph.operators[index]
        step = build_step(operator, self.contexts[index])
        arguments = ["record"] if step.wants_record else []
        arguments += [self.argument_name(name) for name in operator.inputs]
        if step.prepare is not None:
            arguments.append(f"*{self.bind_object('prepare', step.prepare)}(record)")
        targets = ", ".join(self.local_name(name) for name in operator.outputs)
        line = f"{targets} = {self.bind_object('op', step.call)}({', '.join(arguments)})"
        known = [name for name in dict.fromkeys(operator.inputs) if name in self.recipes]
        if known:
            entries = ", ".join(f"({self.local_name(n)}, {self.recipes[n][0]}, {self.recipes[n][1]})" for n in known)
            self.lines.append(f"with recall({entries}):")
            line = "    " + line
        self.lines.append(line)
        if last:
            self.write_drops(place, (*self.item_inputs(self.items[place]), *operator.outputs))

    def write_region(self, place: int, region: OperatorRegion, again: bool, backend: str | None) -> None:
        """Write a region: a function of its own, over values, parameters and prepared values, that returns a tuple."""
        views = all(KINDS[self.graph.operators[i].kind].view for i in region.operators)
        if views and not any(name in self.recipes for name in region.inputs):
            for index in region.operators:
                self.write_operator(place, index, last=index == region.operators[-1])
            return
        body, prepared = self.region_body(region)
        names = [name for name in region.inputs if name not in self.parameters]
        names += [name for name in region.inputs if name in self.parameters]
        formal = [f"a{i}" for i in range(len(names))] + [f"e{i}" for i in range(len(prepared))]
        scope = dict(zip(names, formal, strict=False))
        source, objects = region_source(self.graph, region, body, scope, formal, backend is not None)
        context = self.contexts[0]
        function = compiled_region(self.graph, region, source, objects, backend, f"{context.device} {context.dtype}")
        bound = self.bind_object("region", function)
        actual = [self.argument_name(name) for name in names] + [
            f"{self.bind_object('prepare', p)}(record)" for p in prepared
        ]
        targets = "".join(f"{self.local_name(name)}, " for name in region.outputs)
        if again:
            recipe = f"h{place}"
            sources = {i: self.recipes[n] for i, n in enumerate(names) if n in self.recipes}
            text = "{" + ", ".join(f"{i}: ({handle}, {index})" for i, (handle, index) in sources.items()) + "}"
            call_inputs = "".join(f"{expression}, " for expression in actual)
            self.lines.append(f"{recipe}, ({targets}) = run_region({bound}, ({call_inputs}), {text})")
            self.recipes |= {name: (recipe, index) for index, name in enumerate(region.outputs)}
        else:
            self.lines.append(f"{targets}= {bound}({', '.join(actual)})")
        self.write_drops(place, (*region.inputs, *region.outputs))

    def region_body(self, region: OperatorRegion) -> tuple[list[tuple[int, OperatorStep, int | None]], list[Any]]:
        """Return ([(operator, step, index of its prepared values or None)], the prepare functions)."""
        body: list[tuple[int, OperatorStep, int | None]] = []
        prepared: list[Any] = []
        for index in region.operators:
            step = build_step(self.graph.operators[index], self.contexts[index])
            assert not step.wants_record, f"{self.graph.operators[index].kind} cannot stand in a region"
            body.append((index, step, None if step.prepare is None else len(prepared)))
            if step.prepare is not None:
                prepared.append(step.prepare)
        return body, prepared

    def write_drops(self, place: int, names: Sequence[str]) -> None:
        """Write `del` for the values that have no later use."""
        dead = [n for n in dict.fromkeys(names) if n and n not in self.parameters and self.last_use.get(n, -1) <= place]
        if dead:
            self.lines.append(f"del {', '.join(map(self.local_name, dead))}")

    def finish_layer(self) -> LayerFunction:
        graph = self.graph
        extras = [f"record.extras[{name!r}] = {self.local_name(name)}" for name in graph.outputs[1:]]
        body = [*self.lines, *extras, f"return {self.local_name(graph.outputs[0])}"]
        source = function_source("layer", ["record", self.hidden], body)
        activations = [tensor.name for tensor in graph.inputs if tensor.role == "activation"]
        return LayerFunction(
            call=make_function("layer", source, self.bound),
            source=source,
            extra_inputs=tuple(activations[1:]),
            extra_outputs=tuple(graph.outputs[1:]),
            returns_loss=graph.find_tensor(graph.outputs[0]).shape == (),
        )


def region_source(
    graph: Graph,
    region: OperatorRegion,
    body: Sequence[tuple[int, OperatorStep, int | None]],
    scope: dict[str, str],
    formal: Sequence[str],
    traced: bool,
) -> tuple[str, dict[str, Any]]:
    """Return the text of a region's function, and the objects that it refers to. `traced`: for a compiler."""
    objects: dict[str, Any] = {}
    lines = []
    for index, step, prepared in body:
        operator = graph.operators[index]
        call = f"op{index}"
        objects[call] = step.traced if traced and step.traced is not None else step.call
        arguments = [scope[name] if name else "None" for name in operator.inputs]
        if prepared is not None:
            arguments.append(f"*e{prepared}")
        for name in operator.outputs:
            scope[name] = f"t{len(scope)}"
        lines.append(f"{', '.join(scope[name] for name in operator.outputs)} = {call}({', '.join(arguments)})")
    lines.append(f"return ({''.join(scope[name] + ', ' for name in region.outputs)})")
    return function_source("region", formal, lines), objects


_COMPILED: dict[tuple[str, tuple[int, ...], str, str], Callable[..., Any]] = {}


def compiled_region(
    graph: Graph, region: OperatorRegion, source: str, objects: Mapping[str, Any], backend: str | None, place: str
) -> Callable[..., Any]:
    """Return the region's function, through torch.compile if there is a backend and something to fuse.

    Equal regions of equal graphs share one compiled function: the parts that differ between layers (parameters, keys of
    dropout) are arguments.
    """
    function = make_function("region", source, objects)
    kinds = [KINDS[graph.operators[i].kind] for i in region.operators]
    if backend is None or all(kind.view or kind.boundary for kind in kinds):
        return function
    key = (graph.hash, region.operators, backend, place)
    if key not in _COMPILED:
        _COMPILED[key] = torch.compile(function, backend=backend, fullgraph=True)
    return _COMPILED[key]


def function_source(name: str, arguments: Sequence[str], body: Sequence[str]) -> str:
    return f"def {name}({', '.join(arguments)}):\n" + "".join(f"    {line}\n" for line in body)


def make_function(name: str, source: str, objects: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function defined by `source`, with `objects` as local constants of an enclosing function."""
    inner = "".join(f"    {line}\n" for line in source.splitlines())
    scope: dict[str, Any] = {}
    exec(compile(f"def make({', '.join(objects)}):\n{inner}    return {name}\n", f"<pipefit {name}>", "exec"), scope)
    result: Callable[..., Any] = scope["make"](**objects)
    return result
