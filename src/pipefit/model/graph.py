"""Operator graphs: the computation of one layer as plain data. Torch is not imported here; `capture` makes graphs from
modules.

A graph is a list of operators in execution order over named tensors. Sizes are integers or products with the symbols B
(rows of the microbatch on one device) and T (tokens of the slice), so one graph serves every microbatch size, slice and
share. I and L are the tokens of a packed row of images that enters or leaves a token sequence
(`docs/reference/models.md`). An operator names its `kind`, which is defined in `model/ops/KIND.py` (shapes, FLOPs,
saved bytes), `shard/rules/KIND.py` (ways to split it) and `run/ops/KIND.py` (execution).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from pipefit.codec import content_digest

Size = int | str
"""An integer, or a product such as `B`, `T`, `B*T` or `4*B*T`."""

Shape = tuple[Size, ...]

LOCAL: Mapping[Size, Size] = MappingProxyType({"T": "S", "B": "R", "I": "J", "L": "M"})
"""Symbols of one device's part of a dimension whose size is only known at run time: tokens, rows, and tokens of a
packed row that enters or leaves a sequence."""

Role = Literal["activation", "tokens", "positions", "labels", "documents", "data"]
"""The source of a layer's input: the layer before it (`activation`), or the step plan, which is never transferred.
`data` is any other input of a model, by its name: images, token types, masks."""


def size_value(size: Size, symbols: Mapping[str, int]) -> int:
    """The number that a size stands for, given values of its symbols."""
    if isinstance(size, int):
        return size
    number, letters = size_factors(size)
    return number * math.prod(map(symbols.__getitem__, letters))


@lru_cache(maxsize=4096)
def size_factors(size: str) -> tuple[int, tuple[str, ...]]:
    """(product of the numbers, symbols) of a size."""
    factors = size.split("*")
    numbers = math.prod(int(factor) for factor in factors if factor.isdigit())
    return numbers, tuple(factor for factor in factors if not factor.isdigit())


def has_tokens(size: Size) -> bool:
    """Return True if a size counts the tokens of a sequence, alone or with other factors."""
    return "T" in size_factors(str(size))[1]


def element_count(shape: Shape, symbols: Mapping[str, int]) -> int:
    """The number of elements of a tensor of this shape."""
    return math.prod(size_value(size, symbols) for size in shape)


def multiply_sizes(*sizes: Size) -> Size:
    """The product in canonical form: the number first, then the symbols in order (`4*B*T`)."""
    number, symbols = 1, []
    for size in sizes:
        factor, names = _factorize_size(size)
        number *= factor
        symbols += names
    return _format_size(number, symbols)


def add_sizes(*sizes: Size) -> Size:
    """The sum of sizes with the same symbols (`T` + `3*T` = `4*T`). ValueError if it is not a product."""
    terms = [_factorize_size(size) for size in sizes]
    symbols = terms[0][1]
    if any(names != symbols for _, names in terms):
        raise ValueError(f"the sum of {sizes} is not a product of symbols")
    return _format_size(sum(number for number, _ in terms), symbols)


def subtract_sizes(a: Size, b: Size) -> Size:
    """a - b, where that is a product of symbols. ValueError if it is not."""
    if b == 0:
        return a
    number, symbols = _factorize_size(b)
    return add_sizes(a, _format_size(-number, symbols))


def broadcast_shapes(a: Shape, b: Shape) -> Shape:
    """The shape that two shapes broadcast to, as in numpy. ValueError if they do not."""
    length = max(len(a), len(b))
    left, right = (1,) * (length - len(a)) + a, (1,) * (length - len(b)) + b
    if any(x != y and 1 not in (x, y) for x, y in zip(left, right, strict=True)):
        raise ValueError(f"shapes {a} and {b} do not broadcast")
    return tuple(y if x == 1 else x for x, y in zip(left, right, strict=True))


def _factorize_size(size: Size) -> tuple[int, list[str]]:
    if isinstance(size, int):
        return size, []
    parts = size.split("*")
    numbers = [int(part) for part in parts if part.lstrip("-").isdigit()]
    return math.prod(numbers), sorted(part for part in parts if not part.lstrip("-").isdigit())


def _format_size(number: int, symbols: list[str]) -> Size:
    if not symbols or number == 0:
        return number
    return "*".join([*([] if number == 1 else [str(number)]), *sorted(symbols)])


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One named value of a graph."""

    name: str
    shape: Shape
    dtype: str = "compute"
    """`compute` for the run's floating type, `float32` for float32 or wider (float64 in a float64 run), `int64`,
    `uint8`, `bool`."""
    role: Role = "activation"
    "Only read for graph inputs."


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter of a layer, by its local name."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One step of a graph."""

    kind: str
    inputs: tuple[str, ...]
    "Names of tensors and parameters, in the order that the kind defines; an absent optional input is ''."
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    "Plain JSON values: numbers, strings, booleans, lists of them."
    source: str = ""
    "The module path or source line that made this operator, for messages."


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The operators of one layer (or one stage), in execution order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    operators: tuple[Operator, ...]
    parameters: tuple[ParameterSpec, ...]
    tensors: tuple[TensorSpec, ...]
    "Every value that an operator produces, in order of production."

    def find_tensor(self, name: str) -> TensorSpec:
        """The tensor (input or produced) of that name. KeyError if there is none."""
        for tensor in (*self.inputs, *self.tensors):
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    def find_parameter(self, name: str) -> ParameterSpec:
        """The parameter of that local name. KeyError if there is none."""
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise KeyError(name)

    @property
    def hidden_input(self) -> str | None:
        """The activation that the layer takes from the layer before as its x; None for a layer without one."""
        return next((tensor.name for tensor in self.inputs if tensor.role == "activation"), None)

    @property
    def hidden_output(self) -> str | None:
        """The output that the next layer takes as its x; None at the end of the chain."""
        return self.outputs[0] if self.find_tensor(self.outputs[0]).shape else None

    @property
    def loss_output(self) -> str | None:
        """The output without dimensions, which is the last output; None if the graph has no loss."""
        return None if self.find_tensor(self.outputs[-1]).shape else self.outputs[-1]

    @property
    def hash(self) -> str:
        """A digest that is stable over processes: two ranks with equal hashes run the same program."""
        return content_digest(self)


def shapes_of(graph: Graph) -> dict[str, Shape]:
    """Return the shapes of all inputs, values and parameters."""
    shapes = {tensor.name: tensor.shape for tensor in (*graph.inputs, *graph.tensors)}
    return shapes | {spec.name: spec.shape for spec in graph.parameters}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One link of a module's chain: a graph, and the global names of its parameters."""

    name: str
    "Unique in the model, for example `layers.3`."
    graph: str
    "Key into the model's graphs; equal layers share one graph."
    parameters: Mapping[str, str]
    "Local parameter name -> global name (the Hugging Face name). Two layers naming one global name are tied."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelModule:
    """A named chain of layers whose rows are in one space."""

    name: str
    layers: tuple[Layer, ...]
    space: str = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model to train: modules, the graphs of their distinct layers, and its origin. Saved as JSON."""

    family: str
    "The registry name of the family that can rebuild its modules (`llama`, `gpt2`, ...), or `user`."
    config: Mapping[str, Any]
    "The family's configuration with the field names of a Hugging Face config.json."
    modules: tuple[ModelModule, ...]
    graphs: Mapping[str, Graph]

    @property
    def hash(self) -> str:
        """A stable digest of the model; plans store it."""
        return content_digest(self)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of all modules, in module order."""
        return tuple(layer for module in self.modules for layer in module.layers)

    def layer_graph(self, layer: Layer) -> Graph:
        return self.graphs[layer.graph]
