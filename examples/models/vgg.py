"""VGG19 (Simonyan and Zisserman, 2014, configuration E) on 32 x 32 images, as its user would write it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from pipefit.model.example import Example

CHANNELS = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, 256, "pool", 512, 512, 512, 512, "pool",
            512, 512, 512, 512, "pool")  # fmt: skip


class VGG(nn.Module):
    """`width` scales the channels, `hidden` the fully connected layers; the classifier sees 7 x 7 positions."""

    def __init__(self, classes: int, width: float = 1.0, hidden: int = 4096, dropout: float = 0.5) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for one in CHANNELS:
            if isinstance(one, str):
                layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
                continue
            channels = int(one * width)
            layers += [nn.Conv2d(before, channels, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
            before = channels
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(before * 7 * 7, hidden),
            nn.ReLU(True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(images))
        return self.classifier(torch.flatten(x, 1))


def example(module: nn.Module, classes: int, size: int = 32) -> Example:
    """The module with its loss, and inputs that show their shapes."""
    inputs = {"images": torch.zeros(2, 3, size, size), "labels": torch.zeros(2, dtype=torch.int64)}
    return Example(module=module, inputs=inputs, loss=functional.cross_entropy)


def vgg19() -> Example:
    """143 million parameters, most of them in three linear layers."""
    return example(VGG(10), 10)
