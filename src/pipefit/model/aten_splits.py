"""Which dimensions of a function of PyTorch do not see each other: by these it may be split over devices.

A function that is not here is computed whole on every device, and capture says so. Dimensions of a result are tied to
those of the values by labels, as in `shard/rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipefit.model.graph import Shape

Labels = tuple[str | None, ...]
Splits = tuple[tuple[Labels, ...], Labels]
"""(labels of every value, labels of the result)."""


def splits(attributes: Mapping[str, Any], inputs: Sequence[Shape]) -> Splits | None:
    """The labels of a call; None where nothing is known of its function."""
    function = str(attributes["target"]).rsplit(".", 1)[0]
    known = _TABLE.get(function)
    return None if known is None else known(attributes, tuple(inputs), tuple(attributes["shape"]))


def _pointwise(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> Splits:
    """Element by element, with broadcasting: a dimension that is broadcast stays whole in its operand."""

    def labels(shape: Shape) -> Labels:
        offset = len(out) - len(shape)
        return tuple(
            f"d{i + offset}" if size == out[i + offset] and size != 1 else None for i, size in enumerate(shape)
        )

    return tuple(map(labels, inputs)), tuple(None if size == 1 else f"d{i}" for i, size in enumerate(out))


def _along(place: int, default: Any = None) -> Callable[[Mapping[str, Any], tuple[Shape, ...], Shape], Splits]:
    """Along one dimension of the first value (argument number `place`, or `dim`): all others go by themselves. The
    result has this dimension too, as long or not, or lacks it."""

    def labels(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> Splits:
        arguments = attributes["arguments"]
        given = arguments[place] if len(arguments) > place else attributes["keywords"].get("dim", default)
        rank = len(inputs[0])
        if given is None or isinstance(given, dict):
            return tuple((None,) * len(shape) for shape in inputs), (None,) * len(out)
        dims = {dim % rank for dim in ([given] if isinstance(given, int) else given)}
        before = tuple(None if i in dims else f"d{i}" for i in range(rank))
        after = before if len(out) == rank else tuple(label for i, label in enumerate(before) if i not in dims)
        same = tuple(before if len(shape) == rank else (None,) * len(shape) for shape in inputs)
        return same, after

    return labels


def _images(spatial: int) -> Callable[[Mapping[str, Any], tuple[Shape, ...], Shape], Splits]:
    """Rows and channels by themselves, in front of so many spatial dimensions: pooling."""

    def labels(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> Splits:
        front = tuple(f"d{i}" for i in range(len(inputs[0]) - spatial))
        return ((*front, *(None,) * spatial),), (*front, *(None,) * spatial)

    return labels


def _pad(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> Splits:
    """What is not padded: widths come in pairs, those of the last dimension first. One more in front and one less
    behind keeps the length and moves all elements."""
    widths = attributes["arguments"][1]
    still = [widths[place : place + 2] == [0, 0] for place in range(0, len(widths), 2)]
    still = [*[True] * (len(out) - len(still)), *reversed(still)]
    labels = tuple(f"d{i}" if stays else None for i, stays in enumerate(still))
    return (labels,), labels


def _by_size(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> Splits:
    """A result whose sizes are arguments: whole, whatever becomes of the value that says its type."""
    return tuple((None,) * len(shape) for shape in inputs), (None,) * len(out)


def _one_more(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> Splits:
    """A dimension behind all others: one-hot."""
    labels = tuple(f"d{i}" for i in range(len(inputs[0])))
    return (labels,), (*labels, None)


_POINTWISE = """
    abs add addcmul atan bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min cos cosh detach div elu
    eq erf erfc exp expm1 floor floor_divide fmod full_like ge gt hardsigmoid hardswish hardtanh isinf isnan le
    leaky_relu lerp log log10 log1p log2 log_sigmoid logical_and logical_not logical_or logical_xor lt masked_fill
    maximum minimum mish mul ne neg ones_like pow reciprocal relu relu6 remainder round rsqrt rsub selu
    sigmoid sign silu sin sinh softplus sqrt square sub tan tanh threshold to trunc type_as where xlogy zeros_like
    binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss smooth_l1_loss
"""
"""The losses are those of every element: capture adds them up by itself."""

_TABLE: Mapping[str, Callable[[Mapping[str, Any], tuple[Shape, ...], Shape], Splits]] = {
    **{f"aten.{name}": _pointwise for name in _POINTWISE.split()},
    **{f"aten.{name}": _along(1) for name in ("cumsum", "cumprod", "log_softmax", "logsumexp", "amax", "amin", "mean",
                                              "prod", "flip", "argmax", "argmin", "any", "all", "var", "std",
                                              "max", "min")},
    "aten.sort": _along(1, -1),
    "aten.topk": _along(2, -1),
    "aten.one_hot": _one_more,
    **{f"aten.new_{name}": _by_size for name in ("full", "ones", "zeros")},
    "aten.pad": _pad,
    "aten.constant_pad_nd": _pad,
    **{f"aten.{name}{n}d": _images(n) for name in ("max_pool", "avg_pool", "adaptive_avg_pool") for n in (1, 2, 3)},
}  # fmt: skip
