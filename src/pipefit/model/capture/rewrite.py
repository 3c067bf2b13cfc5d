"""Editing an operator graph: find what makes a value, put other operators in its place, drop what nobody reads.

Pure: an `Editor` is made from a graph, changed, and gives a new graph. The rewrites stand in `lift.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pipefit.model.graph import Graph, Operator, Shape, Tensor


class Editor:
    """A graph under change. Values are known by name; every value has one producer."""

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
        self._index()

    def _index(self) -> None:
        self._producers = {name: operator for operator in self.operators for name in operator.outputs}

    def resolve(self, name: str) -> str:
        """The name that stands for `name` now."""
        while name in self._aliases:
            name = self._aliases[name]
        return name

    def producer(self, name: str) -> Operator | None:
        """The operator that makes this value; None for inputs and parameters."""
        return self._producers.get(self.resolve(name))

    def match(self, name: str, kind: str) -> Operator | None:
        """The producer of `name` if it is of this kind."""
        operator = self.producer(name)
        return operator if operator is not None and operator.kind == kind else None

    def through(self, name: str, kinds: Iterable[str]) -> str:
        """The value behind any chain of one-input operators of these kinds."""
        name = self.resolve(name)
        allowed = tuple(kinds)
        operator = self.producer(name)
        while operator is not None and operator.kind in allowed:
            name = self.resolve(operator.inputs[0])
            operator = self.producer(name)
        return name

    def shape(self, name: str) -> Shape:
        """The shape of a value or parameter."""
        name = self.resolve(name)
        return self.parameters[name].shape if name in self.parameters else self.tensors[name].shape

    def dtype(self, name: str) -> str:
        name = self.resolve(name)
        return "compute" if name in self.parameters else self.tensors[name].dtype

    def users(self, name: str) -> list[Operator]:
        """The operators that read this value."""
        name = self.resolve(name)
        return [op for op in self.operators if any(self.resolve(item) == name for item in op.inputs)]

    def alias(self, name: str, target: str) -> None:
        """Let `target` stand for `name` everywhere."""
        name, target = self.resolve(name), self.resolve(target)
        if name != target:
            self._aliases[name] = target

    def insert(
        self,
        before: Operator,
        kind: str,
        inputs: tuple[str, ...],
        shape: Shape,
        dtype: str,
        attributes: Mapping[str, Any] | None = None,
    ) -> str:
        """A new operator before `before`; gives the name of its value."""
        while (name := f"new_{self._fresh}") in self.tensors:  # an earlier editor may have made some
            self._fresh += 1
        operator = Operator(
            kind=kind, inputs=inputs, outputs=(name,), attributes=dict(attributes or {}), source=before.source
        )
        self.tensors[name] = Tensor(name=name, shape=shape, dtype=dtype)
        self.operators.insert(self._position(before), operator)
        self._producers[name] = operator
        return name

    def replace(
        self, old: Operator, kind: str, inputs: tuple[str, ...], attributes: Mapping[str, Any] | None = None
    ) -> Operator:
        """Put another operator in the place of `old`; it makes the same value."""
        new = Operator(
            kind=kind, inputs=inputs, outputs=old.outputs, attributes=dict(attributes or {}), source=old.source
        )
        self.operators[self._position(old)] = new
        for name in new.outputs:
            self._producers[name] = new
        return new

    def _position(self, operator: Operator) -> int:
        return next(i for i, candidate in enumerate(self.operators) if candidate is operator)

    def graph_now(self) -> Graph:
        """The graph as it is: aliases resolved, dead operators dropped."""
        outputs = tuple(self.resolve(name) for name in self.outputs)
        alive, operators = set(outputs), []
        for operator in reversed(self.operators):
            if not any(name in alive for name in operator.outputs):
                continue
            inputs = tuple(self.resolve(name) if name else "" for name in operator.inputs)
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
    """The same graph with values named `KIND_N` in order, so that equal programs have equal hashes."""
    names = {tensor.name: tensor.name for tensor in graph.inputs}
    names.update({parameter.name: parameter.name for parameter in graph.parameters})
    taken = frozenset(names)
    names[""] = ""
    counts: dict[str, int] = {}
    for operator in graph.operators:
        for output in operator.outputs:
            number = counts.get(operator.kind, 0)
            while f"{operator.kind}_{number}" in taken:
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
            Tensor(name=names[tensor.name], shape=tensor.shape, dtype=tensor.dtype) for tensor in graph.tensors
        ),
    )


def unlike(name: str, taken: Collection[str], instead: str = "") -> str:
    """A name that is not among those that are taken: itself, else `instead`, else one with underscores behind."""
    name = instead if instead and name in taken else name
    while name in taken:
        name += "_"
    return name
