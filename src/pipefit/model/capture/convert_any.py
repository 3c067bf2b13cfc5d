"""Converters of complete models (`capture/whole.py`): rows B may vary, every other size is a number.

Functions that mix tokens or spatial dimensions are allowed here (convolutions, sums, masks), because such a model is
never cut into slices. A function without a converter becomes a PyTorch call (`aten`). It is computed in full on every
device of a shard axis, unless `aten_splits` lists its independent dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipefit.errors import ModelError
from pipefit.model.analysis.aten_splits import split_labels
from pipefit.model.capture.dropouts import emit_row_dropout
from pipefit.model.capture.emitter import Converter, GraphEmitter, UnconvertibleError, is_causal, is_number, line_of
from pipefit.model.capture.row_constants import one_row

Known = Callable[[GraphEmitter, Any, str], None]
"""(emitter, node, its function): the converters shared with layers."""

ANY: dict[str, Converter] = {}
"""Converters that take precedence over those of layers."""


def converts_any(*targets: str) -> Callable[[Converter], Converter]:
    def register(function: Converter) -> Converter:
        ANY.update(dict.fromkeys(targets, function))
        return function

    return register


def convert_any(emitter: GraphEmitter, node: Any, base: str, known: Known) -> None:
    """Append the operators of one node of a complete model. Raises UnconvertibleError if the function cannot be called
    either."""
    try:
        if base in ANY:
            emitter.names[node] = ANY[base](emitter, node, list(node.args), node.kwargs)
        else:
            known(emitter, node, base)
    except UnconvertibleError as reason:
        emit_aten_call(emitter, node, base, reason)


def emit_aten_call(emitter: GraphEmitter, node: Any, base: str, reason: UnconvertibleError) -> None:
    """Emit `aten` operators for a node, one for each of its results that is used."""
    target = node.target
    if not hasattr(target, "_schema"):
        raise reason
    if any(str(tag).endswith("nondeterministic_seeded") for tag in target.tags):
        raise UnconvertibleError(f"{base} draws random numbers, which devices would draw differently{line_of(node)}")
    if target._schema.is_mutable:
        raise UnconvertibleError(f"{base} changes a tensor in place{line_of(node)}") from reason
    inputs: list[str] = []
    arguments = [to_json_argument(emitter, item, inputs) for item in node.args]
    keywords = {
        name: to_json_argument(emitter, item, inputs) for name, item in node.kwargs.items() if name not in _DROPPED
    }
    call = {"target": str(target), "arguments": arguments, "keywords": keywords}
    several = isinstance(node.meta["val"], (list, tuple))
    if not several:
        emitter.names[node] = _emit_result(emitter, node, node.meta["val"], {**call, "result": None}, inputs)
        return
    wanted = {user.args[1] for user in node.users}
    emitter.parts[node] = [
        _emit_result(emitter, node, value, {**call, "result": index}, inputs) if index in wanted else ""
        for index, value in enumerate(node.meta["val"])
    ]


_DROPPED = ("layout", "pin_memory", "memory_format")


def _emit_result(emitter: GraphEmitter, node: Any, value: Any, call: Mapping[str, Any], inputs: list[str]) -> str:
    shape = tuple(emitter.convert_size(size, node) for size in value.shape)
    attributes = {**call, "shape": list(shape), "dtype": emitter.dtype_name(value.dtype)}
    shapes = [emitter.shape_of(name) for name in inputs]
    if split_labels(attributes, shapes) is None:
        emitter.unknown.setdefault(str(call["target"]), line_of(node).removeprefix(", at ") or emitter.source)
    return emitter.emit("aten", inputs, shape, str(attributes["dtype"]), attributes)


def to_json_argument(emitter: GraphEmitter, item: Any, inputs: list[str]) -> Any:
    """Return an argument as JSON; append its values to `inputs`."""
    if isinstance(item, (list, tuple)):
        return [to_json_argument(emitter, element, inputs) for element in item]
    if hasattr(item, "meta"):
        value = item.meta["val"]
        if is_number(value):
            return {"size": emitter.convert_size(value)}
        inputs.append(emitter.value_name(item))
        return {"input": len(inputs) - 1}
    if isinstance(item, float) and (item != item or item in (float("inf"), float("-inf"))):
        return {"float": str(item)}
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    name = type(item).__name__
    if name == "dtype":
        return {"type": emitter.dtype_name(item)}
    if name == "device":
        return {"device": True}
    raise UnconvertibleError(f"an argument of type {name}")


@converts_any("aten.conv1d", "aten.conv2d", "aten.conv3d")
def _convert_conv(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    names = ("bias", "stride", "padding", "dilation", "groups")
    return _emit_convolution(emitter, node, args, {**dict(zip(names, args[2:], strict=False)), **kwargs}, "conv")


@converts_any("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def _convert_conv_transpose(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    names = ("bias", "stride", "padding", "output_padding", "groups", "dilation")
    return _emit_convolution(
        emitter, node, args, {**dict(zip(names, args[2:], strict=False)), **kwargs}, "conv_transpose"
    )


def _emit_convolution(emitter: GraphEmitter, node: Any, args: list[Any], given: Mapping[str, Any], kind: str) -> str:
    spatial = emitter.node_rank(node) - 2
    if spatial != int(str(node.target).split(".")[1][-2]):
        raise UnconvertibleError(f"a convolution without a row dimension{line_of(node)}")

    def read_numbers(name: str, default: int) -> list[int]:
        value = given.get(name, default)
        values = [value] if isinstance(value, int) else list(value)
        return values * spatial if len(values) == 1 else values

    dilation = read_numbers("dilation", 1)
    named = isinstance(given.get("padding"), str)
    around = (
        _named_padding(given["padding"], emitter.node_shape(args[1])[2:], dilation)
        if named
        else read_numbers("padding", 0)
    )
    if around is None:
        raise UnconvertibleError(f"a convolution with asymmetric padding{line_of(node)}")
    attributes = {
        "stride": read_numbers("stride", 1),
        "padding": around,
        "dilation": dilation,
        "groups": int(given.get("groups", 1)),
    }
    if kind == "conv_transpose":
        attributes["output_padding"] = read_numbers("output_padding", 0)
    inputs = [emitter.value_name(item) for item in (*args[:2], given.get("bias"))]
    return emitter.emit_like(node, kind, inputs, attributes)


def _named_padding(name: str, kernel: Sequence[Any], dilation: Sequence[int]) -> list[int] | None:
    """Zeros on both sides for `valid` and `same`; None if the two sides differ."""
    total = [gap * (int(size) - 1) if name == "same" else 0 for gap, size in zip(dilation, kernel, strict=True)]
    return None if any(zeros % 2 for zeros in total) else [zeros // 2 for zeros in total]


@converts_any("aten.einsum")
def _convert_einsum(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    equation, operands = str(args[0]).replace(" ", ""), list(args[1])
    before, arrow, _ = equation.partition("->")
    terms = before.split(",")
    if not arrow or "." in equation or len(operands) > 2 or any(len({*term}) != len(term) for term in terms):
        raise UnconvertibleError(f"einsum of {equation!r}{line_of(node)}")
    inputs = [emitter.value_name(item) for item in operands]
    return emitter.emit_like(node, "einsum", [*inputs, ""][:2], {"equation": equation})


@converts_any("aten.sum")
def _convert_sum(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if emitter.node_dtype(args[0]) != emitter.node_dtype(node):
        raise UnconvertibleError(f"a sum with another dtype{line_of(node)}")
    dims = args[1] if len(args) > 1 and args[1] not in (None, []) else range(emitter.node_rank(args[0]))
    dims = [dims] if isinstance(dims, int) else dims
    keepdim = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim", False))
    attributes = {"dims": sorted(emitter.normalized_dim(args[0], dim) for dim in dims), "keepdim": keepdim}
    return emitter.emit_like(node, "sum", (emitter.value_name(args[0]),), attributes)


@converts_any("aten.dropout", "aten.dropout_", "aten.feature_dropout")
def _convert_dropout(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, p, training = args
    if "feature" in str(node.target) and training and p:
        raise UnconvertibleError(
            f"dropout of a tensor without rows in dimension 0, or of entire features{line_of(node)}"
        )
    return emit_row_dropout(emitter, x, float(p), bool(training), line_of(node))


@converts_any("aten.detach_")
def _convert_detach(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    """Emit a detached copy. A value with other readers is refused."""
    if len(args[0].users) > 1:
        raise UnconvertibleError(f"detach_ of a value that others read{line_of(node)}")
    attributes: dict[str, Any] = {
        "target": "aten.detach.default",
        "arguments": [{"input": 0}],
        "keywords": {},
        "result": None,
        "shape": list(emitter.node_shape(node)),
        "dtype": emitter.node_dtype(node),
    }
    return emitter.emit_like(node, "aten", (emitter.value_name(args[0]),), attributes)


@converts_any("aten.copy")
def _convert_copy(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    """Emit the source with the shape and dtype of the destination, whose numbers are not read."""
    source, dtype, shape = args[1], emitter.node_dtype(node), emitter.node_shape(node)
    x, before = emitter.value_name(source), emitter.node_shape(source)
    if emitter.node_dtype(source) != dtype:
        x = emitter.emit("cast", (x,), before, dtype, {"dtype": dtype})
    return x if before == shape else emitter.emit("expand", (x,), shape, dtype, {"shape": list(shape)})


@converts_any("aten.index_put")
def _convert_index_put(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    """Emit a choice between values and a number, for values that a mask of their shape replaces by this number."""
    x, indices, value = args[:3]
    shape, dtype = emitter.node_shape(node), emitter.node_dtype(node)
    masked = len(indices) == 1 and emitter.node_dtype(indices[0]) == "bool" and emitter.node_shape(indices[0]) == shape
    if not masked or emitter.node_shape(value) or any(args[3:]) or kwargs.get("accumulate"):
        raise UnconvertibleError(f"numbers placed by index{line_of(node)}")
    names = tuple(emitter.value_name(item) for item in (indices[0], value, x))
    return emit_choice(emitter, names, shape, dtype)


@converts_any("aten.instance_norm")
def _convert_instance_norm(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if args[3] is not None and args[5]:
        raise ModelError(
            "Instance norm keeps running statistics in training, which would differ between devices.",
            where=line_of(node).removeprefix(", at ") or emitter.source,
            seen=f"{emitter.source}: track_running_stats=True",
            allowed="track_running_stats=False, which is the default",
        )
    raise UnconvertibleError("called as it is")


@converts_any("aten.batch_norm")
def _convert_batch_norm(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if args[5]:
        raise ModelError(
            "Batch norm computes statistics over rows, which are spread over devices and microbatches.",
            where=line_of(node).removeprefix(", at ") or emitter.source,
            seen=f"{emitter.source}: statistics over the rows of a batch",
            allowed="norms within a row: GroupNorm, LayerNorm",
        )
    raise UnconvertibleError("called as it is")


@converts_any("aten.scaled_dot_product_attention")
def _convert_attention(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    """Emit attention with a recognised causal mask; other masks or dropout are decomposed into matrix products."""
    names = ("attn_mask", "dropout_p", "is_causal")
    options = {**dict(zip(names, args[3:], strict=False)), **kwargs}
    mask, dropout = options.get("attn_mask"), float(options.get("dropout_p", 0.0))
    causal, window = bool(options.get("is_causal", False)), None
    if mask is not None:
        seen = _known_mask(emitter, mask)
        if seen is not None and bool(seen.all()):
            mask = None
        elif seen is not None and (is_causal(seen) or _window_size(seen)):
            mask, causal, window = None, True, _window_size(seen)
    q, k = args[:2]
    features, heads, groups = emitter.node_shape(q)[-1], emitter.node_shape(q)[1], emitter.node_shape(k)[1]
    assert isinstance(features, int)
    scale = float(options["scale"]) if options.get("scale") is not None else features**-0.5
    if emitter.node_rank(q) != 4:
        raise UnconvertibleError(f"attention in {emitter.node_rank(q)} dimensions{line_of(node)}")
    if mask is None and not dropout:
        attributes = {"causal": causal, "scale": scale, "window": window}
        return emitter.emit_like(node, "attention_bhtk", [emitter.value_name(item) for item in args[:3]], attributes)
    if heads != groups:
        raise UnconvertibleError(f"grouped attention with a mask or dropout{line_of(node)}")
    return _decompose_attention(emitter, node, args[:3], mask, causal, scale, dropout)


def _known_mask(emitter: GraphEmitter, mask: Any) -> Any:
    """The (queries, keys) mask if its numbers are known and equal for all rows and heads; otherwise None."""
    while (
        mask not in emitter.constants
        and mask not in emitter.row_constants
        and str(mask.target).startswith("aten.expand")
    ):
        mask = mask.args[0]
    numbers = one_row(emitter, mask) if mask in emitter.row_constants else emitter.constants.get(mask)
    if numbers is None or str(numbers.dtype) != "torch.bool" or numbers.dim() < 2:
        return None
    if numbers.numel() != numbers.shape[-1] * numbers.shape[-2]:
        return None
    return numbers.reshape(numbers.shape[-2:])


def _window_size(seen: Any) -> int | None:
    """The window w if query i sees exactly the keys i - w < j <= i and w is less than all keys; otherwise None."""
    width = int(seen[-1].sum())
    wanted = seen.new_ones(seen.shape).tril().triu(1 - width)
    return width if 0 < width < seen.shape[-1] and bool((seen == wanted).all()) else None


def _decompose_attention(
    emitter: GraphEmitter, node: Any, qkv: list[Any], mask: Any, causal: bool, scale: float, dropout: float
) -> str:
    """Emit dropout(softmax(scale q k^T + mask)) v, in (B, H, T, K)."""
    q, k, v = (emitter.value_name(item) for item in qkv)
    rows, heads, queries, features = emitter.node_shape(qkv[0])
    keys, dtype = emitter.node_shape(qkv[1])[2], emitter.node_dtype(qkv[0])
    shape = (rows, heads, queries, keys)
    turned = emitter.emit("transpose", (k,), (rows, heads, features, keys), dtype, {"dims": [0, 1, 3, 2]})
    scores = emitter.emit("matmul", (q, turned), shape, dtype)
    scores = emitter.emit("mul", (scores, ""), shape, dtype, {"scalar": scale})
    if causal:
        if queries != keys:
            raise UnconvertibleError(f"causal attention of {queries} queries and {keys} keys{line_of(node)}")
        mask_attributes = {"values": "causal", "shape": [queries, keys], "dtype": "bool"}
        scores = _apply_mask(
            emitter, scores, emitter.emit("constant", (), (queries, keys), "bool", mask_attributes), shape, dtype
        )
    if mask is not None and emitter.node_dtype(mask) == "bool":
        scores = _apply_mask(emitter, scores, emitter.value_name(mask), shape, dtype)
    elif mask is not None:
        scores = emitter.emit("add", (scores, emitter.value_name(mask)), shape, dtype)
    weights = emitter.emit("softmax", (scores,), shape, dtype, {"dim": 3})
    if dropout:
        emitter.dropouts += 1
        drawn = {"p": dropout, "index": emitter.dropouts - 1, "by": "rows"}
        weights = emitter.emit("dropout", (weights,), shape, dtype, drawn)
    return emitter.emit_like(node, "matmul", (weights, v))


def _apply_mask(emitter: GraphEmitter, scores: str, mask: str, shape: Any, dtype: str) -> str:
    """Emit the scores with -1e30 at masked positions."""
    hidden = emitter.emit("constant", (), (), dtype, {"values": [-1e30], "shape": [], "dtype": dtype})
    return emit_choice(emitter, (mask, scores, hidden), shape, dtype)


def emit_choice(emitter: GraphEmitter, names: tuple[str, ...], shape: Any, dtype: str) -> str:
    """Emit aten.where of (mask, values where it is true, values elsewhere)."""
    attributes: dict[str, Any] = {
        "target": "aten.where.self",
        "arguments": [{"input": 0}, {"input": 1}, {"input": 2}],
        "keywords": {},
        "result": None,
        "shape": list(shape),
        "dtype": dtype,
    }
    return emitter.emit("aten", names, shape, dtype, attributes)
