"""Repeated blocks: an export of the different ones gives the layers of an export of all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.tiny_configs import tiny_config
from pipefit.model.any_class import FIELDS, TOKENS, library_example
from pipefit.model.capture import whole
from pipefit.model.capture.repeated_blocks import find_blocks
from pipefit.model.capture.whole import capture_whole
from pipefit.model.example import Example

DEPTH = 7


def deep_example(kind):
    fields = tiny_config(kind, dropout=False)
    fields["n_layers" if kind == "mpt" else "num_hidden_layers"] = DEPTH
    if "layer_types" in fields:
        fields["layer_types"] = (fields["layer_types"] * DEPTH)[:DEPTH]
    return library_example({"source": kind, FIELDS: fields, TOKENS: 12})


@pytest.mark.parametrize(("kind", "prefix"), [("stablelm", 2), ("mpt", 2), ("olmo3", 4), ("afmoe", 5)])
def test_a_prefix_gives_the_layers_of_all_blocks(kind, prefix, monkeypatch):
    """Equal blocks; ALiBi; two kinds in turn; a dense layer before two kinds in turn."""
    example = deep_example(kind)
    assert find_blocks(example.module).prefix == prefix
    short = capture_whole(example, kind)
    monkeypatch.setattr(whole, "find_blocks", lambda module: None)
    assert capture_whole(example, kind) == short
    assert len(short.layers) == DEPTH + 2


class ScaledBlock(nn.Module):
    """A block that divides by its number, which is no setting that counts."""

    def __init__(self, layer_idx, scaled):
        super().__init__()
        self.layer_idx, self.scaled = layer_idx, scaled
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).tanh() / (self.layer_idx + 1 if self.scaled else 1)


class Stack(nn.Module):
    def __init__(self, scaled):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([ScaledBlock(index, scaled) for index in range(5)])
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().sum()


@pytest.mark.parametrize("scaled", [False, True])
def test_blocks_whose_number_matters_are_all_exported(scaled):
    model = capture_whole(Example(module=Stack(scaled), inputs={"x": torch.randn(3, 8)}))
    graphs = {layer.name: layer.graph for layer in model.layers}
    assert len({graphs[f"blocks.{index}"] for index in range(1, 5)}) == (4 if scaled else 1)


def test_a_module_without_equal_blocks_has_no_prefix():
    stack = Stack(False)
    stack.blocks = stack.blocks[:2]
    assert find_blocks(stack) is None
    assert find_blocks(nn.Linear(3, 3)) is None
    stack = Stack(False)
    for index, block in enumerate(stack.blocks):
        block.scaled = index % 5
    assert find_blocks(stack) is None
