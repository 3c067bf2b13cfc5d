"""Norms of decoders: of hidden states, and of queries and keys.

Shape suffixes: B rows, T tokens, H heads, K features of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipefit.model.families.common import OperatorModule, RMSNorm, statistics_dtype
from pipefit.model.families.decoder.options import DecoderOptions


class OffsetRMSNorm(OperatorModule):
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension."""

    kind = "rms_norm"

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.offset = eps, offset

    def operator_attributes(self) -> dict[str, Any]:
        return {"eps": self.eps, "offset": self.offset}

    def operator_parameters(self) -> tuple[str, ...]:
        return ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        wide = statistics_dtype(x.dtype)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide) + self.offset, self.eps).to(x.dtype)


class EachHeadNorm(nn.Module):
    """A layer norm of every head (B,T,H,K) without bias, with a weight (H,K)."""

    def __init__(self, heads: int, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, size))
        self.eps = eps

    def forward(self, x_BTHK: Tensor) -> Tensor:
        return F.layer_norm(x_BTHK, x_BTHK.shape[-1:], None, None, self.eps) * self.weight


def make_norm(options: DecoderOptions, size: int = 0) -> nn.Module:
    """Return a norm over `size` features, or over those of the hidden state."""
    norm, size = options.norm, size or options.hidden_size
    if norm.kind == "layer":
        return nn.LayerNorm(size, norm.eps, bias=norm.bias)
    return OffsetRMSNorm(size, norm.eps, norm.offset) if norm.offset else RMSNorm(size, norm.eps)


def make_qk_norm(options: DecoderOptions, heads: int) -> nn.Module:
    """Return the norm of queries or keys of that number of heads."""
    if options.qk_norm == "none":
        return nn.Identity()
    if options.qk_norm == "each_head":
        return EachHeadNorm(heads, options.head_dim, options.norm.eps)
    return make_norm(options, options.head_dim * (heads if options.qk_norm == "projection" else 1))
