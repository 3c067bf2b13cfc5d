"""Your own module: any nn.Module, its loss, example inputs, and a data set with items by number.

pipefit plan --model examples/models/own_module.py:stripes --local 2 --batch 16 --fix stages=2 -o plan.json
pipefit train plan.json --steps 60 --lr 0.003 -o run
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from pipefit.model.example import Example


class Stripes(Dataset):
    """Images of stripes in noise: which of four directions? Item i is the same in every process."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        direction = index % 4
        down, right = ((1, 0), (0, 1), (1, 1), (1, -1))[direction]
        place = torch.arange(16.0)
        image = torch.sin(place[:, None] * down + place * right + index)
        noise = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(index))
        return image + 0.5 * noise, direction


def network() -> nn.Module:
    """Any module: it knows nothing of stages, replicas or shards."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4),
    )  # fmt: skip


def stripes() -> Example:
    """What `--model FILE.py:FUNCTION` takes."""
    inputs = {"input": torch.zeros(2, 1, 16, 16), "labels": torch.zeros(2, dtype=torch.int64)}
    return Example(module=network(), inputs=inputs, loss=functional.cross_entropy, dataset=Stripes())
