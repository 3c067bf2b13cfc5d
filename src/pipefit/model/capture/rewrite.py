"""Editing of operator graphs: find producers, replace operators, drop unused ones.

Pure: a `GraphEditor` is made from a graph, changed, and builds a new graph. The rewrites are in `lift.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pipefit.model.graph import Graph, Operator, Shape, TensorSpec


class GraphEditor:
    """A graph under change. Values are identified by name; every value has one producer."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs = {tensor.name: tensor for tensor in graph.inputs}
        self.parameters = {parameter.name: parameter for parameter in graph.parameters}
        self.tensors = {tensor.name: tensor for tensor in (*graph.inputs, *graph.tensors)}
        self.operators = list(graph.operators)
        self.outputs = list(graph.outputs)
        self._producers: dict[str, Operator] = {}
        self._aliases: dict[str, str] = {}
        self._fresh = 0
        self._rebuild_index()

    def _rebuild_index(self) -> None:
        self._producers = {name: operator for operator in self.operators for name in operator.outputs}

    def resolve_name(self, name: str) -> str:
        """The name that `name` is currently an alias of."""
        while name in self._aliases:
            name = self._aliases[name]
        return name

    def find_producer(self, name: str) -> Operator | None:
        """The operator that computes this value; None for inputs and parameters."""
        return self._producers.get(self.resolve_name(name))

    def match_kind(self, name: str, kind: str) -> Operator | None:
        """The producer of `name` if it is of this kind."""
        operator = self.find_producer(name)
        return operator if operator is not None and operator.kind == kind else None

    def skip_kinds(self, name: str, kinds: Iterable[str]) -> str:
        """The value behind any chain of one-input operators of these kinds."""
        name = self.resolve_name(name)
        allowed = tuple(kinds)
        operator = self.find_producer(name)
        while operator is not None and operator.kind in allowed:
            name = self.resolve_name(operator.inputs[0])
            operator = self.find_producer(name)
        return name

    def value_shape(self, name: str) -> Shape:
        """The shape of a value or parameter."""
        name = self.resolve_name(name)
        return self.parameters[name].shape if name in self.parameters else self.tensors[name].shape

    def value_dtype(self, name: str) -> str:
        name = self.resolve_name(name)
        return "compute" if name in self.parameters else self.tensors[name].dtype

    def find_users(self, name: str) -> list[Operator]:
        """The operators that read this value."""
        name = self.resolve_name(name)
        return [op for op in self.operators if any(self.resolve_name(item) == name for item in op.inputs)]

    def alias_value(self, name: str, target: str) -> None:
        """Replace `name` by `target` everywhere."""
        name, target = self.resolve_name(name), self.resolve_name(target)
        if name != target:
            self._aliases[name] = target

    def insert_operator(
        self,
        before: Operator,
        kind: str,
        inputs: tuple[str, ...],
        shape: Shape,
        dtype: str,
        attributes: Mapping[str, Any] | None = None,
    ) -> str:
        """Insert a new operator before `before` and return the name of its value."""
        while (name := f"new_{self._fresh}") in self.tensors:  # an earlier editor may have made some
            self._fresh += 1
        operator = Operator(
            kind=kind, inputs=inputs, outputs=(name,), attributes=dict(attributes or {}), source=before.source
        )
        self.tensors[name] = TensorSpec(name=name, shape=shape, dtype=dtype)
        self.operators.insert(self._find_position(before), operator)
        self._producers[name] = operator
        return name

    def replace_operator(
        self, old: Operator, kind: str, inputs: tuple[str, ...], attributes: Mapping[str, Any] | None = None
    ) -> Operator:
        """Replace `old` by another operator that computes the same value."""
        new = Operator(
            kind=kind, inputs=inputs, outputs=old.outputs, attributes=dict(attributes or {}), source=old.source
        )
        self.operators[self._find_position(old)] = new
        for name in new.outputs:
            self._producers[name] = new
        return new

    def _find_position(self, operator: Operator) -> int:
        return next(i for i, candidate in enumerate(self.operators) if candidate is operator)

    def build_graph(self) -> Graph:
        """Return the edited graph: aliases resolved, dead operators dropped."""
        outputs = tuple(self.resolve_name(name) for name in self.outputs)
        alive, operators = set(outputs), []
        for operator in reversed(self.operators):
            if not any(name in alive for name in operator.outputs):
                continue
            inputs = tuple(self.resolve_name(name) if name else "" for name in operator.inputs)
            alive.update(inputs)
            operators.append(
                Operator(
                    kind=operator.kind,
                    inputs=inputs,
                    outputs=operator.outputs,
                    attributes=operator.attributes,
                    source=operator.source,
                )
            )
        operators.reverse()
        tensors = tuple(self.tensors[name] for operator in operators for name in operator.outputs)
        return Graph(
            inputs=tuple(self.inputs.values()),
            outputs=outputs,
            operators=tuple(operators),
            parameters=self.graph.parameters,
            tensors=tensors,
        )


def canonical_names(graph: Graph) -> Graph:
    """Return the same graph with values named `KIND_N` in order, so that equal programs have equal hashes."""
    names = {tensor.name: tensor.name for tensor in graph.inputs}
    names.update({parameter.name: parameter.name for parameter in graph.parameters})
    reserved = frozenset(names)
    names[""] = ""
    counts: dict[str, int] = {}
    for operator in graph.operators:
        for output in operator.outputs:
            number = counts.get(operator.kind, 0)
            while f"{operator.kind}_{number}" in reserved:
                number += 1
            counts[operator.kind] = number + 1
            names[output] = f"{operator.kind}_{number}"
    return Graph(
        inputs=graph.inputs,
        outputs=tuple(names[name] for name in graph.outputs),
        operators=tuple(
            Operator(
                kind=operator.kind,
                inputs=tuple(names[name] for name in operator.inputs),
                outputs=tuple(names[name] for name in operator.outputs),
                attributes=operator.attributes,
                source=operator.source,
            )
            for operator in graph.operators
        ),
        parameters=graph.parameters,
        tensors=tuple(
            TensorSpec(name=names[tensor.name], shape=tensor.shape, dtype=tensor.dtype) for tensor in graph.tensors
        ),
    )


def unused_name(name: str, taken: Collection[str], instead: str = "") -> str:
    """Return a name that is not in `taken`: `name` itself, else `instead`, else one with underscores appended."""
    name = instead if instead and name in taken else name
    while name in taken:
        name += "_"
    return name
