"""From the nodes of an exported program to operators: one small converter an ATen operator.

Nodes are read by their attributes only, so that this file needs no torch. A node without a converter, or with
arguments that we cannot express, raises `Unconvertible` with the reason; the layer then becomes opaque.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipefit.errors import ModelError
from pipefit.model.graph import Operator, Shape, Size, Tensor, multiply_sizes

_MANY = 1 << 62
"""A slice that ends here or later ends at the end."""


class Unconvertible(Exception):
    """Why a layer cannot be expressed in our operators, and where."""


class Emitter:
    """Collects operators. `names` maps exported nodes to values; an absent node has no value of ours."""

    def __init__(self, symbols: Mapping[str, str], compute_dtype: str, prefix: str) -> None:
        self.symbols = symbols
        "Symbols of the export -> ours, for example s77 -> B."
        self.compute_dtype = compute_dtype
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []
        self.names: dict[Any, str] = {}
        self.parts: dict[Any, list[str]] = {}
        "Values of nodes that give several (chunk, split)."
        self.constants: dict[Any, Any] = {}
        "Nodes with known numbers (torch tensors), not yet in the graph."
        self.dropouts = 0
        self.source = prefix

    def value(self, node: Any) -> str:
        """The name of the value of `node`; a constant enters the graph when it is first read."""
        if node is None:
            return ""
        if node in self.names:
            return self.names[node]
        if node in self.constants:
            self.names[node] = self._constant(node)
            return self.names[node]
        raise Unconvertible(f"the value of {node} is not a tensor that a layer can hand on")

    def _constant(self, node: Any) -> str:
        numbers = self.constants[node]
        if numbers.numel() > 65536:
            raise Unconvertible(f"a constant of {numbers.numel()} numbers")
        values = numbers.double().flatten().tolist()
        return self.emit("constant", (), tuple(numbers.shape), "float32", {"values": values})

    def shape(self, node: Any) -> Shape:
        """The shape of the exported node in our symbols."""
        return tuple(self.size(size) for size in node.meta["val"].shape)

    def size(self, size: Any) -> Size:
        """A size of the export: a number, or a product of symbols. Anything else cannot be converted."""
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
                raise Unconvertible(f"the size {expression} is not a product of rows, tokens and numbers")
        return multiply_sizes(*factors)

    def dtype(self, node: Any) -> str:
        return self.dtype_name(node.meta["val"].dtype)

    def dtype_name(self, dtype: Any) -> str:
        """Our name of a torch dtype."""
        name = str(dtype).removeprefix("torch.")
        if name == self.compute_dtype:
            return "compute"
        if name in ("float32", "float64"):
            return "float32"
        if name in ("int64", "int32", "bool"):
            return name
        raise Unconvertible(f"the number type {name}")

    def emit(
        self, kind: str, inputs: Sequence[str], shape: Shape, dtype: str, attributes: Mapping[str, Any] | None = None
    ) -> str:
        """Append an operator; gives the name of its value."""
        name = f"t{len(self.tensors)}"
        self.tensors[name] = Tensor(name=name, shape=shape, dtype=dtype)
        self.operators.append(
            Operator(
                kind=kind, inputs=tuple(inputs), outputs=(name,), attributes=dict(attributes or {}), source=self.source
            )
        )
        return name

    def like(self, node: Any, kind: str, inputs: Sequence[str], attributes: Mapping[str, Any] | None = None) -> str:
        """Append an operator whose value has the shape and type of `node`."""
        return self.emit(kind, inputs, self.shape(node), self.dtype(node), attributes)

    def rank(self, node: Any) -> int:
        return len(node.meta["val"].shape)

    def dim(self, node: Any, dim: int) -> int:
        """A dimension of `node`, not negative."""
        return dim + self.rank(node) if dim < 0 else dim


Converter = Callable[[Emitter, Any, list[Any], Mapping[str, Any]], str]
CONVERTERS: dict[str, Converter] = {}


def _converts(*targets: str) -> Callable[[Converter], Converter]:
    def register(function: Converter) -> Converter:
        for target in targets:
            CONVERTERS[target] = function
        return function

    return register


def convert(emitter: Emitter, node: Any, layer: str) -> None:
    """Append the operators of one exported `call_function` node."""
    target = str(node.target)
    base = ".".join(target.split(".")[:2])
    if base in _IGNORED or "val" not in node.meta:
        return
    if _is_number(node.meta["val"]):
        return  # arithmetic on sizes: read from the shapes of its users
    if target == "<built-in function getitem>":
        source, index = node.args
        emitter.names[node] = emitter.parts[source][index]
        return
    emitter.source = _source(node) or layer
    arguments = list(node.args)
    if base in SPLITTERS:
        emitter.parts[node] = SPLITTERS[base](emitter, node, arguments, node.kwargs)
    elif base in CONVERTERS:
        emitter.names[node] = CONVERTERS[base](emitter, node, arguments, node.kwargs)
    else:
        hint = " (it works in place)" if base.endswith("_") else ""
        raise Unconvertible(f"there is no operator for {target.removeprefix('aten.')}{hint}{_line(node)}")


_IGNORED = {
    "aten._assert_tensor_metadata",
    "aten.promote_types",
    "aten.sym_constrain_range_for_size",
    "aten._assert_scalar",
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, bool)) or not (hasattr(value, "shape") or isinstance(value, (list, tuple)))


def _source(node: Any) -> str:
    """The module path within the layer, and its class."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    path, kind = stack[-1]
    name = str(kind).rsplit(".", 1)[-1]
    return f"{path} ({name})" if path else name


def _line(node: Any) -> str:
    """` at FILE:LINE` of the user's code that made the node."""
    lines = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File")
    ]
    if not lines:
        return ""
    file, line = lines[-1].split('"')[1], lines[-1].split("line ")[1].split(",")[0]
    return f", at {file.rsplit('/', 1)[-1]}:{line}"


@_converts("aten.linear")
def _linear(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, weight, bias = [*args, None][:3]
    return emitter.like(node, "linear", (emitter.value(x), emitter.value(weight), emitter.value(bias)))


@_converts("aten.addmm")
def _addmm(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    bias, a, b = args
    product = emitter.like(node, "matmul", (emitter.value(a), emitter.value(b)))
    return emitter.like(node, "add", (product, emitter.value(bias)))


@_converts("aten.matmul", "aten.bmm", "aten.mm")
def _matmul(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if min(emitter.rank(args[0]), emitter.rank(args[1])) < 2:
        raise Unconvertible(f"a matrix product with a vector{_line(node)}")
    return emitter.like(node, "matmul", (emitter.value(args[0]), emitter.value(args[1])))


@_converts("aten.embedding")
def _embedding(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    weight, tokens = args[:2]
    if len(args) > 2 and args[2] not in (-1, None):
        raise Unconvertible(f"an embedding with padding_idx{_line(node)}")
    return emitter.like(node, "embedding", (emitter.value(tokens), emitter.value(weight)))


@_converts("aten.rms_norm")
def _rms_norm(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, shape, weight, eps = [*args, None, None][:4]
    _last_only(shape, node)
    value = float(eps) if eps is not None else 2.0**-23  # torch's default: the epsilon of float32
    return emitter.like(node, "rms_norm", (emitter.value(x), emitter.value(weight)), {"eps": value})


@_converts("aten.layer_norm")
def _layer_norm(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, shape, weight, bias, eps = [*args, None, None, 1e-5][:5] if len(args) < 5 else args[:5]
    _last_only(shape, node)
    inputs = (emitter.value(x), emitter.value(weight), emitter.value(bias))
    return emitter.like(node, "layer_norm", inputs, {"eps": float(eps)})


def _last_only(shape: Sequence[Any], node: Any) -> None:
    if len(shape) != 1:
        raise Unconvertible(f"a norm over several dimensions{_line(node)}")


@_converts("aten.scaled_dot_product_attention")
def _attention(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    q, k, v, mask, dropout, causal = [*args, *(None, 0.0, False)[len(args) - 3 :]][:6]
    given = dict(kwargs)
    mask, dropout = given.get("attn_mask", mask), given.get("dropout_p", dropout)
    causal = given.get("is_causal", causal)
    if mask is not None:
        raise Unconvertible(f"attention with a mask (use is_causal, or a Leaf of kind attention){_line(node)}")
    if dropout:
        raise Unconvertible(f"attention with dropout of probabilities{_line(node)}")
    scale = given.get("scale")
    features = emitter.shape(q)[-1]
    assert isinstance(features, int)
    attributes = {"causal": bool(causal), "scale": float(scale) if scale is not None else features**-0.5}
    return emitter.like(node, "attention_bhtk", [emitter.value(item) for item in (q, k, v)], attributes)


@_converts("aten.cross_entropy_loss")
def _cross_entropy(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    logits, labels, weight, reduction, ignore, smoothing = [*args, *(None, 1, -100, 0.0)[len(args) - 2 :]]
    if reduction != 2:
        raise ModelError(
            "A loss layer must return the sum over the labels, not the mean: the run divides by the labels of a step.",
            where=_line(node).removeprefix(", at ") or "loss",
            seen={0: "reduction='none'", 1: "reduction='mean'"}.get(reduction, str(reduction)),
            allowed="reduction='sum'",
        )
    if weight is not None or smoothing:
        raise Unconvertible(f"cross-entropy with class weights or label smoothing{_line(node)}")
    return emitter.like(node, "cross_entropy", (emitter.value(logits), emitter.value(labels)), {"ignore_index": ignore})


@_converts("pipefit.leaf")
def _leaf(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    inputs, kind, attributes = args
    return emitter.like(node, kind, [emitter.value(item) for item in inputs], json.loads(attributes))


@_converts("aten.add", "aten.sub", "aten.mul", "aten.div")
def _binary(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    kind = str(node.target).split(".")[1]
    if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode"):
        raise Unconvertible(f"{kind} with alpha or rounding{_line(node)}")
    a, b = (_plain_number(emitter, item) for item in args)
    if isinstance(b, (int, float)):
        return emitter.like(node, kind, (emitter.value(a), ""), {"scalar": float(b)})
    if isinstance(a, (int, float)) and kind in ("add", "mul"):
        return emitter.like(node, kind, (emitter.value(b), ""), {"scalar": float(a)})
    if not (hasattr(a, "meta") and hasattr(b, "meta")) or _is_number(a.meta["val"]) or _is_number(b.meta["val"]):
        raise Unconvertible(f"{kind} with a size as a number{_line(node)}")
    return emitter.like(node, kind, (emitter.value(a), emitter.value(b)))


def _plain_number(emitter: Emitter, item: Any) -> Any:
    """A constant of one number as a Python number."""
    constant = emitter.constants.get(item) if hasattr(item, "meta") else None
    return float(constant) if constant is not None and constant.numel() == 1 else item


@_converts("aten.rsub")
def _rsub(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    negative = emitter.like(node, "neg", (emitter.value(args[0]),))
    return emitter.like(node, "add", (negative, ""), {"scalar": float(args[1])})


@_converts("aten.pow", "aten.square")
def _pow(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    exponent = args[1] if len(args) > 1 else 2
    if not isinstance(exponent, (int, float)) or not hasattr(args[0], "meta"):
        raise Unconvertible(f"a power with a tensor as exponent{_line(node)}")
    return emitter.like(node, "pow", (emitter.value(args[0]),), {"exponent": float(exponent)})


@_converts("aten.mean")
def _mean(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if len(args) < 2:
        raise Unconvertible(f"a mean over everything{_line(node)}")
    dims = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    attributes = {"dims": [emitter.dim(args[0], dim) for dim in dims], "keepdim": bool([*args, False][2])}
    return emitter.like(node, "mean", (emitter.value(args[0]),), attributes)


@_converts(
    *(f"aten.{kind}" for kind in ["silu", "relu", "sigmoid", "tanh", "exp", "rsqrt", "sqrt", "neg", "cos", "sin"])
)
@_converts("aten.silu_", "aten.relu_")
def _unary(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    kind = str(node.target).split(".")[1]
    if kind.endswith("_") and len(args[0].users) > 1:
        raise Unconvertible(f"{kind} works in place on a value that others read{_line(node)}")
    return emitter.like(node, kind.rstrip("_"), (emitter.value(args[0]),))


@_converts("aten.gelu")
def _gelu(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    return emitter.like(node, "gelu", (emitter.value(args[0]),), {"approximate": kwargs.get("approximate", "none")})


@_converts("aten.softmax", "aten._softmax")
def _softmax(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x = emitter.value(args[0])
    if emitter.dtype(node) != emitter.dtype(args[0]):
        x = emitter.like(node, "cast", (x,), {"dtype": emitter.dtype(node)})
    return emitter.like(node, "softmax", (x,), {"dim": emitter.dim(args[0], args[1])})


@_converts("aten.dropout")
def _dropout(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, p, training = args
    if not training or p == 0:
        return emitter.value(x)
    emitter.dropouts += 1
    return emitter.like(node, "dropout", (emitter.value(x),), {"p": float(p), "index": emitter.dropouts - 1})


@_converts("aten.to", "aten._to_copy", "aten.type_as", "aten.float")
def _cast(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x = emitter.value(args[0])
    before, after = emitter.dtype(args[0]), emitter.dtype(node)
    if before == after:
        return x
    return emitter.like(node, "cast", (x,), {"dtype": after})


@_converts("aten.alias", "aten.contiguous", "aten.clone", "aten.lift_fresh_copy")
def _same(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    return emitter.value(args[0])


@_converts(
    *(
        f"aten.{kind}"
        for kind in ["view", "reshape", "_unsafe_view", "unflatten", "flatten", "unsqueeze", "squeeze", "view_as"]
    )
)
def _reshape(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    return emitter.like(node, "reshape", (emitter.value(args[0]),), {"shape": list(emitter.shape(node))})


@_converts("aten.expand", "aten.expand_as")
def _expand(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if emitter.shape(args[0]) == emitter.shape(node):
        return emitter.value(args[0])
    return emitter.like(node, "expand", (emitter.value(args[0]),))


@_converts("aten.repeat_interleave")
def _repeat_interleave(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, repeats, dim = [*args, None][:3]
    if not isinstance(repeats, int) or dim is None or emitter.dim(x, dim) != emitter.rank(x) - 1:
        raise Unconvertible(f"repeat_interleave other than of the last dimension{_line(node)}")
    return emitter.like(node, "repeat_interleave", (emitter.value(x),), {"repeats": repeats})


@_converts("aten.transpose", "aten.permute", "aten.t", "aten.mT", "aten.numpy_T")
def _transpose(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    kind, rank = str(node.target).split(".")[1], emitter.rank(node)
    dims = list(range(rank))
    if kind == "permute":
        dims = [emitter.dim(node, dim) for dim in args[1]]
    elif kind == "numpy_T":
        dims.reverse()
    else:
        a, b = (emitter.dim(node, dim) for dim in (args[1:3] if kind == "transpose" else (rank - 2, rank - 1)))
        dims[a], dims[b] = b, a
    return emitter.like(node, "transpose", (emitter.value(args[0]),), {"dims": dims})


@_converts("aten.slice")
def _slice(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, dim, start, stop, step = [*args, *(0, None, None, 1)[len(args) - 1 :]][:5]
    dim = emitter.dim(x, dim)
    size = emitter.shape(x)[dim]
    start, stop = _edge(emitter, start, 0, size), _edge(emitter, stop, size, size)
    if step != 1:
        return emitter.like(
            node, "strided_slice", (emitter.value(x),), {"dim": dim, "start": start, "stop": stop, "step": step}
        )
    if (start, stop) == (0, size):
        return emitter.value(x)
    return emitter.like(node, "slice", (emitter.value(x),), {"dim": dim, "start": start, "stop": stop})


def _edge(emitter: Emitter, edge: Any, default: Size, size: Size) -> Size:
    if edge is None:
        return default
    if hasattr(edge, "meta"):
        return emitter.size(edge.meta["val"])
    if isinstance(edge, int) and edge >= _MANY:
        return size
    if isinstance(size, int):
        return min(size, edge + size if edge < 0 else edge)
    if edge < 0:
        raise Unconvertible("a slice that ends before the last token")
    return int(edge)


@_converts("aten.select")
def _select(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, dim, index = args
    dim = emitter.dim(x, dim)
    shape = emitter.shape(x)
    if isinstance(shape[dim], str) or not isinstance(index, int):
        raise Unconvertible(f"one row or token picked out{_line(node)}")
    index = index % int(shape[dim])
    part = _part(emitter, x, dim, index, index + 1)
    return emitter.like(node, "reshape", (part,), {"shape": list(emitter.shape(node))})


@_converts("aten.cat", "aten.concat")
def _concat(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    tensors, dim = [*args, 0][:2]
    return emitter.like(node, "concat", [emitter.value(item) for item in tensors], {"dim": emitter.dim(node, dim)})


@_converts("aten.stack")
def _stack(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    tensors, dim = [*args, 0][:2]
    dim = emitter.dim(node, dim)
    shape = emitter.shape(tensors[0])
    shape = (*shape[:dim], 1, *shape[dim:])
    widened = [
        emitter.emit("reshape", (emitter.value(item),), shape, emitter.dtype(node), {"shape": list(shape)})
        for item in tensors
    ]
    return emitter.like(node, "concat", widened, {"dim": dim})


Splitter = Callable[[Emitter, Any, list[Any], Mapping[str, Any]], list[str]]


def _split(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> list[str]:
    x = args[0]
    dim = emitter.dim(x, kwargs.get("dim", args[2] if len(args) > 2 else 0))
    sizes = [item.shape[dim] for item in node.meta["val"]]
    if not all(isinstance(size, int) for size in sizes):
        raise Unconvertible(f"rows or tokens split into parts{_line(node)}")
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [_part(emitter, x, dim, edges[i], edges[i + 1]) for i in range(len(sizes))]


def _unbind(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> list[str]:
    x = args[0]
    dim = emitter.dim(x, kwargs.get("dim", args[1] if len(args) > 1 else 0))
    shape = emitter.shape(x)
    if not isinstance(shape[dim], int):
        raise Unconvertible(f"rows or tokens taken apart{_line(node)}")
    left = (*shape[:dim], *shape[dim + 1 :])
    return [
        emitter.emit("reshape", (_part(emitter, x, dim, i, i + 1),), left, emitter.dtype(x), {"shape": list(left)})
        for i in range(int(shape[dim]))
    ]


def _part(emitter: Emitter, x: Any, dim: int, start: int, stop: int) -> str:
    shape = emitter.shape(x)
    cut = (*shape[:dim], stop - start, *shape[dim + 1 :])
    if cut == shape:
        return emitter.value(x)
    attributes = {"dim": dim, "start": start, "stop": stop}
    return emitter.emit("slice", (emitter.value(x),), cut, emitter.dtype(x), attributes)


SPLITTERS: dict[str, Splitter] = {
    "aten.chunk": _split,
    "aten.split": _split,
    "aten.split_with_sizes": _split,
    "aten.unbind": _unbind,
}
