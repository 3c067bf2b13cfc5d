"""A user's model with a layer that cannot be captured: it branches on its data."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Branching(nn.Module):
    output_features = 16

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("scale", torch.full((16,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if float(y.detach().sum()) > 0:  # no graph can say this
            return x + torch.tanh(y) * self.scale.to(x.dtype)
        return x - torch.sin(y) * self.scale.to(x.dtype)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


class Loss(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def layers() -> list[nn.Module]:
    return [Embed(), Branching(), Branching(), Head(), Loss()]
