"""Repeated blocks: an export of the different ones gives the layers of an export of all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.models.tiny_configs import tiny_config
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


@pytest.mark.parametrize(
    ("kind", "prefix"), [("stablelm", 2), ("mpt", 2), ("olmo3", 4), ("afmoe", 5), ("llama4_text", 6)]
)
def test_a_prefix_gives_the_layers_of_all_blocks(kind, prefix, monkeypatch):
    """Equal blocks; ALiBi; two kinds in turn; a dense layer before two kinds in turn; a list of all numbers."""
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


class ThirdBlock(ScaledBlock):
    """Every third block does not add its input."""

    def forward(self, x):
        change = self.linear(x).tanh()
        return change if self.layer_idx % 3 == 2 else x + change


class InheritedBlock(ThirdBlock):
    """The number is read by a method of the class above."""


class PrivateBlock(nn.Module):
    """A setting under a private name."""

    def __init__(self, index):
        super().__init__()
        self._adds = index % 3 != 2
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x) if self._adds else self.linear(x)


class CountingBlock(nn.Module):
    """The number of calls is no setting of a block."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        CountingBlock.calls += 1
        return self.linear(x) + x / CountingBlock.calls


class LoopStack(Stack):
    """The loop adds something after the third block."""

    def __init__(self, scaled):
        super().__init__(scaled)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])

    def forward(self, x):
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x) + 1 if index == 3 else block(x)
        return self.head(x).square().sum()


@pytest.mark.parametrize("cls", [ThirdBlock, InheritedBlock, None])
def test_a_number_that_matters_beyond_the_prefix_is_seen(cls):
    stack = Stack(False) if cls else LoopStack(False)
    if cls:
        stack.blocks = nn.ModuleList([cls(index, False) for index in range(5)])
    assert find_blocks(stack) is None


def test_private_settings_tell_blocks_apart():
    stack = Stack(False)
    stack.blocks = nn.ModuleList([PrivateBlock(index) for index in range(5)])
    assert find_blocks(stack).alike == (0, 0, 2, 0, 0)


def test_entries_of_the_configuration_tell_blocks_apart():
    stack = Stack(False)
    stack.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
    stack.config = SimpleNamespace(sizes=[1, 1, 1, 1, 2])
    assert find_blocks(stack) is None
    stack.config.sizes = [1] * 5
    assert find_blocks(stack).prefix == 2


def test_equal_blocks_with_different_graphs_are_all_exported():
    stack = Stack(False)
    stack.blocks = nn.ModuleList([CountingBlock() for _ in range(5)])
    assert find_blocks(stack).prefix == 2
    model = capture_whole(Example(module=stack, inputs={"x": torch.randn(3, 8)}))
    graphs = {layer.name: layer.graph for layer in model.layers}
    assert len({graphs[f"blocks.{index}"] for index in range(5)}) == 5


def test_rotary_bases_by_layer_are_those_of_all_blocks(monkeypatch):
    """The loop of Granite with windows selects rotary tables by a list of the configuration."""
    fields = {**tiny_config("granite_swa", dropout=False), "num_hidden_layers": 6}
    fields |= {"layer_types": ["sliding_attention"] * 6, "layer_rope_theta": [1e4] * 4 + [5e5] * 2}
    example = library_example({"source": "granite_swa", FIELDS: fields, TOKENS: 12})
    assert find_blocks(example.module) is None or find_blocks(example.module).alike[4] == 4
    short = capture_whole(example, "x")
    monkeypatch.setattr(whole, "find_blocks", lambda module: None)
    assert capture_whole(example, "x") == short


def test_a_module_without_equal_blocks_has_no_prefix():
    stack = Stack(False)
    stack.blocks = stack.blocks[:2]
    assert find_blocks(stack) is None
    assert find_blocks(nn.Linear(3, 3)) is None
    stack = Stack(False)
    for index, block in enumerate(stack.blocks):
        block.scaled = index % 5
    assert find_blocks(stack) is None
