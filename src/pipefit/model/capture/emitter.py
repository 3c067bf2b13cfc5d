"""The emitter that collects operators during conversion, and the registry of converters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from pipefit.model.capture.rewrite import unused_name
from pipefit.model.graph import Operator, Shape, Size, TensorSpec, multiply_sizes, size_factors
from pipefit.model.ops.constant import pack_numbers

LAYER_CONSTANT, WHOLE_CONSTANT = 1 << 16, 1 << 22
"""Maximum number of elements of a constant in a graph: for a layer, and for a complete model."""


class UnconvertibleError(Exception):
    """The reason why a layer cannot be expressed in operators, with its source line."""


def refuse_rows(emitter: GraphEmitter, node: Any) -> str:
    """Raise UnconvertibleError: layers have no constants by rows."""
    raise UnconvertibleError(f"the value of {node} is not a tensor that a layer can hand on")


def _refuse_computed(emitter: GraphEmitter, node: Any) -> None:
    """Raise UnconvertibleError: layers have no large constants."""
    raise UnconvertibleError(f"the numbers of {node} are too many for a graph")


class GraphEmitter:
    """Collects operators. `names` maps exported nodes to value names; nodes without a tensor value are absent."""

    def __init__(self, symbols: Mapping[str, str], compute_dtype: str, prefix: str, whole: bool = False) -> None:
        self.symbols = symbols
        "Symbols of the export -> pipefit's symbols, for example s77 -> B."
        self.whole = whole
        "A complete model with a fixed number of tokens: functions without a converter become calls (`convert_any.py`)."
        self.unknown: dict[str, str] = {}
        "Called functions that cannot be split -> source line of the first call."
        self.means: set[str] = set()
        "Values that are sums in the graph and means in the model: losses."
        self.inner: dict[Any, Sequence[Any]] = {}
        "Nodes that stand for a nested graph -> the nodes of its results."
        self.compute_dtype = compute_dtype
        self.tensors: dict[str, TensorSpec] = {}
        self.given: dict[str, Shape] = {}
        "Shapes of inputs and parameters."
        self.operators: list[Operator] = []
        self.names: dict[Any, str] = {}
        self.parts: dict[Any, list[str]] = {}
        "Values of nodes with several results (chunk, split)."
        self.constants: dict[Any, Any] = {}
        "Nodes with known numbers (torch tensors) that are not in the graph yet."
        self.row_constants: dict[Any, tuple[Any, Any]] = {}
        "Nodes with numbers known for two numbers of rows (`row_constants.py`)."
        self.emit_row_constant: Callable[[GraphEmitter, Any], str] = refuse_rows
        "Emits the value of such a node."
        self.emit_computed: Callable[[GraphEmitter, Any], None] = _refuse_computed
        "Emits the function of a node with known numbers, where these are too many for a graph."
        self.dropouts = 0
        self.largest = WHOLE_CONSTANT if whole else LAYER_CONSTANT
        self.source = prefix

    def value_name(self, node: Any) -> str:
        """The name of the value of `node`; a constant enters the graph when it is first read."""
        if node is None:
            return ""
        if node in self.names:
            return self.names[node]
        if self._is_too_large(node):
            self.constants.pop(node, None)
            self.row_constants.pop(node, None)
            self.emit_computed(self, node)
            return self.names[node]
        if node in self.constants:
            self.names[node] = self._emit_constant(node)
            return self.names[node]
        if node in self.row_constants:
            self.names[node] = self.emit_row_constant(self, node)
            return self.names[node]
        raise UnconvertibleError(f"the value of {node} is not a tensor that a layer can hand on")

    def _is_too_large(self, node: Any) -> bool:
        """Return whether the numbers of a node are known, but too many for a graph: the graph computes them."""
        if not self.whole or node.op != "call_function" or not (node in self.constants or node in self.row_constants):
            return False
        return prod(size_factors(str(size))[0] for size in self.node_shape(node)) > self.largest

    def stand_for(self, node: Any, other: Any) -> None:
        """Give `node` the value of the node `other`."""
        if other in self.constants:
            self.constants[node] = self.constants[other]
        elif other in self.row_constants:
            self.row_constants[node] = self.row_constants[other]
        else:
            self.names[node] = self.value_name(other)

    def _emit_constant(self, node: Any) -> str:
        numbers = self.constants[node]
        return self.emit_numbers(numbers, self.node_dtype(node) if self.whole else self.dtype_name(numbers.dtype))

    def emit_numbers(self, numbers: Any, dtype: str) -> str:
        """Append a constant with the numbers of a tensor. Raises UnconvertibleError if there are too many."""
        shape = tuple(numbers.shape)
        values: Any
        if len(shape) == 2 and shape[0] == shape[1] and numbers.numel() > LAYER_CONSTANT and is_causal(numbers):
            values = "causal"
        elif numbers.numel() > self.largest:
            raise UnconvertibleError(f"a constant of {numbers.numel()} numbers")
        else:
            values = pack_numbers(numbers.detach().double().flatten().numpy())
        return self.emit("constant", (), shape, dtype, {"values": values, "shape": list(shape), "dtype": dtype})

    def shape_of(self, name: str) -> Shape:
        """The shape of a value, an input or a parameter."""
        return self.tensors[name].shape if name in self.tensors else self.given[name]

    def node_shape(self, node: Any) -> Shape:
        """The shape of the exported node in pipefit's symbols."""
        return tuple(self.convert_size(size, node) for size in node.meta["val"].shape)

    def convert_size(self, size: Any, node: Any = None) -> Size:
        """Convert a size of the export: a number, or a product of symbols. Raises UnconvertibleError for any other
        size, with the line of `node`."""
        if isinstance(size, int):
            return size
        expression = getattr(size, "node", size).expr
        factors: list[Size] = []
        for factor, power in expression.as_powers_dict().items():
            name = str(factor)
            if name in self.symbols and power == int(power) and power > 0:
                factors += [self.symbols[name]] * int(power)
            elif factor.is_Integer and power == 1:
                factors.append(int(factor))
            else:
                line = line_of(node) if node is not None else ""
                raise UnconvertibleError(
                    f"a size that is not a product of rows, tokens and numbers ({expression}){line}"
                )
        return multiply_sizes(*factors)

    def node_dtype(self, node: Any) -> str:
        return self.dtype_name(node.meta["val"].dtype)

    def dtype_name(self, dtype: Any) -> str:
        """The name of a torch dtype in graphs."""
        name = str(dtype).removeprefix("torch.")
        if name == self.compute_dtype:
            return "compute"
        if name in ("float32", "float64"):
            return "float32"
        if name in ("int64", "int32", "uint8", "bool"):
            return name
        raise UnconvertibleError(f"the number type {name}")

    def emit(
        self, kind: str, inputs: Sequence[str], shape: Shape, dtype: str, attributes: Mapping[str, Any] | None = None
    ) -> str:
        """Append an operator and return the name of its value."""
        name = unused_name(f"t{len(self.tensors)}", self.given)
        self.tensors[name] = TensorSpec(name=name, shape=shape, dtype=dtype)
        self.operators.append(
            Operator(
                kind=kind, inputs=tuple(inputs), outputs=(name,), attributes=dict(attributes or {}), source=self.source
            )
        )
        return name

    def emit_like(
        self, node: Any, kind: str, inputs: Sequence[str], attributes: Mapping[str, Any] | None = None
    ) -> str:
        """Append an operator whose value has the shape and dtype of `node`."""
        return self.emit(kind, inputs, self.node_shape(node), self.node_dtype(node), attributes)

    def node_rank(self, node: Any) -> int:
        return len(node.meta["val"].shape)

    def normalized_dim(self, node: Any, dim: int) -> int:
        """A dimension of `node` as a non-negative index."""
        return dim + self.node_rank(node) if dim < 0 else dim


Converter = Callable[[GraphEmitter, Any, list[Any], Mapping[str, Any]], str]
"""(emitter, node, arguments, keywords) -> the name of the node's value."""
CONVERTERS: dict[str, Converter] = {}


def register_converter(*targets: str) -> Callable[[Converter], Converter]:
    def register(function: Converter) -> Converter:
        for target in targets:
            CONVERTERS[target] = function
        return function

    return register


def is_causal(mask: Any) -> bool:
    """Return whether a square mask (torch, bool) lets query i see exactly the keys j <= i."""
    return str(mask.dtype) == "torch.bool" and bool((mask == mask.new_ones(mask.shape).tril()).all())


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, bool)) or not (hasattr(value, "shape") or isinstance(value, (list, tuple)))


def line_of(node: Any) -> str:
    """`, at FILE:LINE` of the user's code that created the node; empty if unknown."""
    lines = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File")
    ]
    lines = [line for line in lines if "/pipefit/model/" not in line and "/torch/nn/" not in line]
    if not lines:
        return ""
    file, line = lines[-1].split('"')[1], lines[-1].split("line ")[1].split(",")[0]
    return f", at {file.rsplit('/', 1)[-1]}:{line}"
