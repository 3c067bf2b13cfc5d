"""Users' models of one layer each that keeps sequences from being cut into slices, and two whose layers do not."""

from __future__ import annotations

import torch
from tests.support.opaque_model import Branching, Embed, Head, Loss
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    causal, dropout = False, 0.0
    output_features = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        rows, tokens, _ = x.shape
        return [y.view(rows, tokens, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        o = functional.scaled_dot_product_attention(*self.heads(x), dropout_p=self.dropout, is_causal=self.causal)
        return x + o.transpose(1, 2).reshape(x.shape)


class DroppedAttention(Attention):
    causal, dropout = True, 0.1


class Products(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        o = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return x + o.transpose(1, 2).reshape(x.shape)


class Dropped(Branching):
    tokenwise = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))


class Convolved(Branching):
    tokenwise = True

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)


class Normed(Branching):
    tokenwise = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


class Tokenwise(nn.Module):
    """Not captured, as it loops over data; but every token by itself."""

    output_features = WIDTH
    tokenwise = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        for _ in range(int(y.detach().abs().max() > 0)):
            y = torch.tanh(y)
        return x + y


def around(layer: nn.Module) -> list[nn.Module]:
    return [Embed(), layer, Head(), Loss()]


def bidirectional() -> list[nn.Module]:
    return around(Attention())


def dropped_attention() -> list[nn.Module]:
    return around(DroppedAttention())


def products() -> list[nn.Module]:
    return around(Products())


def undeclared() -> list[nn.Module]:
    return around(Branching())


def dropped() -> list[nn.Module]:
    return around(Dropped())


def convolved() -> list[nn.Module]:
    return around(Convolved())


def normed() -> list[nn.Module]:
    return around(Normed())


def tokenwise() -> list[nn.Module]:
    return around(Tokenwise())
