"""Operator graphs written without torch, equal to the captured ones of the same layers.

A family with a `graphs` module describes its layers by their operators. Tests hold these graphs to the captured ones to
the last character, so a plan that is made without torch is the plan that is made with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipefit.model.graph import Graph, Layer, Model, ModelModule, Operator, ParameterSpec, Shape, TensorSpec
from pipefit.model.ops import KINDS

LANGUAGE = "language"
"""Name of the only module of a language model."""


@dataclass(slots=True)
class GraphWriter:
    """One layer that is being written. Values and parameters are known by name; an absent input is ''."""

    inputs: tuple[TensorSpec, ...]
    parameters: dict[str, ParameterSpec] = field(default_factory=dict)
    _tensors: dict[str, TensorSpec] = field(default_factory=dict)
    _operators: list[Operator] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)

    def declare(self, name: str, *shape: int, trainable: bool = True) -> str:
        """Add a parameter, in the order of the module, and return its name."""
        self.parameters[name] = ParameterSpec(name=name, shape=shape, trainable=trainable)
        return name

    def declare_linear(self, name: str, inner: int, outer: int, bias: bool) -> None:
        """Add the weight and the bias of a linear layer."""
        self.declare(f"{name}.weight", outer, inner)
        if bias:
            self.declare(f"{name}.bias", outer)

    def known_parameter(self, name: str) -> str:
        """Return the name if a parameter has it, else ''."""
        return name if name in self.parameters else ""

    def shape_of(self, name: str) -> Shape:
        """Return the shape of a value or parameter."""
        return self.parameters[name].shape if name in self.parameters else self._find_tensor(name).shape

    def write(self, kind: str, inputs: Sequence[str], source: str, **attributes: Any) -> str:
        """Add an operator and return the name of its output. `source` is the label of its module."""
        facts = KINDS[kind]
        shapes = tuple(self.shape_of(name) if name else None for name in inputs)
        (shape,) = facts.shapes(shapes, attributes)
        output = f"{kind}_{self._counts[kind]}"
        self._counts[kind] += 1
        self._operators.append(
            Operator(kind=kind, inputs=tuple(inputs), outputs=(output,), attributes=attributes, source=source)
        )
        fixed = attributes["dtype"] if facts.output_dtype == "attribute" else facts.output_dtype
        dtype = fixed or self._find_tensor(inputs[0]).dtype
        self._tensors[output] = TensorSpec(name=output, shape=shape, dtype=dtype)
        return output

    def apply_linear(self, x: str, name: str) -> str:
        """Write a linear layer with the parameters of that name."""
        inputs = (x, f"{name}.weight", self.known_parameter(f"{name}.bias"))
        return self.write("linear", inputs, f"{name} (Linear)")

    def apply_activation(self, x: str, activation: str, source: str) -> str:
        """Write an activation of `ACTIVATIONS`."""
        kind, attributes = ACTIVATIONS[activation]
        return self.write(kind, (x,), source, **attributes)

    def apply_dropout(self, x: str, probability: float, name: str, index: int) -> str:
        """Write the dropout of that module, number `index` of its layer; x itself for a probability of zero."""
        return self.write("dropout", (x,), f"{name} (Dropout)", p=probability, index=index) if probability else x

    def slice_last(self, x: str, start: int, stop: int, source: str) -> str:
        """Write a slice of the last dimension."""
        return self.write("slice", (x,), source, dim=len(self.shape_of(x)) - 1, start=start, stop=stop)

    def reshape_to(self, x: str, shape: Sequence[int | str], source: str) -> str:
        """Write a reshape."""
        return self.write("reshape", (x,), source, shape=list(shape))

    def finish(self, output: str) -> Graph:
        """Return the graph."""
        return Graph(
            inputs=self.inputs,
            outputs=(output,),
            operators=tuple(self._operators),
            parameters=tuple(self.parameters.values()),
            tensors=tuple(self._tensors.values()),
        )

    def _find_tensor(self, name: str) -> TensorSpec:
        return self._tensors[name] if name in self._tensors else next(t for t in self.inputs if t.name == name)


ACTIVATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "silu": ("silu", {}),
    "gelu": ("gelu", {"approximate": "none"}),
    "gelu_tanh": ("gelu", {"approximate": "tanh"}),
    "relu": ("relu", {}),
}
"""Activation -> operator and attributes."""


class WrittenLayer(NamedTuple):
    """A layer of a chain."""

    name: str
    graph: Graph
    names: Mapping[str, str]
    "Local parameter name -> global name, where it is not the prefix and the local name."
    prefix: str = ""


def hidden_input(features: int) -> TensorSpec:
    """Return the hidden state x (B, T, D)."""
    return TensorSpec(name="x", shape=("B", "T", features))


TOKENS = TensorSpec(name="tokens", shape=("B", "T"), dtype="int64", role="tokens")
POSITIONS = TensorSpec(name="positions", shape=("B", "T"), dtype="int64", role="positions")
LABELS = TensorSpec(name="labels", shape=("B", "T"), dtype="int64", role="labels")


def write_loss(vocabulary: int) -> WrittenLayer:
    """Return the loss layer of a language model."""
    writer = GraphWriter((hidden_input(vocabulary), LABELS))
    loss = writer.write("cross_entropy", ("x", "labels"), "Loss", ignore_index=-100)
    return WrittenLayer("loss", writer.finish(loss), {})


def model_of_chain(family: str, config: Mapping[str, Any], chain: Sequence[WrittenLayer]) -> Model:
    """Return the model of a chain of one module; equal layers share one graph."""
    keys = [layer.graph.hash for layer in chain]
    layers = tuple(
        Layer(
            name=layer.name,
            graph=key,
            parameters={
                spec.name: layer.names.get(spec.name, layer.prefix + spec.name) for spec in layer.graph.parameters
            },
        )
        for layer, key in zip(chain, keys, strict=True)
    )
    return Model(
        family=family,
        config=dict(config),
        modules=(ModelModule(name=LANGUAGE, layers=layers),),
        graphs={key: layer.graph for key, layer in zip(keys, chain, strict=True)},
    )
