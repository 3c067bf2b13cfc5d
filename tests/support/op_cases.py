"""One or more examples of every operator kind, each with the same thing in plain PyTorch, written independently."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from tests.support import delta_cases, image_cases, packed_cases
from tests.support.op_case import make_example

from pipefit.testing.operator_example import ROWS, TOKENS, OperatorExample


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    y = torch.einsum("bti,oi->bto", x, weight)
    return y if bias is None else y + bias


def _rms_norm(eps: float, offset: float = 0.0) -> Callable[..., Any]:
    def plain(x: Any, weight: Any) -> Any:
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
        return y if weight is None else y * (offset + weight)

    return plain


def _layer_norm(eps: float) -> Callable[..., Any]:
    def plain(x: Any, weight: Any, bias: Any) -> Any:
        centred = x - x.mean(-1, keepdim=True)
        y = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    return plain


def _rotary(theta: float, dim: int, style: str) -> Callable[..., Any]:
    """One pair at a time, with 2 x 2 rotations."""

    def plain(x: Any, positions: Any) -> Any:
        parts = list(x.unbind(-1))
        for i in range(dim // 2):
            a, b = (i, i + dim // 2) if style == "half" else (2 * i, 2 * i + 1)
            angle = (positions.double() * theta ** (-2 * i / dim)).unsqueeze(-1)
            first, second = parts[a], parts[b]
            parts[a] = first * angle.cos() - second * angle.sin()
            parts[b] = first * angle.sin() + second * angle.cos()
        return torch.stack(parts, -1)

    return plain


def _attention(causal: bool, scale: float, window: int | None, softcap: float | None = None) -> Callable[..., Any]:
    """One query at a time. A sink takes a part of the weights of its head."""

    def plain(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        repeat = q.shape[2] // k.shape[2]
        rows = []
        for t in range(q.shape[1]):
            first = 0 if window is None else max(0, t - window + 1)
            last = t + 1 if causal else k.shape[1]
            heads = []
            for h in range(q.shape[2]):
                scores = (k[:, first:last, h // repeat] * q[:, t : t + 1, h]).sum(-1) * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[h].expand(len(scores), 1)), -1)
                weights = scores.softmax(-1)[:, : last - first].unsqueeze(-1)
                heads.append((weights * v[:, first:last, h // repeat]).sum(1))
            rows.append(torch.stack(heads, 1))
        return torch.stack(rows, 1)

    return plain


def _cross_entropy(logits: Any, labels: Any) -> Any:
    total = logits.new_zeros(())
    for row, targets in zip(logits, labels, strict=True):
        for numbers, target in zip(row, targets.tolist(), strict=True):
            if target != 1:  # the ignored label of the case
                total = total - torch.log(torch.exp(numbers)[target] / torch.exp(numbers).sum())
    return total


def _moe(top: int, normalize: bool, activation: Callable[[Any], Any]) -> Callable[..., Any]:
    """One token at a time."""

    def plain(x: Any, router: Any, gate_up: Any, down: Any) -> Any:
        inner = down.shape[2]
        rows = []
        for token in x.reshape(-1, x.shape[-1]):
            weights = (router @ token).softmax(0)
            chosen = weights.argsort(descending=True)[:top]
            picked = weights[chosen] / weights[chosen].sum() if normalize else weights[chosen]
            y = 0
            for weight, expert in zip(picked, chosen.tolist(), strict=True):
                both = gate_up[expert] @ token
                y = y + weight * (down[expert] @ (activation(both[:inner]) * both[inner:]))
            rows.append(y)
        return torch.stack(rows).view(x.shape)

    return plain


def _clamped_moe(top: int, gain: float, limit: float) -> Callable[..., Any]:
    """One token at a time: biases everywhere, and a clamped gate."""

    def plain(x: Any, router: Any, gate_up: Any, down: Any, bias: Any, gate_up_bias: Any, down_bias: Any) -> Any:
        inner = down.shape[2]
        rows = []
        for token in x.reshape(-1, x.shape[-1]):
            scores = router @ token + bias
            chosen = scores.argsort(descending=True)[:top]
            y = 0
            for weight, expert in zip(scores[chosen].softmax(0), chosen.tolist(), strict=True):
                both = gate_up[expert] @ token + gate_up_bias[expert]
                gate = torch.where(both[:inner] > limit, limit, both[:inner])
                up = torch.where(both[inner:].abs() > limit, limit * both[inner:].sign(), both[inner:])
                h = gate / (1 + torch.exp(-gain * gate)) * (up + 1)
                y = y + weight * (down[expert] @ h + down_bias[expert])
            rows.append(y)
        return torch.stack(rows).view(x.shape)

    return plain


def _grouped_moe(top: int, groups: int, open_groups: int, scale: float) -> Callable[..., Any]:
    """One token at a time: sigmoid scores, and experts of the groups with the largest sum of two scores."""

    def plain(x: Any, router: Any, gate_up: Any, down: Any) -> Any:
        inner, size = down.shape[2], len(router) // groups
        rows = []
        for token in x.reshape(-1, x.shape[-1]):
            scores = 1 / (1 + torch.exp(-(router @ token)))
            ranked = sorted(range(groups), key=lambda g: -sum(sorted(scores[g * size : (g + 1) * size].tolist())[-2:]))
            experts = [expert for g in ranked[:open_groups] for expert in range(g * size, (g + 1) * size)]
            chosen = sorted(experts, key=lambda expert: -float(scores[expert]))[:top]
            y = 0
            for expert in chosen:
                both = gate_up[expert] @ token
                h = both[:inner] * torch.sigmoid(both[:inner]) * both[inner:]
                y = y + scale * scores[expert] / scores[chosen].sum() * (down[expert] @ h)
            rows.append(y)
        return torch.stack(rows).view(x.shape)

    return plain


def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


X = ("B", "T", 10)
_HEADS = {"q": ("B", "T", 6, 4), "k": ("B", "T", 3, 4), "v": ("B", "T", 3, 4)}
_EXPERTS = {"x": X, "router": (5, 10), "gate_up": (5, 16, 10), "down": (5, 10, 8)}


def _rotary_case(style: str, dim: int) -> OperatorExample:
    attributes = {"theta": 100.0, "dim": dim, "scaling": None, "style": style}
    inputs = {"x": ("B", "T", 3, 8), "positions": ("B", "T")}
    places = {"positions": [[*range(3, 3 + TOKENS)]] * ROWS}
    plain, bounds = _rotary(100.0, dim, style), {"positions": 50}
    return make_example("rotary", inputs, plain, attributes, integers=bounds, fixed_values=places)


def _attention_case(**attributes: Any) -> OperatorExample:
    return make_example("attention", _HEADS, _attention(**attributes), attributes)


def _short_values_case(**attributes: Any) -> OperatorExample:
    inputs = {**_HEADS, "v": (*_HEADS["v"][:3], 3)}
    return make_example("attention", inputs, _attention(**attributes), attributes)


def _sink_case(**attributes: Any) -> OperatorExample:
    inputs = {**_HEADS, "sinks": (_HEADS["q"][2],)}
    return make_example("attention", inputs, _attention(**attributes), attributes, frozenset(("sinks",)))


def _moe_case(top: int, normalize: bool, activation: str) -> OperatorExample:
    attributes = {"experts": 5, "top_k": top, "normalize": normalize, "activation": activation}
    plain = _moe(top, normalize, _gelu if activation == "gelu" else lambda x: x * torch.sigmoid(x))
    return make_example("moe", _EXPERTS, plain, attributes, frozenset(("router", "gate_up", "down")))


def _clamped_moe_case() -> OperatorExample:
    names = ["router_bias", "gate_up_bias", "down_bias"]
    attributes = {
        "experts": 5, "top_k": 2, "normalize": True, "activation": "silu", "more": names, "clamp": [1.5, 0.6],
    }  # fmt: skip
    inputs = {**_EXPERTS, "router_bias": (5,), "gate_up_bias": (5, 16), "down_bias": (5, 10)}
    return make_example("moe", inputs, _clamped_moe(2, 1.5, 0.6), attributes, frozenset(inputs) - {"x"})


def _grouped_moe_case() -> OperatorExample:
    attributes = {
        "experts": 6, "top_k": 3, "normalize": True, "activation": "silu", "scores": "sigmoid", "groups": [3, 2, 2],
        "weight_scale": 2.5,
    }  # fmt: skip
    inputs = {"x": X, "router": (6, 10), "gate_up": (6, 16, 10), "down": (6, 10, 8)}
    return make_example("moe", inputs, _grouped_moe(3, 3, 2, 2.5), attributes, frozenset(inputs) - {"x"})


def _experts(gated: bool) -> Callable[..., Any]:
    """One pair at a time. The number 5 is beyond the last expert."""

    def plain(x: Any, chosen: Any, weight: Any, up: Any, down: Any, up_bias: Any = None, down_bias: Any = None) -> Any:
        inner, rows = down.shape[2], []
        for token, numbers, weights in zip(x.flatten(0, 1), chosen.flatten(0, 1), weight.flatten(0, 1), strict=True):
            y = torch.zeros_like(token)
            for expert, factor in zip(numbers.tolist(), weights, strict=True):
                if expert < len(down):
                    both = up[expert] @ token + (0 if up_bias is None else up_bias[expert])
                    h = both[:inner] * torch.sigmoid(both[:inner]) * both[inner:] if gated else both.clamp(min=0)
                    y = y + factor * (down[expert] @ h + (0 if down_bias is None else down_bias[expert]))
            rows.append(y)
        return torch.stack(rows).view(x.shape)

    return plain


def _experts_case(gated: bool) -> OperatorExample:
    attributes: dict[str, Any] = {"experts": 5, "gated": gated, "activation": "silu" if gated else "relu"}
    pair = ("B", "T", 2)
    inputs: dict[str, Any] = {
        "x": X,
        "chosen": pair,
        "weight": pair,
        "up": (5, 8 * (1 + gated), 10),
        "down": (5, 10, 8),
    }
    if not gated:
        attributes["more"] = ["gate_up_bias", "down_bias"]
        inputs |= {"up_bias": (5, 8), "down_bias": (5, 10)}
    parameters = frozenset(inputs) - {"x", "chosen", "weight"}
    return make_example("experts", inputs, _experts(gated), attributes, parameters, integers={"chosen": 5 + gated})


def _stored_experts(experts: int, scales_inputs: bool) -> Callable[..., Any]:
    """One pair at a time: matrices (inputs, outputs), and weights of inputs or outputs. With a factor the experts are
    rows of matrices, and those of down alone are (inputs, outputs)."""

    def plain(x: Any, chosen: Any, weight: Any, up: Any, down: Any, factor: Any = None) -> Any:
        rows, inner = [], down.numel() // experts // x.shape[-1]
        for token, numbers, weights in zip(x.flatten(0, 1), chosen.flatten(0, 1), weight.flatten(0, 1), strict=True):
            y = torch.zeros_like(token)
            for expert, scale in zip(numbers.tolist(), weights, strict=True):
                if expert < experts:
                    run = slice(expert * inner, (expert + 1) * inner)
                    value = scale * token if scales_inputs else token
                    if factor is None:
                        gate, other = (value @ up[expert]).split(inner)
                    else:
                        gate, other = up[run] @ value, factor[run] @ value
                    result = (gate * torch.sigmoid(gate) * other) @ (down[expert] if factor is None else down[run])
                    y = y + (result if scales_inputs else scale * result)
            rows.append(y)
        return torch.stack(rows).view(x.shape)

    return plain


def _scaled_experts_case(count: int) -> OperatorExample:
    """As in Llama 4; two numbers of a token are distinct or the same."""
    inputs = {"x": X, "chosen": ("B", "T", count), "weight": ("B", "T", count), "up": (5, 10, 16), "down": (5, 8, 10)}
    attributes = {
        "experts": 5, "gated": True, "activation": "silu", "scaled": "inputs", "transposed": ["up", "down"],
    }  # fmt: skip
    parameters = frozenset(("up", "down"))
    plain = _stored_experts(5, scales_inputs=True)
    return make_example("experts", inputs, plain, attributes, parameters, integers={"chosen": 6})


def _row_experts_case() -> OperatorExample:
    """As in DBRX."""
    pair = ("B", "T", 2)
    inputs = {"x": X, "chosen": pair, "weight": pair, "up": (40, 10), "down": (40, 10), "factor": (40, 10)}
    attributes = {
        "experts": 5, "gated": True, "activation": "silu", "more": ["factor_weight"], "rows": 8,
        "transposed": ["down"],
    }  # fmt: skip
    parameters = frozenset(("up", "down", "factor"))
    plain = _stored_experts(5, scales_inputs=False)
    return make_example("experts", inputs, plain, attributes, parameters, integers={"chosen": 5})


def _aten_case(
    target: str, plain: Callable[..., Any], *arguments: Any, shape: Any = None, result: Any = None
) -> OperatorExample:
    attributes = {
        "target": f"aten.{target}",
        "arguments": [{"input": 0}, *arguments],
        "keywords": {},
        "result": result,
        "shape": list(X) if shape is None else shape,
        "dtype": "compute",
    }
    return make_example("aten", {"x": X}, plain, attributes)


def _unary(kind: str, plain: Callable[[Any], Any], **attributes: Any) -> OperatorExample:
    return make_example(kind, {"x": X}, plain, attributes)


def _binary(kind: str, plain: Callable[[Any, Any], Any]) -> list[OperatorExample]:
    def with_scalar(a: Any, b: Any) -> Any:
        return plain(a, 1.75)

    return [
        make_example(kind, {"a": X, "b": X}, plain),
        make_example(kind, {"a": X, "b": ("B", "T", 1)}, plain),
        make_example(kind, {"a": X, "b": (10,)}, plain, parameters=frozenset("b")),
        make_example(kind, {"a": X, "b": None}, with_scalar, {"scalar": 1.75}),
    ]


CASES: list[OperatorExample] = [
    make_example("linear", {"x": X, "w": (7, 10), "b": (7,)}, _linear, parameters=frozenset(("w", "b"))),
    make_example("linear", {"x": X, "w": (7, 10), "b": None}, _linear, parameters=frozenset("w")),
    make_example(
        "embedding",
        {"tokens": ("B", "T"), "w": (9, 5)},
        lambda tokens, w: torch.nn.functional.one_hot(tokens, 9).double() @ w,
        parameters=frozenset("w"),
        integers={"tokens": 9},
    ),
    make_example(
        "cross_entropy",
        {"x": X, "labels": ("B", "T")},
        _cross_entropy,
        {"ignore_index": 1},
        integers={"labels": 10},
    ),
    make_example(
        "matmul", {"a": ("B", 3, "T", 4), "b": ("B", 3, 4, 5)}, lambda a, b: torch.einsum("bhij,bhjk->bhik", a, b)
    ),
    make_example("rms_norm", {"x": X, "w": (10,)}, _rms_norm(1e-3), {"eps": 1e-3}, frozenset("w")),
    make_example("rms_norm", {"x": X, "w": None}, _rms_norm(1e-3), {"eps": 1e-3}),
    make_example("rms_norm", {"x": X, "w": (10,)}, _rms_norm(1e-3, 1.0), {"eps": 1e-3, "offset": 1.0}, frozenset("w")),
    make_example(
        "layer_norm", {"x": X, "w": (10,), "b": (10,)}, _layer_norm(1e-3), {"eps": 1e-3}, frozenset(("w", "b"))
    ),
    make_example("layer_norm", {"x": X, "w": None, "b": None}, _layer_norm(1e-3), {"eps": 1e-3}),
    _rotary_case("half", 8),
    _rotary_case("half", 4),
    _rotary_case("interleaved", 8),
    _attention_case(causal=True, scale=0.3, window=None, softcap=0.5),
    _attention_case(causal=True, scale=0.3, window=3, softcap=0.5),
    _short_values_case(causal=True, scale=0.3, window=None),
    _short_values_case(causal=True, scale=0.3, window=3),
    _sink_case(causal=True, scale=0.3, window=None),
    _sink_case(causal=True, scale=0.3, window=3, softcap=0.5),
    _attention_case(causal=True, scale=0.3, window=None),
    _attention_case(causal=False, scale=0.5, window=None),
    _attention_case(causal=True, scale=0.5, window=3),
    _experts_case(True),
    _experts_case(False),
    _scaled_experts_case(1),
    _scaled_experts_case(2),
    _row_experts_case(),
    _clamped_moe_case(),
    _grouped_moe_case(),
    _moe_case(2, True, "silu"),
    _moe_case(3, False, "gelu"),
    *_binary("add", lambda a, b: a + b),
    *_binary("sub", lambda a, b: a - b),
    *_binary("mul", lambda a, b: a * b),
    *_binary("div", lambda a, b: a / b),
    _unary("silu", lambda x: x / (1 + torch.exp(-x))),
    _unary("gelu", _gelu, approximate="none"),
    _unary("gelu", _gelu_tanh, approximate="tanh"),
    _unary("relu", lambda x: torch.where(x > 0, x, 0)),
    _unary("sigmoid", lambda x: 1 / (1 + torch.exp(-x))),
    _unary("tanh", lambda x: 1 - 2 / (1 + torch.exp(2 * x))),
    _unary("exp", lambda x: math.e**x),
    _unary("rsqrt", lambda x: x**-0.5),
    _unary("neg", lambda x: 0 - x),
    _unary("softmax", lambda x: torch.exp(x) / torch.exp(x).sum(1, keepdim=True), dim=1),
    _unary("softmax", lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True), dim=-1),
    _unary("cast", lambda x: x * 1, dtype="float32"),
    _unary("dropout", lambda x: x * 1, p=0.0, index=0),
    _unary("reshape", lambda x: torch.stack((x[..., :5], x[..., 5:]), 2), shape=["B", "T", 2, 5]),
    _unary("transpose", lambda x: torch.einsum("bti->tib", x), dims=[1, 2, 0]),
    _unary("slice", lambda x: x[..., 2:7], dim=2, start=2, stop=7),
    make_example("concat", {"a": X, "b": ("B", "T", 3)}, lambda a, b: torch.cat((a, b), 2), {"dim": 2}),
    make_example("expand", {"x": ("B", 1, 10)}, lambda x: torch.cat([x] * TOKENS, 1), {"shape": ["B", "T", 10]}),
    make_example(
        "expand",
        {"x": (1, 3, 4)},
        lambda x: torch.stack([x[0]] * ROWS),
        {"shape": ["B", 3, 4]},
        parameters=frozenset("x"),
    ),
    make_example("sum", {"x": X}, lambda x: torch.einsum("bti->bi", x), {"dims": [1], "keepdim": False}),
    make_example("sum", {"x": X}, lambda x: x @ torch.ones(10, 1).double(), {"dims": [2], "keepdim": True}),
    make_example("sum", {"x": X}, lambda x: torch.einsum("bti->", x), {"dims": [0, 1, 2], "keepdim": False}),
    make_example(
        "einsum",
        {"a": ("B", "T", 5), "b": ("B", "T", 3, 4)},
        lambda a, b: (a[:, :, None, None, :] * b[..., None]).sum(1).permute(0, 3, 1, 2),
        {"equation": "bsd,bsec->bdec"},
    ),
    make_example(
        "einsum",
        {"a": ("B", "T", 5), "w": (4, 5, 3)},
        lambda a, w: torch.stack([a @ one for one in w], 2),
        {"equation": "btd,edf->btef"},
        parameters=frozenset("w"),
    ),
    make_example("einsum", {"a": ("B", "T", 5), "b": None}, lambda a, b: a.transpose(1, 2), {"equation": "btd->bdt"}),
    *delta_cases.CASES,
    *image_cases.CASES,
    *packed_cases.CASES,
    _aten_case("glu.default", lambda x: x[..., :5] * torch.sigmoid(x[..., 5:]), shape=["B", "T", 5]),
    _aten_case(
        "cumsum.default", lambda x: torch.einsum("bti,ts->bsi", x, torch.ones(TOKENS, TOKENS).triu().double()), 1
    ),
    _aten_case("sin.default", lambda x: torch.cos(x - math.pi / 2)),
    _aten_case("logsumexp.default", lambda x: x.exp().sum(2, keepdim=True).log(), [2], True, shape=["B", "T", 1]),
    _aten_case("topk.default", lambda x: x.sort(-1, descending=True).values[..., :3], 3, shape=["B", "T", 3], result=0),
    _aten_case(
        "constant_pad_nd.default",
        lambda x: torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1),
        [0, 0, 1, -1],
    ),
    _aten_case("roll.default", lambda x: torch.cat((x[:, -1:], x[:, :-1]), 1), [1], [1]),
    make_example(
        "aten",
        {"a": X, "b": ("B", 1, 10)},
        lambda a, b: a * (a > b) + b * (a <= b),
        {
            "target": "aten.maximum.default",
            "arguments": [{"input": 0}, {"input": 1}],
            "keywords": {},
            "result": None,
            "shape": list(X),
            "dtype": "compute",
        },
    ),
]
