"""A BERT whose MLPs are mixtures of experts with top-2 gating and a capacity (GShard: Lepikhin et al., 2020).

Tokens choose within their row: each expert takes so many tokens of a row, those behind that are dropped. Dispatch and
combine are products with one-hot tensors, written with einsum as in GShard (b rows, s tokens, e experts, c places of an
expert, d features, h hidden features).
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from pipefit.model.example import Example


class Experts(nn.Module):
    def __init__(self, width: int, hidden: int, experts: int, capacity: float) -> None:
        super().__init__()
        self.capacity = capacity
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.02)

    def places(self, chosen: torch.Tensor, taken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(b, s, e) one-hot choices -> (the place of each token with its expert, how many each expert has now)."""
        place = torch.cumsum(chosen, 1) - chosen + taken
        return (place * chosen).sum(-1), taken + chosen.sum(1, keepdim=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts, tokens = self.gate.out_features, x.shape[1]
        most = max(1, math.ceil(2 * self.capacity * tokens / experts))
        weights = torch.softmax(self.gate(x), -1)
        best, index = torch.topk(weights, 2, -1)
        best = best / best.sum(-1, keepdim=True)
        combine: torch.Tensor | float = 0.0
        taken: torch.Tensor | float = 0.0
        for choice in range(2):
            chosen = functional.one_hot(index[..., choice], experts).to(x.dtype)
            place, taken = self.places(chosen, taken)
            spot = (place.unsqueeze(-1) == torch.arange(most, device=x.device)).to(x.dtype)
            combine = combine + torch.einsum("bse,bsc->bsec", chosen * best[..., choice, None], spot)
        dispatch = (combine > 0).to(x.dtype)
        inner = torch.einsum("bsd,bsec->becd", x, dispatch)
        inner = functional.gelu(torch.einsum("becd,edh->bech", inner, self.up))
        inner = torch.einsum("bech,ehd->becd", inner, self.down)
        return torch.einsum("becd,bsec->bsd", inner, combine)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.mlp = nn.Linear(width, width), mlp
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        shape = (rows, tokens, self.heads, width // self.heads)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, width)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.mlp(x))


class BertMoe(nn.Module):
    """Every second layer has experts."""

    def __init__(
        self, vocabulary: int, tokens: int, width: int, heads: int, depth: int, experts: int, capacity: float = 1.25
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        plain = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        ]
        self.layers = nn.ModuleList(
            Layer(width, heads, Experts(width, 4 * width, experts, capacity) if place % 2 else mlp)
            for place, mlp in enumerate(plain)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.words(input_ids) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def example(module: nn.Module, tokens: int) -> Example:
    """The module, and inputs that show their shapes."""
    ids = torch.zeros(2, tokens, dtype=torch.int64)
    return Example(module=module, inputs={"input_ids": ids, "labels": ids})


def bert_moe(experts: int = 128) -> Example:
    """12 layers of width 768, six of them with experts: two for each of 64 devices."""
    return example(BertMoe(30522, 128, 768, 12, 12, experts), 128)
