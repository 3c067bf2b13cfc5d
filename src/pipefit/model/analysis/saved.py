"""Bytes that a forward saves for its backward, and that a deferred weight gradient (W) holds, by the runtime's rules.

`docs/reference/operators.md` states the rules. A storage counts once, even if several operators save it or views of
it. Not counted: parameters, inputs from the step plan (tokens, positions, labels), and a layer's outputs, which count
as the next layer's input x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from pipefit.model.graph import Graph, Operator, Shape, size_factors, size_value
from pipefit.model.ops.kind import OperatorCall
from pipefit.model.ops.table import KINDS
from pipefit.model.ops.unshard import stored_weights

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Saved bytes of one layer, microbatch and slice."""

    after_forward: int
    "Alive from F to its B or I."
    after_input_gradient: int
    "Alive from I to its W."


@dataclass(frozen=True, slots=True)
class KeptValues:
    """Names and indices of the tensors that stay alive after a forward."""

    values: tuple[str, ...]
    "Values whose storages are kept (roots of views), in order of production, without the layer's outputs."
    statistics: tuple[int, ...]
    "Indices of the operators whose own bytes (statistics, masks) are kept."
    again: tuple[int, ...]
    "Indices of the operators that the backward reruns, in order."


def saved_bytes(
    graph: Graph, symbols: Mapping[str, int], compute_bytes: int, recompute: Recompute, sliced: bool = False
) -> SavedBytes:
    """Return the bytes kept after a forward and after an input-gradient pass of `graph`, for `symbols` B, T (and P).

    `sliced`: the microbatch has several slices, so values that later slices read are kept under every recomputation
    choice.
    """
    analysis = analyse_graph(graph, compute_bytes)
    held = kept_values(graph, recompute, compute_bytes, sliced)
    values = sum(analysis.value_bytes(name, symbols) for name in held.values)
    for index in held.statistics:
        operator = graph.operators[index]
        values += KINDS[operator.kind].own_bytes(operator_call(graph, operator, symbols, compute_bytes))
    return SavedBytes(values, _pending_bytes(analysis, symbols))


def effective_recompute(graph: Graph, recompute: Recompute) -> Recompute:
    """Treat `full` as `selective` on a layer with fewer than two heavy operators (embedding, head, loss): rerunning
    such a layer costs much and frees little."""
    if recompute == "full" and sum(KINDS[operator.kind].heavy for operator in graph.operators) < 2:
        return "selective"
    return recompute


def kv_gradient_bytes(graph: Graph, symbols: Mapping[str, int], compute_bytes: int) -> int:
    """Bytes of the key and value gradients that later slices add for the T tokens of one slice, in float32 or wider.
    Alive from the first backward of a later slice to the slice's own B or I."""
    analysis = analyse_graph(graph, compute_bytes)
    kept_bytes = sum(analysis.value_bytes(name, symbols) for name in _slice_state(graph))
    return kept_bytes // compute_bytes * max(4, compute_bytes)


def _slice_state(graph: Graph) -> list[str]:
    """The values of one slice that later slices read."""
    return [operator.inputs[index] for operator in graph.operators for index in KINDS[operator.kind].read_later]


def kept_values(graph: Graph, recompute: Recompute, compute_bytes: int, sliced: bool = False) -> KeptValues:
    """Return the values, statistics and reruns of this graph under `recompute`. `sliced`: see `saved_bytes`."""
    analysis = analyse_graph(graph, compute_bytes)
    if (recompute, sliced) not in analysis.kept:
        held = _select_kept(graph, recompute, analysis)
        analysis.kept[recompute, sliced] = _add_slice_state(held, graph, recompute, analysis) if sliced else held
    return analysis.kept[recompute, sliced]


def _add_slice_state(held: KeptValues, graph: Graph, recompute: Recompute, analysis: GraphAnalysis) -> KeptValues:
    """Add the values that later slices read. Under full recomputation a value is copied if it is a part of a storage
    that is not kept; otherwise its storage is kept."""
    names = [name for name in _slice_state(graph) if analysis.is_activation(name)]
    if effective_recompute(graph, recompute) != "full":
        names = list(analysis.storage_roots(names))
    values = (*held.values, *(name for name in names if name not in held.values))
    return KeptValues(values, held.statistics, held.again)


def _select_kept(graph: Graph, recompute: Recompute, analysis: GraphAnalysis) -> KeptValues:
    choice = effective_recompute(graph, recompute)
    everything = range(len(graph.operators))
    if choice == "full":
        inputs = [tensor.name for tensor in graph.inputs if analysis.is_activation(tensor.name)]
        return KeptValues(tuple(inputs), (), tuple(everything))
    needed = [name for operator in graph.operators for name in analysis.saved_values(operator)]
    with_gradient = [index for index in everything if analysis.needs_gradient(graph.operators[index].outputs[0])]
    if choice == "none":
        return KeptValues(
            analysis.storage_roots(needed), tuple(index for index in with_gradient if analysis.has_own_bytes(index)), ()
        )
    again: set[int] = set()
    leaves = [leaf for name in needed for leaf in analysis.find_sources(name, again)]
    statistics = [index for index in with_gradient if analysis.keeps_own_bytes(index) and analysis.has_own_bytes(index)]
    return KeptValues(analysis.storage_roots(leaves), tuple(statistics), tuple(sorted(again)))


def operator_call(graph: Graph, operator: Operator, symbols: Mapping[str, int], compute_bytes: int) -> OperatorCall:
    """The operator with numeric sizes."""
    shapes = _symbolic_shapes(graph)

    def shape_of(name: str) -> tuple[int, ...] | None:
        return tuple([size_value(size, symbols) for size in shapes[name]]) if name else None

    outputs = tuple(shape_of(name) or () for name in operator.outputs)
    return OperatorCall(tuple(map(shape_of, operator.inputs)), outputs, operator.attributes, symbols, compute_bytes)


def _symbolic_shapes(graph: Graph) -> Mapping[str, Shape]:
    """Return the shape of every tensor and parameter of a graph, listed once."""
    if id(graph) not in _SHAPES:
        if len(_SHAPES) >= MOST_ANALYSES:
            _SHAPES.clear()
        tensors = {tensor.name: tensor.shape for tensor in reversed((*graph.inputs, *graph.tensors))}
        _SHAPES[id(graph)] = graph, {**tensors, **{spec.name: spec.shape for spec in graph.parameters}}
    return _SHAPES[id(graph)][1]


_SHAPES: dict[int, tuple[Graph, Mapping[str, Shape]]] = {}
"""Shapes by graph identity, which the entry keeps alive."""


def element_bytes(dtype: str, compute_bytes: int) -> int:
    """Bytes of one element. `float32` in a graph means float32 or wider."""
    if dtype == "compute":
        return compute_bytes
    return {"float32": max(4, compute_bytes), "int64": 8, "int32": 4, "uint8": 1, "bool": 1}[dtype]


_ANALYSES: dict[tuple[int, int], GraphAnalysis] = {}
"""Analyses by graph identity, which the entry keeps alive, and bytes per element."""

MOST_ANALYSES = 1024


def analyse_graph(graph: Graph, compute_bytes: int) -> GraphAnalysis:
    """Return the cached analysis of a graph, which the costs of every size of a layer use."""
    key = (id(graph), compute_bytes)
    if key not in _ANALYSES:
        if len(_ANALYSES) >= MOST_ANALYSES:
            _ANALYSES.clear()
        _ANALYSES[key] = GraphAnalysis(graph, compute_bytes)
    return _ANALYSES[key]


class GraphAnalysis:
    """Storages and gradients of one graph: aliases, saved values and gradient flow."""

    def __init__(self, graph: Graph, compute_bytes: int) -> None:
        self.graph = graph
        self.compute_bytes = compute_bytes
        self.parameters = stored_weights(graph)
        self.tensors = {tensor.name: tensor for tensor in (*graph.inputs, *graph.tensors)}
        self.producer = {name: index for index, op in enumerate(graph.operators) for name in op.outputs}
        self.consumers: dict[str, list[int]] = {}
        for index, op in enumerate(graph.operators):
            for name in op.inputs:
                self.consumers.setdefault(name, []).append(index)
        self.root: dict[str, str] = {}
        self.kept: dict[tuple[Recompute, bool], KeptValues] = {}
        "Cached results of `kept_values`."
        self.peaks: dict[tuple[Recompute, bool, bool], Any] = {}
        "Moments of the actions, by recomputation and by two flags of `transient_bytes`: see `analysis/peaks.py`."
        self._gradient: dict[str, bool] = {"": False}
        self._saves: dict[str, tuple[str, ...]] = {}
        self._factors: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._find_roots()
        self._find_gradients()

    def _find_roots(self) -> None:
        scrambled: set[str] = set()
        for tensor in self.graph.inputs:
            self.root[tensor.name] = tensor.name
        for operator in self.graph.operators:
            source, result = operator.inputs[0] if operator.inputs else "", operator.outputs[0]
            for name in operator.outputs:
                self.root[name] = name
            if source in self.parameters or not self._shares_storage(operator):
                continue
            if operator.kind == "reshape" and source in scrambled:
                continue  # a reshape of permuted dimensions copies
            self.root[result] = self.root[source]
            if source in scrambled or operator.kind in ("transpose", "expand"):
                scrambled.add(result)

    def _shares_storage(self, operator: Operator) -> bool:
        if operator.kind == "cast":
            before, after = self.tensors[operator.inputs[0]], self.tensors[operator.outputs[0]]
            return self._element_bytes(before.dtype) == self._element_bytes(after.dtype)
        return KINDS[operator.kind].view

    def _find_gradients(self) -> None:
        for tensor in self.graph.inputs:
            self._gradient[tensor.name] = self.is_activation(tensor.name)
        for parameter in self.graph.parameters:
            self._gradient[parameter.name] = parameter.trainable
        for operator in self.graph.operators:
            flows = any(self._gradient[name] for name in operator.inputs)
            for name in operator.outputs:
                self._gradient[name] = flows

    def _element_bytes(self, dtype: str) -> int:
        return element_bytes(dtype, self.compute_bytes)

    def needs_gradient(self, name: str) -> bool:
        return self._gradient[name]

    def is_activation(self, name: str) -> bool:
        """False for parameters and for inputs from the step plan."""
        if name in self.parameters:
            return False
        return name in self.producer or self.tensors[name].role == "activation"

    def saved_values(self, operator: Operator) -> tuple[str, ...]:
        """The values that the backward of an operator of this graph needs."""
        result = operator.outputs[0]
        if result not in self._saves:
            needed = self.needs_gradient(result)
            names = KINDS[operator.kind].saves(operator, self.needs_gradient) if needed else ()
            self._saves[result] = tuple(name for name in names if name and self.is_activation(name))
        return self._saves[result]

    def has_own_bytes(self, index: int) -> bool:
        kind = KINDS[self.graph.operators[index].kind]
        return kind.own_bytes is not KINDS["add"].own_bytes

    def keeps_own_bytes(self, index: int) -> bool:
        return self.is_boundary(index) or KINDS[self.graph.operators[index].kind].own_bytes_stay

    def is_boundary(self, index: int) -> bool:
        return KINDS[self.graph.operators[index].kind].boundary

    def keeps_outputs(self, index: int) -> bool:
        """Return whether selective recomputation keeps the outputs of an operator."""
        return self.is_boundary(index) and not KINDS[self.graph.operators[index].kind].reruns

    def find_sources(self, name: str, again: set[int]) -> list[str]:
        """Return the kept boundary outputs and layer inputs that `name` is computed from; add the operators between to
        `again`."""
        sources: list[str] = []
        stack, seen = [name], set()
        while stack:
            value = stack.pop()
            if value in seen or not value or not self.is_activation(value):
                continue
            seen.add(value)
            index = self.producer.get(value)
            if index is None or self.keeps_outputs(index):
                sources.append(value)
                continue
            again.add(index)
            stack += self.graph.operators[index].inputs
        return sources

    def storage_roots(self, names: list[str]) -> tuple[str, ...]:
        """Distinct storages of these values in order of production, without outputs of the layer."""
        inputs = {tensor.name for tensor in self.graph.inputs}
        outputs = {self.root[name] for name in self.graph.outputs} - inputs
        roots = {self.root[name] for name in names} - outputs
        return tuple(name for name in self.tensors if name in roots)

    def value_bytes(self, name: str, symbols: Mapping[str, int]) -> int:
        if name not in self._factors:
            tensor = self.tensors[name]
            parts = [size_factors(str(size)) for size in tensor.shape]
            number = prod(part for part, _ in parts)
            letters = tuple(letter for _, part in parts for letter in part)
            self._factors[name] = (number * self._element_bytes(tensor.dtype), letters)
        number, letters = self._factors[name]
        return number * prod(map(symbols.__getitem__, letters))

    def gradient_root(self, name: str) -> str:
        """The value whose gradient shares its storage with the gradient of `name`: sums and views pass it on."""
        users = self.consumers.get(name, [])
        if name in self.graph.outputs or len(users) != 1:
            return name
        operator = self.graph.operators[users[0]]
        return self.gradient_root(operator.outputs[0]) if self.shares_gradient(operator, name) else name

    def shares_gradient(self, operator: Operator, name: str) -> bool:
        """Return whether the gradients of the operator's output and of its input `name` share one storage."""
        return operator.kind in ("reshape", "transpose") or (
            (operator.kind == "add" or (operator.kind == "sub" and operator.inputs[0] == name))
            and self.tensors[operator.outputs[0]].shape == self.tensors[name].shape
            and operator.inputs.count(name) == 1
        )

    def is_trainable(self, operator: Operator) -> bool:
        """Return whether the operator reads a trainable parameter."""
        return any(self.parameters[name].trainable for name in operator.inputs if name in self.parameters)

    def pending_gradients(self) -> set[str]:
        """The values (roots of gradients) whose gradients a deferred weight gradient (W) holds."""
        return {
            self.gradient_root(operator.outputs[0])
            for operator in self.graph.operators
            if self.is_trainable(operator) and KINDS[operator.kind].pending_gradients
        }


def _pending_bytes(analysis: GraphAnalysis, symbols: Mapping[str, int]) -> int:
    values: set[str] = set()
    total = 0
    for operator in analysis.graph.operators:
        if analysis.is_trainable(operator):
            kind = KINDS[operator.kind]
            values |= {analysis.root[operator.inputs[i]] for i in kind.pending_values}
            total += kind.pending_bytes(operator_call(analysis.graph, operator, symbols, analysis.compute_bytes))
    counted = [name for name in values if analysis.is_activation(name)]
    return total + sum(analysis.value_bytes(name, symbols) for name in (*counted, *analysis.pending_gradients()))
