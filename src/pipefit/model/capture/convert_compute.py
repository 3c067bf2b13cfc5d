"""Converters of ATen operators that compute: products, norms, attention, losses, pointwise functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipefit.errors import ModelError
from pipefit.model.capture.emitter import Emitter, Unconvertible, converts, is_number, line_of
from pipefit.model.ops import KINDS


@converts("aten.linear")
def _linear(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, weight, bias = [*args, None][:3]
    return emitter.like(node, "linear", (emitter.value(x), emitter.value(weight), emitter.value(bias)))


@converts("aten.addmm")
def _addmm(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    bias, a, b = args
    product = emitter.like(node, "matmul", (emitter.value(a), emitter.value(b)))
    return emitter.like(node, "add", (product, emitter.value(bias)))


@converts("aten.matmul", "aten.bmm", "aten.mm")
def _matmul(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if min(emitter.rank(args[0]), emitter.rank(args[1])) < 2:
        raise Unconvertible(f"a matrix product with a vector{line_of(node)}")
    return emitter.like(node, "matmul", (emitter.value(args[0]), emitter.value(args[1])))


@converts("aten.embedding")
def _embedding(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    weight, tokens = args[:2]
    if len(args) > 2 and args[2] not in (-1, None):
        raise Unconvertible(f"an embedding with padding_idx{line_of(node)}")
    return emitter.like(node, "embedding", (emitter.value(tokens), emitter.value(weight)))


@converts("aten.rms_norm")
def _rms_norm(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, shape, weight, eps = [*args, None, None][:4]
    _last_only(shape, node)
    value = float(eps) if eps is not None else 2.0**-23  # torch's default: the epsilon of float32
    return emitter.like(node, "rms_norm", (emitter.value(x), emitter.value(weight)), {"eps": value})


@converts("aten.layer_norm")
def _layer_norm(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, shape, weight, bias, eps = [*args, None, None, 1e-5][:5] if len(args) < 5 else args[:5]
    _last_only(shape, node)
    inputs = (emitter.value(x), emitter.value(weight), emitter.value(bias))
    return emitter.like(node, "layer_norm", inputs, {"eps": float(eps)})


def _last_only(shape: Sequence[Any], node: Any) -> None:
    if len(shape) != 1:
        raise Unconvertible(f"a norm over several dimensions{line_of(node)}")


@converts("aten.scaled_dot_product_attention")
def _attention(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    q, k, v = args[:3]
    given = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)), **kwargs}
    mask, dropout, causal = given.get("attn_mask"), given.get("dropout_p", 0.0), given.get("is_causal", False)
    if mask is not None:
        raise Unconvertible(f"attention with a mask (use is_causal, or a Leaf of kind attention){line_of(node)}")
    if dropout:
        raise Unconvertible(f"attention with dropout of probabilities{line_of(node)}")
    scale = given.get("scale")
    features = emitter.shape(q)[-1]
    assert isinstance(features, int)
    attributes = {"causal": bool(causal), "scale": float(scale) if scale is not None else features**-0.5}
    return emitter.like(node, "attention_bhtk", [emitter.value(item) for item in (q, k, v)], attributes)


@converts("aten.cross_entropy_loss")
def _cross_entropy(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    logits, labels = args[:2]
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    given = {**dict(zip(names, args[2:], strict=False)), **kwargs}
    reduction, ignore = given.get("reduction", 1), given.get("ignore_index", -100)
    if reduction != 2:
        raise ModelError(
            "A loss layer must return the sum over the labels, not the mean: the run divides by the labels of a step.",
            where=line_of(node).removeprefix(", at ") or "loss",
            seen={0: "reduction='none'", 1: "reduction='mean'"}.get(reduction, str(reduction)),
            allowed="reduction='sum'",
        )
    if given.get("weight") is not None or given.get("label_smoothing"):
        raise Unconvertible(f"cross-entropy with class weights or label smoothing{line_of(node)}")
    return emitter.like(node, "cross_entropy", (emitter.value(logits), emitter.value(labels)), {"ignore_index": ignore})


@converts("pipefit.leaf")
def _leaf(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    inputs, kind, attributes = args
    names = [emitter.value(item) for item in inputs]
    absent = [""] * (len(KINDS[kind].inputs) - len(names))
    return emitter.like(node, kind, [*names, *absent], json.loads(attributes))


@converts("aten.add", "aten.sub", "aten.mul", "aten.div")
def _binary(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    kind = str(node.target).split(".")[1]
    if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode"):
        raise Unconvertible(f"{kind} with alpha or rounding{line_of(node)}")
    a, b = (_plain_number(emitter, item) for item in args)
    if isinstance(b, (int, float)):
        return emitter.like(node, kind, (emitter.value(a), ""), {"scalar": float(b)})
    if isinstance(a, (int, float)) and kind in ("add", "mul"):
        return emitter.like(node, kind, (emitter.value(b), ""), {"scalar": float(a)})
    if not (hasattr(a, "meta") and hasattr(b, "meta")) or is_number(a.meta["val"]) or is_number(b.meta["val"]):
        raise Unconvertible(f"{kind} with a size as a number{line_of(node)}")
    return emitter.like(node, kind, (emitter.value(a), emitter.value(b)))


def _plain_number(emitter: Emitter, item: Any) -> Any:
    """A constant of one number as a Python number."""
    constant = emitter.constants.get(item) if hasattr(item, "meta") else None
    return float(constant) if constant is not None and constant.numel() == 1 else item


@converts("aten.rsub")
def _rsub(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    negative = emitter.like(node, "neg", (emitter.value(args[0]),))
    return emitter.like(node, "add", (negative, ""), {"scalar": float(args[1])})


@converts("aten.pow", "aten.square")
def _pow(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    exponent = args[1] if len(args) > 1 else 2
    if not isinstance(exponent, (int, float)) or not hasattr(args[0], "meta"):
        raise Unconvertible(f"a power with a tensor as exponent{line_of(node)}")
    return emitter.like(node, "pow", (emitter.value(args[0]),), {"exponent": float(exponent)})


@converts("aten.mean")
def _mean(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if len(args) < 2:
        raise Unconvertible(f"a mean over everything{line_of(node)}")
    dims = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    attributes = {"dims": [emitter.dim(args[0], dim) for dim in dims], "keepdim": bool([*args, False][2])}
    return emitter.like(node, "mean", (emitter.value(args[0]),), attributes)


@converts(
    *(f"aten.{kind}" for kind in ["silu", "relu", "sigmoid", "tanh", "exp", "rsqrt", "sqrt", "neg", "cos", "sin"])
)
@converts("aten.silu_", "aten.relu_")
def _unary(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    kind = str(node.target).split(".")[1]
    if kind.endswith("_") and len(args[0].users) > 1:
        raise Unconvertible(f"{kind} works in place on a value that others read{line_of(node)}")
    return emitter.like(node, kind.rstrip("_"), (emitter.value(args[0]),))


@converts("aten.gelu")
def _gelu(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    return emitter.like(node, "gelu", (emitter.value(args[0]),), {"approximate": kwargs.get("approximate", "none")})


@converts("aten.softmax", "aten._softmax")
def _softmax(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x = emitter.value(args[0])
    if emitter.dtype(node) != emitter.dtype(args[0]):
        x = emitter.like(node, "cast", (x,), {"dtype": emitter.dtype(node)})
    return emitter.like(node, "softmax", (x,), {"dim": emitter.dim(args[0], args[1])})


@converts("aten.dropout")
def _dropout(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, p, training = args
    if not training or p == 0:
        return emitter.value(x)
    emitter.dropouts += 1
    return emitter.like(node, "dropout", (emitter.value(x),), {"p": float(p), "index": emitter.dropouts - 1})
