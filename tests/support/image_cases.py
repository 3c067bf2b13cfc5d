"""Examples of operators on images, each with the same thing in plain PyTorch, written independently."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tests.support.op_case import make_example

from pipefit.testing.operator_example import OperatorExample


def _conv(attributes: Mapping[str, Any]) -> Callable[..., Any]:
    """One tap of the kernel at a time."""

    def plain(x: Any, weight: Any, bias: Any) -> Any:
        groups, spatial = attributes["groups"], x.dim() - 2
        edges = [side for padding in reversed(attributes["padding"]) for side in (padding, padding)]
        x = torch.nn.functional.pad(x, edges).unflatten(1, (groups, -1))
        weight = weight.unflatten(0, (groups, -1))
        total: Any = 0
        for place in itertools.product(*map(range, weight.shape[3:])):
            part = x
            for dim in range(spatial):
                step, gap = attributes["stride"][dim], attributes["dilation"][dim]
                count = (x.shape[3 + dim] - gap * (weight.shape[3 + dim] - 1) - 1) // step + 1
                part = part.narrow(3 + dim, place[dim] * gap, (count - 1) * step + 1)
                part = part.index_select(3 + dim, torch.arange(0, (count - 1) * step + 1, step))
            tap = weight[(slice(None),) * 3 + place]
            total = total + torch.einsum("bgi...,goi->bgo...", part, tap)
        total = total.flatten(1, 2)
        return total if bias is None else total + bias.view(-1, *[1] * spatial)

    return plain


def _conv_transpose(attributes: Mapping[str, Any]) -> Callable[..., Any]:
    """One tap of the kernel at a time, added where it falls in the padded result."""

    def plain(x: Any, weight: Any, bias: Any) -> Any:
        groups, spatial = attributes["groups"], x.dim() - 2
        steps, gaps, edges, behind = (attributes[n] for n in ("stride", "dilation", "padding", "output_padding"))
        x, weight = x.unflatten(1, (groups, -1)), weight.unflatten(0, (groups, -1))
        kernel = weight.shape[3:]
        sizes = [(x.shape[3 + d] - 1) * steps[d] + gaps[d] * (kernel[d] - 1) + 1 + behind[d] for d in range(spatial)]
        total: Any = x.new_zeros((x.shape[0], groups, weight.shape[2], *sizes))
        for place in itertools.product(*map(range, kernel)):
            tap = torch.einsum("bgi...,gio->bgo...", x, weight[(slice(None),) * 3 + place])
            runs = [
                slice(place[d] * gaps[d], place[d] * gaps[d] + (x.shape[3 + d] - 1) * steps[d] + 1, steps[d])
                for d in range(spatial)
            ]
            here = torch.zeros_like(total)
            here[(slice(None),) * 3 + tuple(runs)] = tap
            total = total + here
        for d in range(spatial):
            total = total.narrow(3 + d, edges[d], sizes[d] - 2 * edges[d])
        total = total.flatten(1, 2)
        return total if bias is None else total + bias.view(-1, *[1] * spatial)

    return plain


def _group_norm(groups: int) -> Callable[..., Any]:
    def plain(x: Any, weight: Any, bias: Any) -> Any:
        parts = []
        for part in x.chunk(groups, 1):
            dims = tuple(range(1, x.dim()))
            centred = part - part.mean(dims, keepdim=True)
            parts.append(centred / torch.sqrt((centred**2).mean(dims, keepdim=True) + 1e-3))
        shape = (1, -1, *[1] * (x.dim() - 2))
        return torch.cat(parts, 1) * weight.view(shape) + bias.view(shape)

    return plain


def _instance_norm(x: Any, weight: Any, bias: Any) -> Any:
    return _group_norm(x.shape[1])(x, weight, bias)


def _conv_case(inputs: dict[str, Any], **attributes: Any) -> OperatorExample:
    attributes.setdefault("groups", 1)
    parameters = frozenset(name for name in ("w", "b") if inputs[name] is not None)
    return make_example("conv", inputs, _conv(attributes), attributes, parameters)


def _conv_transpose_case(inputs: dict[str, Any], **attributes: Any) -> OperatorExample:
    parameters = frozenset(name for name in ("w", "b") if inputs[name] is not None)
    return make_example("conv_transpose", inputs, _conv_transpose(attributes), attributes, parameters)


def _image_case(
    target: str,
    plain: Callable[..., Any],
    inputs: dict[str, Any],
    *arguments: Any,
    shape: tuple[Any, ...] = (),
    result: Any = None,
) -> OperatorExample:
    """A function of an image x, with the other inputs as parameters; `arguments` are those of the call."""
    attributes = {
        "target": f"aten.{target}",
        "arguments": list(arguments),
        "keywords": {},
        "result": result,
        "shape": list(shape or inputs["x"]),
        "dtype": "compute",
    }
    return make_example("aten", inputs, plain, attributes, frozenset({*inputs} - {"x"}))


CASES: list[OperatorExample] = [
    _conv_case({"x": ("B", 4, 7, 6), "w": (5, 4, 3, 2), "b": (5,)}, stride=[2, 1], padding=[1, 0], dilation=[1, 2]),
    _conv_case({"x": ("B", 4, 7), "w": (5, 4, 3), "b": None}, stride=[1], padding=[2], dilation=[1]),
    _conv_case(
        {"x": ("B", 6, 5, 5), "w": (9, 2, 3, 3), "b": (9,)}, stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=3
    ),
    _conv_transpose_case(
        {"x": ("B", 4, 3, 4), "w": (4, 5, 3, 2), "b": (5,)},
        stride=[2, 3],
        padding=[1, 0],
        dilation=[1, 2],
        groups=1,
        output_padding=[1, 0],
    ),
    _conv_transpose_case(
        {"x": ("B", 4, 7), "w": (4, 5, 3), "b": None},
        stride=[1],
        padding=[2],
        dilation=[1],
        groups=1,
        output_padding=[0],
    ),
    _conv_transpose_case(
        {"x": ("B", 6, 3, 3), "w": (6, 2, 2, 2), "b": (6,)},
        stride=[2, 2],
        padding=[0, 0],
        dilation=[1, 1],
        groups=3,
        output_padding=[0, 0],
    ),
    _image_case(
        "group_norm.default",
        _group_norm(5),
        {"x": ("B", 10, 3, 2), "w": (10,), "b": (10,)},
        {"input": 0},
        5,
        {"input": 1},
        {"input": 2},
        1e-3,
    ),
    _image_case(
        "instance_norm.default",
        _instance_norm,
        {"x": ("B", 5, 3, 2), "w": (5,), "b": (5,)},
        {"input": 0},
        {"input": 1},
        {"input": 2},
        None,
        None,
        True,
        0.1,
        1e-3,
        True,
    ),
    _image_case(
        "prelu.default",
        lambda x, w: torch.where(x > 0, x, x * w.view(-1, 1)),
        {"x": ("B", 5, 3), "w": (5,)},
        {"input": 0},
        {"input": 1},
    ),
    _image_case(
        "adaptive_max_pool2d.default",
        lambda x: x.unflatten(3, (2, 3)).unflatten(2, (2, 2)).amax((3, 5)),
        {"x": ("B", 3, 4, 6)},
        {"input": 0},
        [2, 2],
        shape=("B", 3, 2, 2),
        result=0,
    ),
    _image_case(
        "upsample_nearest2d.vec",
        lambda x: torch.stack([x] * 2, 4).flatten(3).repeat_interleave(2, 2),
        {"x": ("B", 3, 2, 4)},
        {"input": 0},
        None,
        [2.0, 2.0],
        shape=("B", 3, 4, 8),
    ),
    _image_case(
        "pixel_shuffle.default",
        lambda x: torch.einsum("bcijhw->bchiwj", x.unflatten(1, (2, 2, 2))).flatten(4).flatten(2, 3),
        {"x": ("B", 8, 2, 3)},
        {"input": 0},
        2,
        shape=("B", 2, 4, 6),
    ),
    make_example(
        "aten",
        {"x": ("B", 3, 4, 4)},
        lambda x: x.unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2)),
        {
            "target": "aten.max_pool2d.default",
            "arguments": [{"input": 0}, [2, 2], [2, 2]],
            "keywords": {},
            "result": None,
            "shape": ["B", 3, 2, 2],
            "dtype": "compute",
        },
    ),
]
