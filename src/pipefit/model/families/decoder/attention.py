"""Attention with capped scores, sinks or slopes of positions, in plain products.

Shape suffixes: B rows, T tokens, H heads, G key/value heads, R heads a key/value head, K features of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipefit.model.families.common import OperatorModule, constant_vector, make_attention, statistics_dtype
from pipefit.model.families.decoder.options import DecoderOptions
from pipefit.model.families.decoder.slopes import alibi_slopes


class ScoreAttention(OperatorModule):
    """Causal attention with an optional window, cap of the scores, and sinks: the operator `attention`. With `ahead`, a
    query sees the keys up to the one that `ends` (B,T) names."""

    kind = "attention"

    def __init__(self, scale: float, window: int | None, softcap: float, sinks: int, ahead: bool = False) -> None:
        super().__init__()
        assert not (sinks and ahead), "no model has both"
        self.scale, self.window, self.softcap, self.ahead = scale, window, softcap, ahead
        self.sinks = nn.Parameter(torch.empty(sinks)) if sinks else None

    def operator_attributes(self) -> dict[str, Any]:
        cap = {"softcap": self.softcap} if self.softcap else {}
        ahead = {"ahead": True} if self.ahead else {}
        return {"causal": True, "scale": self.scale, "window": self.window, **cap, **ahead}

    def operator_parameters(self) -> tuple[str, ...]:
        return () if self.sinks is None else ("sinks",)

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, ends_BT: Tensor | None = None) -> Tensor:
        tokens, groups = q_BTHK.shape[1], k_BTGK.shape[2]
        q_BTGRK = q_BTHK.unflatten(2, (groups, -1))
        scores = torch.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BTGK) * self.scale
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        index = torch.arange(tokens, device=scores.device)
        distance = index[:, None] - index[None, :]
        later = distance < 0 if ends_BT is None else (index > ends_BT.unsqueeze(-1))[:, None, None]
        hidden = later | (distance >= (self.window or tokens))
        scores = scores.masked_fill(hidden, -torch.inf).to(statistics_dtype(scores.dtype))
        if self.sinks is not None:
            more = self.sinks.unflatten(0, (groups, -1))[None, :, :, None, None].to(scores.dtype)
            scores = torch.cat((scores, more.expand(*scores.shape[:-1], 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :tokens].to(v_BTGK.dtype)
        return torch.einsum("bgrts,bsgk->btgrk", weights, v_BTGK).flatten(2, 3)


class AlibiFeatures(nn.Module):
    """One more feature of queries and keys, so that their product is slope * position of the key (ALiBi, Press et al.,
    2022). A softmax is not changed by the position of the query, so the distance is not needed."""

    def __init__(self, heads: int, scale: float) -> None:
        super().__init__()
        self.values = tuple(slope / scale for slope in alibi_slopes(heads))

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        # Cast last, so that a graph has all digits.
        slope_H = constant_vector(self.values, torch.float64, q_BTHK.device)
        slope_BTH1 = slope_H[None, None, :, None].expand(*q_BTHK.shape[:2], -1, -1).to(q_BTHK.dtype)
        place_BTG1 = positions_BT.to(k_BTGK.dtype)[:, :, None, None].expand(-1, -1, k_BTGK.shape[2], -1)
        return torch.cat((q_BTHK, slope_BTH1), dim=-1), torch.cat((k_BTGK, place_BTG1), dim=-1)


def make_scores(options: DecoderOptions, layer: int) -> nn.Module:
    """Return the attention of a layer."""
    window = options.windows[layer]
    if options.softcap or options.sinks or options.sees_images:
        sinks = options.heads if options.sinks else 0
        return ScoreAttention(options.scale, window, options.softcap, sinks, options.sees_images)
    return make_attention(options.scale, window)
