"""Latent attention (DeepSeek-V2, 2024, section 2.1): keys and values are projected from one short vector a token.

Queries and keys have features without positions, and rotary features; the rotary features of a key are equal for all
heads. Values have a size of their own. Shape suffixes: B rows, T tokens, D features, H heads, N features of a head
without positions, P rotary features, K = N + P, V features of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipefit.model.families.common import RMSNorm, apply_rotary
from pipefit.model.families.decoder.attention import make_scores
from pipefit.model.families.decoder.options import DecoderOptions


class LatentAttention(nn.Module):
    """Attention whose keys and values, and queries by options, come from short vectors."""

    def __init__(self, options: DecoderOptions, layer: int) -> None:
        super().__init__()
        latent, heads, hidden = options.latent, options.heads, options.hidden_size
        assert latent is not None
        queries = heads * (latent.plain_size + latent.rotary_size)
        bias = options.qkv_bias
        self.q_proj = None if latent.query_rank else nn.Linear(hidden, queries, bias=False)
        self.q_a_proj = nn.Linear(hidden, latent.query_rank, bias=bias) if latent.query_rank else None
        self.q_a_layernorm = RMSNorm(latent.query_rank, latent.eps) if latent.query_rank else None
        self.q_b_proj = nn.Linear(latent.query_rank, queries, bias=False) if latent.query_rank else None
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent.rank + latent.rotary_size, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent.rank, latent.eps)
        self.kv_b_proj = nn.Linear(latent.rank, heads * (latent.plain_size + latent.value_size), bias=False)
        self.o_proj = nn.Linear(heads * latent.value_size, hidden, bias=options.output_bias)
        self.attention = make_scores(options, layer)
        self.heads, self.rank, self.plain_size = heads, latent.rank, latent.plain_size
        self.rotary = options.rotary[layer]

    def forward(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        q_BTHK = self._project_queries(x_BTD).unflatten(-1, (self.heads, -1))
        short = self.kv_a_proj_with_mqa(x_BTD)
        kv_BTHX = self.kv_b_proj(self.kv_a_layernorm(short[..., : self.rank])).unflatten(-1, (self.heads, -1))
        k_BTHN, v_BTHV = kv_BTHX[..., : self.plain_size], kv_BTHX[..., self.plain_size :]
        q_BTHN, q_BTHP = q_BTHK[..., : self.plain_size], q_BTHK[..., self.plain_size :]
        k_BT1P = short[..., self.rank :].unsqueeze(2)
        assert self.rotary is not None
        q_BTHP, k_BT1P = (apply_rotary(t, positions_BT, self.rotary) for t in (q_BTHP, k_BT1P))
        q_BTHK = torch.cat((q_BTHN, q_BTHP), dim=-1)
        k_BTHK = torch.cat((k_BTHN, k_BT1P.expand(-1, -1, self.heads, -1)), dim=-1)
        return self.o_proj(self.attention(q_BTHK, k_BTHK, v_BTHV).flatten(-2))

    def _project_queries(self, x_BTD: Tensor) -> Tensor:
        if self.q_proj is not None:
            return self.q_proj(x_BTD)
        assert self.q_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
