"""Converters of whole models (`capture/whole.py`): rows B may vary, every other size is a number.

What mixes tokens or spatial dimensions may stand here (convolutions, sums, masks), because such a model is never cut
into slices. A function without a converter is called as it is (`aten`): whole on every device of a shard axis, unless
`aten_splits` knows which of its dimensions do not see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipefit.errors import ModelError
from pipefit.model.analysis.aten_splits import splits
from pipefit.model.capture.emitter import Converter, Emitter, Unconvertible, is_causal, is_number, line_of

Known = Callable[[Emitter, Any, str], None]
"""(emitter, node, its function): the converters that layers have, too."""

ANY: dict[str, Converter] = {}
"""Converters that come before those of layers."""


def of_any(*targets: str) -> Callable[[Converter], Converter]:
    def register(function: Converter) -> Converter:
        ANY.update(dict.fromkeys(targets, function))
        return function

    return register


def convert_any(emitter: Emitter, node: Any, base: str, known: Known) -> None:
    """Append the operators of one node of a whole model. Raises Unconvertible for what cannot be called as it is."""
    try:
        if base in ANY:
            emitter.names[node] = ANY[base](emitter, node, list(node.args), node.kwargs)
        else:
            known(emitter, node, base)
    except Unconvertible as reason:
        call_as_it_is(emitter, node, base, reason)


def call_as_it_is(emitter: Emitter, node: Any, base: str, reason: Unconvertible) -> None:
    """The operator `aten` for a node, one for each of its results that is used."""
    target = node.target
    if not hasattr(target, "_schema"):
        raise reason
    if any(str(tag).endswith("nondeterministic_seeded") for tag in target.tags):
        raise Unconvertible(f"{base} draws random numbers, which devices would draw differently{line_of(node)}")
    if target._schema.is_mutable:
        raise Unconvertible(f"{base} changes a tensor in place{line_of(node)}") from reason
    inputs: list[str] = []
    arguments = [written(emitter, item, inputs) for item in node.args]
    keywords = {name: written(emitter, item, inputs) for name, item in node.kwargs.items() if name not in _DROPPED}
    call = {"target": str(target), "arguments": arguments, "keywords": keywords}
    several = isinstance(node.meta["val"], (list, tuple))
    if not several:
        emitter.names[node] = _called(emitter, node, node.meta["val"], {**call, "result": None}, inputs)
        return
    wanted = {user.args[1] for user in node.users}
    emitter.parts[node] = [
        _called(emitter, node, value, {**call, "result": place}, inputs) if place in wanted else ""
        for place, value in enumerate(node.meta["val"])
    ]


_DROPPED = ("layout", "pin_memory", "memory_format")


def _called(emitter: Emitter, node: Any, value: Any, call: Mapping[str, Any], inputs: list[str]) -> str:
    shape = tuple(emitter.size(size) for size in value.shape)
    attributes = {**call, "shape": list(shape), "dtype": emitter.dtype_name(value.dtype)}
    shapes = [emitter.shape_of(name) for name in inputs]
    if splits(attributes, shapes) is None:
        emitter.unknown.setdefault(str(call["target"]), line_of(node).removeprefix(", at ") or emitter.source)
    return emitter.emit("aten", inputs, shape, str(attributes["dtype"]), attributes)


def written(emitter: Emitter, item: Any, inputs: list[str]) -> Any:
    """An argument as JSON; values are appended to `inputs`."""
    if isinstance(item, (list, tuple)):
        return [written(emitter, each, inputs) for each in item]
    if hasattr(item, "meta"):
        value = item.meta["val"]
        if is_number(value):
            return {"size": emitter.size(value)}
        inputs.append(emitter.value(item))
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
    raise Unconvertible(f"an argument of type {name}")


@of_any("aten.conv1d", "aten.conv2d", "aten.conv3d")
def _conv(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    names = ("bias", "stride", "padding", "dilation", "groups")
    return _convolution(emitter, node, args, {**dict(zip(names, args[2:], strict=False)), **kwargs}, "conv")


@of_any("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def _conv_transpose(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    names = ("bias", "stride", "padding", "output_padding", "groups", "dilation")
    return _convolution(emitter, node, args, {**dict(zip(names, args[2:], strict=False)), **kwargs}, "conv_transpose")


def _convolution(emitter: Emitter, node: Any, args: list[Any], given: Mapping[str, Any], kind: str) -> str:
    spatial = emitter.rank(node) - 2
    if spatial != int(str(node.target).split(".")[1][-2]):
        raise Unconvertible(f"a convolution of one image{line_of(node)}")

    def numbers(name: str, default: int) -> list[int]:
        value = given.get(name, default)
        values = [value] if isinstance(value, int) else list(value)
        return values * spatial if len(values) == 1 else values

    dilation = numbers("dilation", 1)
    named = isinstance(given.get("padding"), str)
    around = _named_padding(given["padding"], emitter.shape(args[1])[2:], dilation) if named else numbers("padding", 0)
    if around is None:
        raise Unconvertible(f"a convolution padded more on one side{line_of(node)}")
    attributes = {
        "stride": numbers("stride", 1),
        "padding": around,
        "dilation": dilation,
        "groups": int(given.get("groups", 1)),
    }
    if kind == "conv_transpose":
        attributes["output_padding"] = numbers("output_padding", 0)
    inputs = [emitter.value(item) for item in (*args[:2], given.get("bias"))]
    return emitter.like(node, kind, inputs, attributes)


def _named_padding(name: str, kernel: Sequence[Any], dilation: Sequence[int]) -> list[int] | None:
    """Zeros on both sides for `valid` and `same`; None where one side needs one more."""
    total = [gap * (int(size) - 1) if name == "same" else 0 for gap, size in zip(dilation, kernel, strict=True)]
    return None if any(zeros % 2 for zeros in total) else [zeros // 2 for zeros in total]


@of_any("aten.einsum")
def _einsum(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    equation, operands = str(args[0]).replace(" ", ""), list(args[1])
    before, arrow, _ = equation.partition("->")
    terms = before.split(",")
    if not arrow or "." in equation or len(operands) > 2 or any(len({*term}) != len(term) for term in terms):
        raise Unconvertible(f"einsum of {equation!r}{line_of(node)}")
    inputs = [emitter.value(item) for item in operands]
    return emitter.like(node, "einsum", [*inputs, ""][:2], {"equation": equation})


@of_any("aten.sum")
def _sum(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if emitter.dtype(args[0]) != emitter.dtype(node):
        raise Unconvertible(f"a sum in another number type{line_of(node)}")
    dims = args[1] if len(args) > 1 and args[1] not in (None, []) else range(emitter.rank(args[0]))
    dims = [dims] if isinstance(dims, int) else dims
    keepdim = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim", False))
    attributes = {"dims": sorted(emitter.dim(args[0], dim) for dim in dims), "keepdim": keepdim}
    return emitter.like(node, "sum", (emitter.value(args[0]),), attributes)


@of_any("aten.dropout", "aten.dropout_", "aten.feature_dropout")
def _dropout(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    """Keyed by the row and the place within it, whatever the dimensions mean."""
    x, p, training = args
    if not training or p == 0:
        return emitter.value(x)
    if "feature" in str(node.target) or emitter.shape(x)[:1] != ("B",):
        raise Unconvertible(f"dropout of something else than rows of elements{line_of(node)}")
    emitter.dropouts += 1
    attributes = {"p": float(p), "index": emitter.dropouts - 1, "by": "rows"}
    return emitter.like(node, "dropout", (emitter.value(x),), attributes)


@of_any("aten.embedding")
def _embedding(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    weight, tokens = args[:2]
    padding = args[2] if len(args) > 2 else kwargs.get("padding_idx", -1)
    if any(args[3:]) or kwargs.get("scale_grad_by_freq") or kwargs.get("sparse"):
        raise Unconvertible(f"an embedding with gradients by frequency or sparse ones{line_of(node)}")
    attributes = {} if padding in (-1, None) else {"padding": int(padding)}
    return emitter.like(node, "embedding", (emitter.value(tokens), emitter.value(weight)), attributes)


@of_any("aten.instance_norm")
def _instance_norm(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if args[3] is not None and args[5]:
        raise ModelError(
            "Instance norm keeps running statistics in training, which every device would change in its own way.",
            where=line_of(node).removeprefix(", at ") or emitter.source,
            seen=f"{emitter.source}: track_running_stats=True",
            allowed="track_running_stats=False, which is the default",
        )
    raise Unconvertible("called as it is")


@of_any("aten.batch_norm")
def _batch_norm(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if args[5]:
        raise ModelError(
            "Batch norm brings rows together, which are spread over devices and microbatches.",
            where=line_of(node).removeprefix(", at ") or emitter.source,
            seen=f"{emitter.source}: statistics over the rows of a batch",
            allowed="norms within a row: GroupNorm, LayerNorm",
        )
    raise Unconvertible("called as it is")


@of_any("aten.scaled_dot_product_attention")
def _attention(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    """Attention, with a causal mask recognised; with another mask or dropout its products written out."""
    names = ("attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args[3:], strict=False)), **kwargs}
    mask, dropout = given.get("attn_mask"), float(given.get("dropout_p", 0.0))
    causal, window = bool(given.get("is_causal", False)), None
    if mask is not None:
        seen = _known_mask(emitter, mask)
        if seen is not None and bool(seen.all()):
            mask = None
        elif seen is not None and (is_causal(seen) or _window(seen)):
            mask, causal, window = None, True, _window(seen)
    q, k = args[:2]
    features, heads, groups = emitter.shape(q)[-1], emitter.shape(q)[1], emitter.shape(k)[1]
    assert isinstance(features, int)
    scale = float(given["scale"]) if given.get("scale") is not None else features**-0.5
    if emitter.rank(q) != 4:
        raise Unconvertible(f"attention in {emitter.rank(q)} dimensions{line_of(node)}")
    if mask is None and not dropout:
        attributes = {"causal": causal, "scale": scale, "window": window}
        return emitter.like(node, "attention_bhtk", [emitter.value(item) for item in args[:3]], attributes)
    if heads != groups:
        raise Unconvertible(f"grouped attention with a mask or dropout{line_of(node)}")
    return _written_out(emitter, node, args[:3], mask, causal, scale, dropout)


def _known_mask(emitter: Emitter, mask: Any) -> Any:
    """The (queries, keys) of a mask of known numbers that is the same for all rows and heads; None for any other."""
    while mask not in emitter.constants and str(mask.target).startswith("aten.expand"):
        mask = mask.args[0]
    numbers = emitter.constants.get(mask)
    if numbers is None or str(numbers.dtype) != "torch.bool" or numbers.dim() < 2:
        return None
    if numbers.numel() != numbers.shape[-1] * numbers.shape[-2]:
        return None
    return numbers.reshape(numbers.shape[-2:])


def _window(seen: Any) -> int | None:
    """w where query i sees keys j with i - w < j <= i, and not all before."""
    width = int(seen[-1].sum())
    wanted = seen.new_ones(seen.shape).tril().triu(1 - width)
    return width if 0 < width < seen.shape[-1] and bool((seen == wanted).all()) else None


def _written_out(
    emitter: Emitter, node: Any, qkv: list[Any], mask: Any, causal: bool, scale: float, dropout: float
) -> str:
    """softmax(scale q k^T + mask), dropped out, times v; in (B, H, T, K)."""
    q, k, v = (emitter.value(item) for item in qkv)
    rows, heads, queries, features = emitter.shape(qkv[0])
    keys, dtype = emitter.shape(qkv[1])[2], emitter.dtype(qkv[0])
    shape = (rows, heads, queries, keys)
    turned = emitter.emit("transpose", (k,), (rows, heads, features, keys), dtype, {"dims": [0, 1, 3, 2]})
    scores = emitter.emit("matmul", (q, turned), shape, dtype)
    scores = emitter.emit("mul", (scores, ""), shape, dtype, {"scalar": scale})
    if causal:
        if queries != keys:
            raise Unconvertible(f"causal attention of {queries} queries and {keys} keys{line_of(node)}")
        given = {"values": "causal", "shape": [queries, keys], "dtype": "bool"}
        scores = _masked(emitter, scores, emitter.emit("constant", (), (queries, keys), "bool", given), shape, dtype)
    if mask is not None and emitter.dtype(mask) == "bool":
        scores = _masked(emitter, scores, emitter.value(mask), shape, dtype)
    elif mask is not None:
        scores = emitter.emit("add", (scores, emitter.value(mask)), shape, dtype)
    weights = emitter.emit("softmax", (scores,), shape, dtype, {"dim": 3})
    if dropout:
        emitter.dropouts += 1
        drawn = {"p": dropout, "index": emitter.dropouts - 1, "by": "rows"}
        weights = emitter.emit("dropout", (weights,), shape, dtype, drawn)
    return emitter.like(node, "matmul", (weights, v))


def _masked(emitter: Emitter, scores: str, mask: str, shape: Any, dtype: str) -> str:
    """Scores where the mask is set, minus infinity elsewhere."""
    hidden = emitter.emit("constant", (), (), dtype, {"values": [-1e30], "shape": [], "dtype": dtype})
    attributes: dict[str, Any] = {
        "target": "aten.where.self",
        "arguments": [{"input": 0}, {"input": 1}, {"input": 2}],
        "keywords": {},
        "result": None,
        "shape": list(shape),
        "dtype": dtype,
    }
    return emitter.emit("aten", (mask, scores, hidden), shape, dtype, attributes)
