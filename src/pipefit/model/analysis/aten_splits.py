"""Independent dimensions of PyTorch functions: a function can be split over devices along these.

A function that is not listed is computed in full on every device, and capture warns of it. Labels tie the dimensions of
a result to the dimensions of its inputs, as in `shard/rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipefit.model.graph import Shape

Labels = tuple[str | None, ...]
"""One label per dimension; None if the dimension must not be split."""


class SplitLabels(NamedTuple):
    """The dimension labels of one call."""

    inputs: tuple[Labels, ...]
    result: Labels
    groups: int = 0
    "Number of groups that the label `groups` divides; 0: the call has no groups."
    argument: int = 0
    "Index of the argument that holds the number of groups; a part of the tensor passes a smaller number."


def split_labels(attributes: Mapping[str, Any], inputs: Sequence[Shape]) -> SplitLabels | None:
    """The labels of a call; None if no rule is known for its function."""
    function = str(attributes["target"]).rsplit(".", 1)[0]
    known = _TABLE.get(str(attributes["target"])) or _TABLE.get(function)
    return None if known is None else known(attributes, tuple(inputs), tuple(attributes["shape"]))


def _label_pointwise(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> SplitLabels:
    """Elementwise with broadcasting: a broadcast dimension stays unsplit in its operand."""

    def label_shape(shape: Shape) -> Labels:
        offset = len(out) - len(shape)
        return tuple(
            f"d{i + offset}" if size == out[i + offset] and size != 1 else None for i, size in enumerate(shape)
        )

    return SplitLabels(
        tuple(map(label_shape, inputs)), tuple(None if size == 1 else f"d{i}" for i, size in enumerate(out))
    )


def _label_along(
    place: int, default: Any = None
) -> Callable[[Mapping[str, Any], tuple[Shape, ...], Shape], SplitLabels]:
    """A function along one dimension of the first value (argument number `place`, or `dim`); all other dimensions are
    independent. The result keeps this dimension with the same or another length, or drops it."""

    def label_call(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> SplitLabels:
        arguments = attributes["arguments"]
        dim_argument = arguments[place] if len(arguments) > place else attributes["keywords"].get("dim", default)
        rank = len(inputs[0])
        if dim_argument is None or isinstance(dim_argument, dict):
            return SplitLabels(tuple((None,) * len(shape) for shape in inputs), (None,) * len(out))
        dims = {dim % rank for dim in ([dim_argument] if isinstance(dim_argument, int) else dim_argument)}
        before = tuple(None if i in dims else f"d{i}" for i in range(rank))
        after = before if len(out) == rank else tuple(label for i, label in enumerate(before) if i not in dims)
        same = tuple(before if len(shape) == rank else (None,) * len(shape) for shape in inputs)
        return SplitLabels(same, after)

    return label_call


def _label_picked(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> SplitLabels:
    """Elements picked or written along one dimension; every other dimension of equal size in all values is
    independent."""
    dim = int(attributes["arguments"][1]) % max(1, len(inputs[0]))
    alike = [len({shape[i] for shape in (*inputs, out) if len(shape) == len(out)}) == 1 for i in range(len(out))]
    labels = tuple(f"d{i}" if i != dim and alike[i] else None for i in range(len(out)))
    return SplitLabels(tuple(labels if len(shape) == len(out) else (None,) * len(shape) for shape in inputs), labels)


def _label_images(
    spatial: int, together: int = 0
) -> Callable[[Mapping[str, Any], tuple[Shape, ...], Shape], SplitLabels]:
    """Pooling and resizing: rows and channels, in front of `spatial` dimensions, are independent. The last `together`
    of the leading dimensions are not, for example the channels of pixel_shuffle."""

    def label_call(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> SplitLabels:
        apart = len(inputs[0]) - spatial - together
        labels = (*(f"d{i}" for i in range(apart)), *(None,) * (spatial + together))
        return SplitLabels((labels,), labels)

    return label_call


def _label_channels(spatial: bool) -> Callable[[Mapping[str, Any], tuple[Shape, ...], Shape], SplitLabels]:
    """Rows and channels are independent, with `spatial` also all dimensions behind them. Other operands hold one number
    per channel."""

    def label_call(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> SplitLabels:
        labels = tuple(f"d{i}" if i < 2 or spatial else None for i in range(len(out)))
        operand_labels = tuple(
            ("d1",) if shape == out[1:2] and shape != (1,) else (None,) * len(shape) for shape in inputs[1:]
        )
        return SplitLabels((labels, *operand_labels), labels)

    return label_call


def _label_group_norm(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> SplitLabels:
    """Rows are independent, and channels in full groups; weight and bias are split like the channels."""
    label = "groups" if isinstance(out[1], int) else None  # symbolic sizes (rows) cannot be split into groups
    labels: Labels = ("d0", label, *(None,) * (len(out) - 2))
    groups = int(attributes["arguments"][1]) if label else 0
    return SplitLabels((labels, *((label,) for _ in inputs[1:])), labels, groups, 1)


def _label_pad(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> SplitLabels:
    """Dimensions without padding. Widths come in pairs, the last dimension first. A pair of +1 in front and -1 behind
    keeps the length but moves all elements, so it counts as padding."""
    widths = attributes["arguments"][1]
    still = [widths[pair : pair + 2] == [0, 0] for pair in range(0, len(widths), 2)]
    still = [*[True] * (len(out) - len(still)), *reversed(still)]
    labels = tuple(f"d{i}" if stays else None for i, stays in enumerate(still))
    return SplitLabels((labels,), labels)


def _label_by_size(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> SplitLabels:
    """A result whose sizes are arguments stays unsplit; the input only gives its dtype."""
    return SplitLabels(tuple((None,) * len(shape) for shape in inputs), (None,) * len(out))


def _label_one_hot(attributes: Mapping[str, Any], inputs: tuple[Shape, ...], out: Shape) -> SplitLabels:
    """One-hot adds an unsplit dimension behind all others."""
    labels = tuple(f"d{i}" for i in range(len(inputs[0])))
    return SplitLabels((labels,), (*labels, None))


_POINTWISE = """
    abs add addcmul atan bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min cos cosh detach div elu
    eq erf erfc exp expm1 floor floor_divide fmod full_like ge gt hardsigmoid hardswish hardtanh isinf isnan le
    leaky_relu lerp log log10 log1p log2 log_sigmoid logical_and logical_not logical_or logical_xor lt masked_fill
    maximum minimum mish mul ne neg ones_like pow reciprocal relu relu6 remainder round rsqrt rsub selu
    sigmoid sign silu sin sinh softplus sqrt square sub tan tanh threshold to trunc type_as where xlogy zeros_like
    binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss smooth_l1_loss
"""
"""The losses are per element: capture emits their sum as a separate operator."""

_IMAGES = "max_pool avg_pool adaptive_avg_pool adaptive_max_pool upsample_nearest _upsample_nearest_exact"

_TABLE: Mapping[str, Callable[[Mapping[str, Any], tuple[Shape, ...], Shape], SplitLabels]] = {
    **{f"aten.{name}": _label_pointwise for name in _POINTWISE.split()},
    **{f"aten.{name}": _label_along(1) for name in ("cumsum", "cumprod", "log_softmax", "logsumexp", "amax", "amin",
    "mean", "prod", "flip", "argmax", "argmin", "any", "all", "var", "std",
                                              "max", "min")},
    **{f"aten.{name}": _label_pointwise for name in ("max.other", "min.other")},
    **{f"aten.{name}": _label_picked for name in ("gather", "scatter", "scatter_add")},
    "aten.sort": _label_along(1, -1),
    "aten.topk": _label_along(2, -1),
    "aten.one_hot": _label_one_hot,
    **{f"aten.new_{name}": _label_by_size for name in ("full", "ones", "zeros")},
    "aten.pad": _label_pad,
    "aten.constant_pad_nd": _label_pad,
    "aten.glu": _label_along(1, -1),
    "aten.group_norm": _label_group_norm,
    "aten.instance_norm": _label_channels(False),
    "aten.prelu": _label_channels(True),
    **{f"aten.{name}{n}d": _label_images(n) for name in _IMAGES.split() for n in (1, 2, 3)},
    **{f"aten.upsample_{name}": _label_images(n) for name, n in (("linear1d", 1), ("bilinear2d", 2), ("bicubic2d", 2),
                                                           ("trilinear3d", 3))},
    **{f"aten.pixel_{name}": _label_images(2, together=1) for name in ("shuffle", "unshuffle")},
}  # fmt: skip
