"""A reference interpreter of operator graphs in plain PyTorch: slow, short, independent of the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipefit.model.graph import Graph, size_value
from pipefit.model.ops.rotary import rotary_frequencies


def run_graph(graph: Graph, inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """The only output of `graph`; checks every produced shape against the graph's own."""
    return run_outputs(graph, inputs, parameters)[0]


def run_outputs(graph: Graph, inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """All outputs of `graph`."""
    symbols = {
        size: length
        for tensor in graph.inputs
        for size, length in zip(tensor.shape, inputs[tensor.name].shape, strict=True)
        if isinstance(size, str)
    }
    values: dict[str, Any] = {**inputs, **parameters, "": None}
    for operator in graph.operators:
        arguments = [values[name] for name in operator.inputs]
        result = EXECUTE[operator.kind](arguments, operator.attributes, symbols)
        expected = tuple(size_value(size, symbols) for size in graph.find_tensor(operator.outputs[0]).shape)
        assert tuple(result.shape) == expected, (operator, tuple(result.shape), expected)
        values[operator.outputs[0]] = result
    return [values[name] for name in graph.outputs]


def _second(a: list[Any], at: Mapping[str, Any]) -> Any:
    return at["scalar"] if a[1] is None else a[1]


def _rotary(a: list[Any], at: Mapping[str, Any], symbols: Any) -> Tensor:
    """Each pair as a complex number, turned."""
    x, positions = a
    values, factor = rotary_frequencies(at)
    angle = positions[..., None, None].double() * torch.tensor(values, dtype=torch.float64)
    turn = torch.polar(torch.full_like(angle, factor), angle)
    front, rest = x[..., : at["dim"]], x[..., at["dim"] :]
    if at["style"] == "half":
        pairs = front.unflatten(-1, (2, -1)).transpose(-1, -2)
    else:
        pairs = front.unflatten(-1, (-1, 2))
    turned = torch.view_as_real(torch.view_as_complex(pairs.double().contiguous()) * turn)
    turned = turned.transpose(-1, -2) if at["style"] == "half" else turned
    return torch.cat((turned.flatten(-2).to(x.dtype), rest), dim=-1)


def _attention(a: list[Any], at: Mapping[str, Any], symbols: Any) -> Tensor:
    """Written out, every group repeated for its heads."""
    q, k, v = (t.transpose(1, 2) for t in a)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * at["scale"]
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])[None, :]
    seen = distance >= 0 if at["causal"] else torch.ones_like(distance, dtype=torch.bool)
    if at["window"]:
        seen &= distance < at["window"]
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def _moe(a: list[Any], at: Mapping[str, Any], symbols: Any) -> Tensor:
    """Every expert on every token, then a weighted sum: no routing of tokens."""
    x, router, gate_up, down = a
    probability = F.linear(x, router).softmax(-1)
    top, chosen = probability.topk(at["top_k"], dim=-1)
    weight = torch.zeros_like(probability).scatter(
        -1, chosen, top / top.sum(-1, keepdim=True) if at["normalize"] else top
    )
    both = torch.einsum("btd,efd->btef", x, gate_up)
    gate, up = both.chunk(2, dim=-1)
    activation = {"silu": F.silu, "gelu": F.gelu}[at["activation"]]
    return torch.einsum("btef,edf,bte->btd", activation(gate) * up, down, weight)


def _cross_entropy(a: list[Any], at: Mapping[str, Any], symbols: Any) -> Tensor:
    logits, labels = a
    valid = labels != at["ignore_index"]
    return (logits.logsumexp(-1) - logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0])[valid].sum()


def _packed_attention(a: list[Any], at: Mapping[str, Any], symbols: Any) -> Tensor:
    """All tokens with all, those of other images masked."""
    q, k, v = (t.transpose(1, 2) for t in a[:3])
    same = (a[3].unsqueeze(1) == a[3].unsqueeze(2)).unsqueeze(1)
    scores = (q @ k.transpose(-1, -2) * at["scale"]).masked_fill(~same, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def _one_hot(places: Tensor, h: Tensor) -> Tensor:
    """(places, rows x tokens) with a one for each place."""
    return F.one_hot(places[0], h.shape[0] * h.shape[1]).to(h.dtype)


def _put_tokens(a: list[Any], at: Mapping[str, Any], symbols: Any) -> Tensor:
    h, x, places = a
    chosen = _one_hot(places, h)
    stay = 1 - chosen.sum(0)
    return (stay[:, None] * h.flatten(0, 1) + chosen.T @ x[0]).view_as(h)


def _image_positions(a: list[Any], at: Mapping[str, Any], symbols: Any) -> Tensor:
    """By the matrix that interpolates rows, and the one that interpolates columns."""
    x, grid, table, start = a
    sides = (at["rows"], at["columns"])
    out = []
    for token, (row, column, *size) in zip(x.flatten(0, 1), grid.flatten(0, 1).tolist(), strict=True):
        if row < 0:
            out.append(start + table[0])
            continue
        weights = [
            F.interpolate(torch.eye(n, dtype=x.dtype)[None, :, None], (1, m), mode="bicubic")[0, :, 0, place]
            for n, m, place in zip(sides, size, (row, column), strict=True)
        ]
        patches = table[start is not None :].unflatten(0, sides)
        out.append(token + torch.einsum("r,c,rcd->d", *weights, patches))
    return torch.stack(out).view_as(x) if out else x


def _fourier_features(a: list[Any], at: Mapping[str, Any], symbols: Any) -> Tensor:
    rates = torch.logspace(3, -1, at["frequencies"] + 1, dtype=torch.float64)[:-1]
    turned = torch.polar(torch.ones_like(a[0][..., None] * rates), a[0][..., None] * rates)
    return torch.cat((turned.real, turned.imag), -1)


def _slice(a: list[Any], at: Mapping[str, Any], symbols: Any) -> Tensor:
    return a[0].narrow(at["dim"], at["start"], size_value(at["stop"], symbols) - at["start"])


EXECUTE: dict[str, Any] = {
    "embedding": lambda a, at, s: a[1][a[0]],
    "linear": lambda a, at, s: a[0] @ a[1].T + (0 if a[2] is None else a[2]),
    "matmul": lambda a, at, s: a[0] @ a[1],
    "rms_norm": lambda a, at, s: (
        a[0] / torch.sqrt(a[0].square().mean(-1, keepdim=True) + at["eps"]) * (1 if a[1] is None else a[1])
    ),
    "layer_norm": lambda a, at, s: F.layer_norm(a[0], a[0].shape[-1:], a[1], a[2], at["eps"]),
    "rotary": _rotary,
    "attention": _attention,
    "add": lambda a, at, s: a[0] + _second(a, at),
    "sub": lambda a, at, s: a[0] - _second(a, at),
    "mul": lambda a, at, s: a[0] * _second(a, at),
    "div": lambda a, at, s: a[0] / _second(a, at),
    "silu": lambda a, at, s: a[0] * a[0].sigmoid(),
    "gelu": lambda a, at, s: F.gelu(a[0], approximate=at["approximate"]),
    "relu": lambda a, at, s: a[0].clamp(min=0),
    "sigmoid": lambda a, at, s: a[0].sigmoid(),
    "tanh": lambda a, at, s: a[0].tanh(),
    "exp": lambda a, at, s: a[0].exp(),
    "rsqrt": lambda a, at, s: a[0].rsqrt(),
    "neg": lambda a, at, s: -a[0],
    "softmax": lambda a, at, s: a[0].softmax(at["dim"]),
    "cast": lambda a, at, s: a[0] if a[0].is_floating_point() else a[0].double(),
    "reshape": lambda a, at, s: a[0].reshape([size_value(size, s) for size in at["shape"]]),
    "transpose": lambda a, at, s: a[0].permute(at["dims"]),
    "slice": _slice,
    "concat": lambda a, at, s: torch.cat(a, at["dim"]),
    "moe": _moe,
    "cross_entropy": _cross_entropy,
    "packed_attention": _packed_attention,
    "put_tokens": _put_tokens,
    "take_tokens": lambda a, at, s: (_one_hot(a[1], a[0]) @ a[0].flatten(0, 1)).unsqueeze(0),
    "image_positions": _image_positions,
    "fourier_features": _fourier_features,
    "squared_error": lambda a, at, s: a[0].sub(a[1]).pow(2).sum(),
    "constant": lambda a, at, s: torch.tensor(at["values"], dtype=torch.float64).view(at["shape"]),
}
