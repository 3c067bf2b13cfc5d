"""Parts that several families share: embedding, head, loss, rotary embedding, sliding-window attention, leaves.

Shape suffixes: B rows, T tokens, D features, V vocabulary, H heads, G key/value heads, K features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipefit.model.ops.rotary import rotary_frequencies

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
}


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class OperatorModule(nn.Module):
    """A module that becomes one operator of a graph, because its inside cannot be exported.

    A subclass sets `kind`, and gives the operator's attributes and its parameters, if any, in the operator's input
    order. Its tensor arguments come before the parameters. The operator kind gives the shape and dtype of the output.
    """

    kind: str

    def operator_attributes(self) -> dict[str, Any]:
        return {}

    def operator_parameters(self) -> tuple[str, ...]:
        return ()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class TokenLoss(nn.Module):
    """Sum of the cross-entropy over the labels other than -100."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits_NV = x.flatten(0, 1).to(statistics_dtype(x.dtype))
        return F.cross_entropy(logits_NV, labels.flatten(), ignore_index=-100, reduction="sum")


def apply_rotary(x_BTHK: Tensor, positions_BT: Tensor, rotary: Mapping[str, Any]) -> Tensor:
    """Rotary embedding of the first `dim` features of each head (rotary operator): feature i is paired with feature
    i + dim/2 in style `half`, feature 2i with 2i + 1 in style `interleaved`."""
    values, factor = rotary_frequencies(rotary)
    frequency_P = constant_vector(tuple(values), statistics_dtype(x_BTHK.dtype), x_BTHK.device)
    angle_BTP = positions_BT.unsqueeze(-1).to(frequency_P.dtype) * frequency_P
    halves = rotary["style"] == "half"
    angle_BT1K = (torch.cat((angle_BTP, angle_BTP), dim=-1) if halves else angle_BTP).unsqueeze(2)
    cos, sin = angle_BT1K.cos(), angle_BT1K.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    cos, sin = cos.to(x_BTHK.dtype), sin.to(x_BTHK.dtype)
    turned, passed = x_BTHK[..., : rotary["dim"]], x_BTHK[..., rotary["dim"] :]
    if halves:
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return turned if passed.shape[-1] == 0 else torch.cat((turned, passed), dim=-1)


class AxisRotary(OperatorModule):
    """Rotary embedding of q or k (B,T,H,K) by several positions of a token (B,T,A). `rotary["axes"]` names for each
    pair of features the position that turns it."""

    kind = "rotary"

    def __init__(self, rotary: Mapping[str, Any]) -> None:
        super().__init__()
        self.rotary = dict(rotary)

    def operator_attributes(self) -> dict[str, Any]:
        return self.rotary

    def forward(self, x_BTHK: Tensor, positions_BTA: Tensor) -> Tensor:
        return rotate_axes(x_BTHK, positions_BTA, self.rotary)


def rotate_axes(x: Tensor, positions: Tensor, rotary: Mapping[str, Any]) -> Tensor:
    """x (...,H,K) whose pairs i and i + dim/2 turn by the position (...,A) of their axis."""
    values, factor = rotary_frequencies(rotary)
    frequency_P = torch.tensor(values, dtype=statistics_dtype(x.dtype), device=x.device)
    angle = (positions[..., list(rotary["axes"])].to(frequency_P.dtype) * frequency_P).unsqueeze(-2)
    cos, sin = (angle.cos() * factor).to(x.dtype), (angle.sin() * factor).to(x.dtype)
    first, second, passed = x.tensor_split((len(values), 2 * len(values)), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, passed), dim=-1)


def constant_vector(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant vector, cached per device outside of export and compilation."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return torch.tensor(values, dtype=dtype).to(device)
    return _cached_constant(values, dtype, device)


@lru_cache(maxsize=64)
def _cached_constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(K)) v over earlier tokens; head h reads the keys of group h // (H / G)."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
        o_BHTK = F.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2),
            k_BTGK.transpose(1, 2),
            v_BTGK.transpose(1, 2),
            is_causal=True,
            scale=self.scale,
            enable_gqa=q_BTHK.shape[2] != k_BTGK.shape[2],
        )
        return o_BHTK.transpose(1, 2)


class WindowAttention(OperatorModule):
    """Causal attention in which a token sees only the last `window` tokens, itself included."""

    kind = "attention"

    def __init__(self, scale: float, window: int) -> None:
        super().__init__()
        self.scale = scale
        self.window = window

    def operator_attributes(self) -> dict[str, Any]:
        return {"causal": True, "scale": self.scale, "window": self.window}

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
        index = torch.arange(q_BTHK.shape[1], device=q_BTHK.device)
        distance = index[:, None] - index[None, :]
        o_BHTK = F.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2),
            k_BTGK.transpose(1, 2),
            v_BTGK.transpose(1, 2),
            attn_mask=(distance >= 0) & (distance < self.window),
            scale=self.scale,
            enable_gqa=q_BTHK.shape[2] != k_BTGK.shape[2],
        )
        return o_BHTK.transpose(1, 2)


def make_attention(scale: float, window: int | None) -> nn.Module:
    """Causal attention, windowed or not."""
    return CausalAttention(scale) if window is None else WindowAttention(scale, window)


def name_layer(layer: nn.Module, name: str, prefix: str, renamed: Mapping[str, str] | None = None) -> nn.Module:
    """Set `.layer_name` and `.parameter_names`: the name in `renamed`, otherwise `prefix` + local name."""
    layer.layer_name = name  # type: ignore[assignment]
    names = {local: (renamed or {}).get(local, prefix + local) for local, _ in layer.named_parameters()}
    layer.parameter_names = names  # type: ignore[assignment]
    return layer
