"""Graphs with low-rank adapters and frozen parameters, from the graphs of the base model.

A linear layer y = W x becomes y = W x + B (scale A dropout(x)). A and B are parameters of their own, and all parameters
of the base model are frozen. Equal layers still share one graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from pipefit.errors import ModelError, most_like
from pipefit.model.adapters.options import AdapterConfig, read_adapters, read_freeze, tuned_config
from pipefit.model.adapters.targets import FACTOR_A, FACTOR_B, WEIGHT, LinearModule, select_targets
from pipefit.model.families import InitialValue
from pipefit.model.graph import Graph, Layer, Model, Operator, ParameterSpec, Shape, TensorSpec
from pipefit.model.ops import KINDS


def tune_model(model: Model, config: Mapping[str, Any]) -> Model:
    """Return a base model with the adapters and frozen parameters of a configuration. Raises ModelError for targets or
    patterns that fit nothing."""
    adapters, freeze = read_adapters(config), read_freeze(config)
    if adapters is not None:
        model = adapt_model(model, adapters)
    if freeze:
        model = freeze_parameters(model, freeze)
    return model


def adapt_model(model: Model, config: AdapterConfig) -> Model:
    """Return the model with adapters on the linear layers that `config.targets` select; everything else is frozen."""
    selected: dict[int, list[LinearModule]] = {}
    for module in select_targets(model, config):
        selected.setdefault(module.layer, []).append(module)
    known: dict[tuple[object, ...], tuple[str, Graph, dict[str, str]]] = {}
    layers: list[Layer] = []
    for index, layer in enumerate(model.layers):
        modules = selected.get(index, [])
        key = layer.graph, *((module.leaf, *module.operators) for module in modules)
        if key not in known:
            graph, added = _adapt_graph(model.layer_graph(layer), modules, config)
            known[key] = graph.hash, graph, added
        graph_hash, _, added = known[key]
        names = {local: _global_name(layer.parameters[source], local, source) for local, source in added.items()}
        layers.append(replace(layer, graph=graph_hash, parameters={**layer.parameters, **names}))
    graphs = {graph_hash: graph for graph_hash, graph, _ in known.values()}
    return _rebuild_model(model, layers, graphs, tuned_config(model.config, config))


def freeze_parameters(model: Model, patterns: Sequence[str]) -> Model:
    """Return the model without training of the parameters whose names match a pattern (`*` and `?`). Raises ModelError
    if a pattern matches no parameter, or if nothing is left to train."""
    frozen = _match_parameters(model, patterns)
    graphs: dict[str, Graph] = {}
    layers = []
    for layer in model.layers:
        graph = model.layer_graph(layer)
        parameters = tuple(
            replace(spec, trainable=spec.trainable and layer.parameters[spec.name] not in frozen)
            for spec in graph.parameters
        )
        graph = graph if parameters == graph.parameters else replace(graph, parameters=parameters)
        graphs[graph.hash] = graph
        layers.append(replace(layer, graph=graph.hash))
    if not any(spec.trainable for graph in graphs.values() for spec in graph.parameters):
        raise ModelError(
            "Every parameter is frozen: there is nothing to train.",
            where="--freeze",
            seen=", ".join(patterns),
            next_step="leave a part of the model out of the patterns",
        )
    adapters = read_adapters(model.config)
    return _rebuild_model(model, layers, graphs, tuned_config(model.config, adapters, patterns))


def _match_parameters(model: Model, patterns: Sequence[str]) -> set[str]:
    """Return the global names that match a pattern. Raises ModelError for a pattern that matches none."""
    names = list(dict.fromkeys(name for layer in model.layers for name in layer.parameters.values()))
    matched: set[str] = set()
    for pattern in patterns:
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            near = most_like(pattern, names) or names[:1]
            raise ModelError(
                "No parameter of the model matches this pattern.",
                where="--freeze",
                seen=pattern,
                allowed=f"names or patterns with * such as {near[0]}",
            )
        matched.update(matches)
    return matched


def adapter_initial(name: str, shape: Sequence[int]) -> InitialValue:
    """Return the initial value of an adapter's parameter, as PEFT has it: A is uniform in +-1/sqrt(columns), the
    Kaiming distribution with a = sqrt(5), and B is zero."""
    if name.endswith(FACTOR_B):
        return InitialValue("zeros")
    return InitialValue("uniform", (3.0 * shape[1]) ** -0.5)


def count_elements(model: Model) -> tuple[int, int]:
    """Return the numbers of elements of trained and of all parameters; tied parameters count once."""
    sizes: dict[str, tuple[int, bool]] = {}
    for layer in model.layers:
        for spec in model.layer_graph(layer).parameters:
            name = layer.parameters[spec.name]
            sizes[name] = prod(spec.shape), spec.trainable or sizes.get(name, (0, False))[1]
    return sum(count for count, trained in sizes.values() if trained), sum(count for count, _ in sizes.values())


def _rebuild_model(
    model: Model, layers: Sequence[Layer], graphs: Mapping[str, Graph], config: Mapping[str, Any]
) -> Model:
    modules, start = [], 0
    for module in model.modules:
        stop = start + len(module.layers)
        modules.append(replace(module, layers=tuple(layers[start:stop])))
        start = stop
    return replace(model, config=config, modules=tuple(modules), graphs=graphs)


def _global_name(weight: str, local: str, source: str) -> str:
    """Return the global name of an adapter's parameter beside its weight's: equal changes at the end."""
    common = 0
    while common < min(len(local), len(source)) and local[common] == source[common]:
        common += 1
    tail = source[common:]
    assert weight.endswith(tail), f"{weight} is no name of {source}"
    return weight.removesuffix(tail) + local[common:]


def _adapt_graph(graph: Graph, modules: Sequence[LinearModule], config: AdapterConfig) -> tuple[Graph, dict[str, str]]:
    """Return the graph with adapters, and the local names of their parameters -> the local name of a weight beside."""
    writer = _AdapterWriter(graph, config)
    owner = {position: module for module in modules for position in module.operators}
    for position, operator in enumerate(graph.operators):
        if position in owner:
            writer.add_adapted(operator, owner[position])
        else:
            writer.add_operator(operator, tuple(map(graph.find_tensor, operator.outputs)))
    return writer.finish_graph(), writer.added


class _AdapterWriter:
    """A graph that is written again with adapters."""

    def __init__(self, graph: Graph, config: AdapterConfig) -> None:
        self.graph, self.config = graph, config
        self.added: dict[str, str] = {}
        "Local name of an adapter's parameter -> a weight of the same module."
        self._operators: list[Operator] = []
        self._tensors: list[TensorSpec] = []
        self._parameters = [replace(spec, trainable=False) for spec in graph.parameters]
        self._used = {spec.name for spec in graph.parameters}
        self._used |= {tensor.name for tensor in (*graph.inputs, *graph.tensors)}
        self._inner: dict[str, str] = {}
        "Path of a module -> the value scale A dropout(x)."
        indices = [op.attributes.get("index", -1) for op in graph.operators if op.kind == "dropout"]
        self._dropouts = 1 + max(map(int, indices), default=-1)

    def add_operator(self, operator: Operator, outputs: Sequence[TensorSpec]) -> None:
        """Add an operator as it stands."""
        self._operators.append(operator)
        self._tensors += outputs

    def add_adapted(self, operator: Operator, module: LinearModule) -> None:
        """Add a linear operator with its adapter; the sum has the name of the operator's result."""
        (output,), weight = operator.outputs, operator.inputs[1]
        result = self.graph.find_tensor(output)
        if module.path not in self._inner:
            self._inner[module.path] = self._write_inner(operator, module)
        base = replace(result, name=self._new_name(f"{output}_base"))
        self.add_operator(replace(operator, outputs=(base.name,)), [base])
        outer = self._declare_factor(_swap_end(weight, FACTOR_B), weight, (int(result.shape[-1]), self.config.rank))
        change = self._write_value("linear", (self._inner[module.path], outer, ""), f"{output}_lora", operator.source)
        add = Operator(kind="add", inputs=(base.name, change), outputs=(output,), source=operator.source)
        self.add_operator(add, [result])

    def finish_graph(self) -> Graph:
        """Return the new graph."""
        return replace(
            self.graph,
            operators=tuple(self._operators),
            parameters=tuple(self._parameters),
            tensors=tuple(self._tensors),
        )

    def _write_inner(self, operator: Operator, module: LinearModule) -> str:
        """Write scale A dropout(x) of a module, and return its value."""
        x, weight = operator.inputs[0], operator.inputs[1]
        beside = ".".join([*weight.split(".")[:-2], module.leaf, "weight"]) if module.is_fused else weight
        columns = int(self.graph.find_parameter(weight).shape[1])
        inner = self._declare_factor(_swap_end(beside, FACTOR_A), weight, (self.config.rank, columns))
        label = f"{operator.outputs[0]}_lora"
        if self.config.dropout:
            x = self._write_dropout(x, label, operator.source)
        value = self._write_value("linear", (x, inner, ""), f"{label}_inner", operator.source)
        return self._write_value("mul", (value, ""), f"{label}_scaled", operator.source, scalar=self.config.scale)

    def _write_dropout(self, x: str, label: str, source: str) -> str:
        """Write dropout with a key of its own. Captured models of a fixed number of tokens count rows."""
        shape = self._find_tensor(x).shape
        if shape[0] != "B":
            raise ModelError(
                "Dropout of adapters needs values with rows in front.",
                where="--lora-dropout",
                seen=f"the input of {label.removesuffix('_lora')} has the shape ({', '.join(map(str, shape))})",
                next_step="use --lora-dropout 0",
            )
        attributes: dict[str, Any] = {"p": self.config.dropout, "index": self._dropouts}
        attributes |= {} if shape[1] == "T" else {"by": "rows"}
        self._dropouts += 1
        return self._write_value("dropout", (x,), f"{label}_input", source, **attributes)

    def _declare_factor(self, name: str, weight: str, shape: tuple[int, int]) -> str:
        """Add a trained parameter beside a weight, and return its name."""
        assert name not in self._used, f"{name} is the name of two parameters"
        self._used.add(name)
        self._parameters.append(ParameterSpec(name=name, shape=shape))
        self.added[name] = weight
        return name

    def _write_value(self, kind: str, inputs: tuple[str, ...], name: str, source: str, **attributes: Any) -> str:
        (shape,) = KINDS[kind].shapes(tuple(self._shape_of(value) for value in inputs), attributes)
        name, dtype = self._new_name(name), self._find_tensor(inputs[0]).dtype
        operator = Operator(kind=kind, inputs=inputs, outputs=(name,), attributes=attributes, source=source)
        self.add_operator(operator, [TensorSpec(name=name, shape=shape, dtype=dtype)])
        return name

    def _shape_of(self, name: str) -> Shape | None:
        if not name:
            return None
        spec = next((spec for spec in self._parameters if spec.name == name), None)
        return self._find_tensor(name).shape if spec is None else spec.shape

    def _find_tensor(self, name: str) -> TensorSpec:
        return next(tensor for tensor in (*self._tensors, *self.graph.inputs) if tensor.name == name)

    def _new_name(self, name: str) -> str:
        while name in self._used:
            name += "_"
        self._used.add(name)
        return name


def _swap_end(weight: str, end: str) -> str:
    """Return a name with this end in place of `.weight`."""
    return f".{weight}".removesuffix(WEIGHT).removeprefix(".") + (end if "." in weight else end.removeprefix("."))
