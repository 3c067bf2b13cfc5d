"""Converters of computing ATen operators: products, norms, attention, losses, pointwise functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipefit.errors import ModelError
from pipefit.model.capture.emitter import GraphEmitter, UnconvertibleError, is_number, line_of, register_converter
from pipefit.model.ops import KINDS


@register_converter("aten.linear")
def _convert_linear(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, weight, bias = [*args, None][:3]
    return emitter.emit_like(
        node, "linear", (emitter.value_name(x), emitter.value_name(weight), emitter.value_name(bias))
    )


@register_converter("aten.addmm")
def _convert_addmm(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    bias, a, b = args
    product = emitter.emit_like(node, "matmul", (emitter.value_name(a), emitter.value_name(b)))
    return emitter.emit_like(node, "add", (product, emitter.value_name(bias)))


@register_converter("aten.matmul", "aten.bmm", "aten.mm")
def _convert_matmul(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if min(emitter.node_rank(args[0]), emitter.node_rank(args[1])) < 2:
        raise UnconvertibleError(f"a matrix product with a vector{line_of(node)}")
    return emitter.emit_like(node, "matmul", (emitter.value_name(args[0]), emitter.value_name(args[1])))


@register_converter("aten.embedding")
def _convert_embedding(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    weight, tokens = args[:2]
    padding = args[2] if len(args) > 2 else kwargs.get("padding_idx", -1)
    if any(args[3:]) or kwargs.get("scale_grad_by_freq") or kwargs.get("sparse"):
        raise UnconvertibleError(f"an embedding with scale_grad_by_freq or sparse gradients{line_of(node)}")
    attributes = {} if padding in (-1, None) else {"padding": int(padding)}
    return emitter.emit_like(node, "embedding", (emitter.value_name(tokens), emitter.value_name(weight)), attributes)


@register_converter("aten.rms_norm")
def _convert_rms_norm(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, shape, weight, eps = [*args, None, None][:4]
    _check_last_only(shape, node)
    value = float(eps) if eps is not None else 2.0**-23  # torch's default: the epsilon of float32
    return emitter.emit_like(node, "rms_norm", (emitter.value_name(x), emitter.value_name(weight)), {"eps": value})


@register_converter("aten.layer_norm")
def _convert_layer_norm(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, shape, weight, bias, eps = [*args, None, None, 1e-5][:5] if len(args) < 5 else args[:5]
    _check_last_only(shape, node)
    inputs = (emitter.value_name(x), emitter.value_name(weight), emitter.value_name(bias))
    return emitter.emit_like(node, "layer_norm", inputs, {"eps": float(eps)})


def _check_last_only(shape: Sequence[Any], node: Any) -> None:
    if len(shape) != 1:
        raise UnconvertibleError(f"a norm over several dimensions{line_of(node)}")


@register_converter("aten.scaled_dot_product_attention")
def _convert_attention(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    q, k, v = args[:3]
    options = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)), **kwargs}
    mask, dropout, causal = options.get("attn_mask"), options.get("dropout_p", 0.0), options.get("is_causal", False)
    if mask is not None:
        raise UnconvertibleError(f"attention with a mask (use is_causal, or a Leaf of kind attention){line_of(node)}")
    if dropout:
        raise UnconvertibleError(f"attention with dropout of probabilities{line_of(node)}")
    scale = options.get("scale")
    features = emitter.node_shape(q)[-1]
    assert isinstance(features, int)
    attributes = {"causal": bool(causal), "scale": float(scale) if scale is not None else features**-0.5}
    return emitter.emit_like(node, "attention_bhtk", [emitter.value_name(item) for item in (q, k, v)], attributes)


@register_converter("aten.cross_entropy_loss")
def _convert_cross_entropy(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    logits, labels = args[:2]
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    options = {**dict(zip(names, args[2:], strict=False)), **kwargs}
    reduction, ignore = options.get("reduction", 1), options.get("ignore_index", -100)
    if reduction != 2:
        raise ModelError(
            "A loss layer must return the sum over the labels, not the mean: the run divides by the labels of a step.",
            where=line_of(node).removeprefix(", at ") or "loss",
            seen={0: "reduction='none'", 1: "reduction='mean'"}.get(reduction, str(reduction)),
            allowed="reduction='sum'",
        )
    if options.get("weight") is not None or options.get("label_smoothing"):
        raise UnconvertibleError(f"cross-entropy with class weights or label smoothing{line_of(node)}")
    return emitter.emit_like(
        node, "cross_entropy", (emitter.value_name(logits), emitter.value_name(labels)), {"ignore_index": ignore}
    )


@register_converter("pipefit.leaf")
def _convert_leaf(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    inputs, kind, attributes = args
    names = [emitter.value_name(item) for item in inputs]
    absent = ["" for name in KINDS[kind].inputs[len(names) :] if not name.endswith("*")]
    return emitter.emit_like(node, kind, [*names, *absent], json.loads(attributes))


@register_converter("aten.add", "aten.sub", "aten.mul", "aten.div")
def _convert_binary(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    kind = str(node.target).split(".")[1]
    if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode"):
        raise UnconvertibleError(f"{kind} with alpha or rounding{line_of(node)}")
    a, b = (_plain_number(emitter, item) for item in args)
    if isinstance(a, (int, float)) and kind in ("add", "mul"):
        a, b = b, a
    if isinstance(b, (int, float)):
        return emitter.emit_like(node, kind, (emitter.value_name(a), ""), {"scalar": _scalar_of(emitter, node, b)})
    if not (hasattr(a, "meta") and hasattr(b, "meta")) or is_number(a.meta["val"]) or is_number(b.meta["val"]):
        raise UnconvertibleError(f"{kind} with a size as a number{line_of(node)}")
    return emitter.emit_like(node, kind, (emitter.value_name(a), emitter.value_name(b)))


def _scalar_of(emitter: GraphEmitter, node: Any, number: float) -> float:
    """Return the number as a float, or unchanged if the result has integers, whose type a float would change."""
    return number if isinstance(number, int) and emitter.node_dtype(node).startswith("int") else float(number)


def _plain_number(emitter: GraphEmitter, item: Any) -> Any:
    """Return a one-element constant as a Python number, any other item unchanged."""
    constant = emitter.constants.get(item) if hasattr(item, "meta") else None
    return float(constant) if constant is not None and constant.numel() == 1 else item


@register_converter("aten.rsub")
def _convert_rsub(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    negative = emitter.emit_like(node, "neg", (emitter.value_name(args[0]),))
    return emitter.emit_like(node, "add", (negative, ""), {"scalar": _scalar_of(emitter, node, args[1])})


@register_converter("aten.pow", "aten.square")
def _convert_pow(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    exponent = args[1] if len(args) > 1 else 2
    if not isinstance(exponent, (int, float)) or not hasattr(args[0], "meta"):
        raise UnconvertibleError(f"a power with a tensor as exponent{line_of(node)}")
    return emitter.emit_like(node, "pow", (emitter.value_name(args[0]),), {"exponent": float(exponent)})


@register_converter("aten.mean")
def _convert_mean(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if len(args) < 2:
        raise UnconvertibleError(f"a mean over everything{line_of(node)}")
    dims = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    attributes = {"dims": [emitter.normalized_dim(args[0], dim) for dim in dims], "keepdim": bool([*args, False][2])}
    return emitter.emit_like(node, "mean", (emitter.value_name(args[0]),), attributes)


@register_converter(
    *(f"aten.{kind}" for kind in ["silu", "relu", "sigmoid", "tanh", "exp", "rsqrt", "sqrt", "neg", "cos", "sin"])
)
@register_converter("aten.silu_", "aten.relu_")
def _convert_unary(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    kind = str(node.target).split(".")[1]
    if kind.endswith("_") and len(args[0].users) > 1:
        raise UnconvertibleError(f"{kind} works in place on a value that others read{line_of(node)}")
    return emitter.emit_like(node, kind.rstrip("_"), (emitter.value_name(args[0]),))


@register_converter("aten.gelu")
def _convert_gelu(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    return emitter.emit_like(
        node, "gelu", (emitter.value_name(args[0]),), {"approximate": kwargs.get("approximate", "none")}
    )


@register_converter("aten.softmax", "aten._softmax")
def _convert_softmax(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x = emitter.value_name(args[0])
    if emitter.node_dtype(node) != emitter.node_dtype(args[0]):
        x = emitter.emit_like(node, "cast", (x,), {"dtype": emitter.node_dtype(node)})
    return emitter.emit_like(node, "softmax", (x,), {"dim": emitter.normalized_dim(args[0], args[1])})


@register_converter("aten.dropout")
def _convert_dropout(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, p, training = args
    if not training or p == 0:
        return emitter.value_name(x)
    emitter.dropouts += 1
    return emitter.emit_like(node, "dropout", (emitter.value_name(x),), {"p": float(p), "index": emitter.dropouts - 1})
