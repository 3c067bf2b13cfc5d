"""Where whole models are cut into layers: between blocks, with masks made again, and not where two values pass."""

from __future__ import annotations

import torch
from tests.support.whole_models import HAP, OTHERS, random_inputs
from tests.support.whole_runs import compare, feed_of, reference, run_whole
from torch import Tensor, nn
from torch.nn import functional

from pipefit.model.capture.whole import capture_whole, input_tensors
from pipefit.model.example import Example


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        y = torch.tanh(self.inner(self.norm(x))) * seen
        y = functional.dropout(self.outer(y), self.dropout, self.training)
        return x + functional.dropout(y, self.dropout, self.training)


class Masked(nn.Module):
    """Every block reads a mask that is made of an input; `again` times through the blocks, `skip` from front to end."""

    def __init__(self, again: int = 1, skip: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.again, self.skip = again, skip
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block(6, dropout) for _ in range(3))
        self.last = nn.Linear(6, 5)

    def forward(self, numbers: Tensor, mask: Tensor) -> Tensor:
        seen = (1.0 - mask.to(numbers.dtype)).unsqueeze(-1)
        x = first = self.first(numbers)
        for _ in range(self.again):
            for block in self.blocks:
                x = block(x, seen)
        return self.last(x + first if self.skip else x).mean(1)


def example(**options) -> Example:
    inputs = {
        "numbers": torch.zeros(2, 7, 4),
        "mask": torch.zeros(2, 7, dtype=torch.int64),
        "labels": torch.zeros(2, dtype=torch.int64),
    }
    return Example(module=Masked(**options), inputs=inputs, loss=functional.cross_entropy)


def layers_of(model) -> list[tuple[str, int]]:
    """(name, number of its graph) of every layer."""
    numbers = {key: number for number, key in enumerate(model.graphs)}
    return [(layer.name, numbers[layer.graph]) for layer in model.layers]


def inputs_of(model, place: int) -> dict[str, str]:
    return {tensor.name: tensor.role for tensor in model.layer_graph(model.layers[place]).inputs}


def test_equal_blocks_become_layers_of_one_graph_and_make_the_mask_again():
    model = capture_whole(example())
    assert layers_of(model) == [("first", 0), ("blocks.0", 1), ("blocks.1", 1), ("blocks.2", 1), ("last", 2)]
    assert inputs_of(model, 1) == {"x": "activation", "mask": "data"}
    assert inputs_of(model, 4) == {"x": "activation", "labels": "labels"}
    assert model.layers[2].parameters["inner.weight"] == "blocks.1.inner.weight"


def test_the_layers_of_the_models_of_the_examples():
    bert = layers_of(capture_whole(HAP["bert"]()))
    assert [name for name, _ in bert] == [
        "bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "cls.predictions.transform", "head",
    ]  # fmt: skip
    assert bert[1][1] == bert[2][1]
    moe = layers_of(capture_whole(HAP["bert_moe"]()))
    assert [name for name, _ in moe][1:] == ["layers.0", "layers.1", "head"]
    assert moe[1][1] != moe[2][1]
    llama = layers_of(capture_whole(OTHERS["llama"]()))
    assert llama[1:3] == [("model.layers.0", 1), ("model.layers.1", 1)]
    vgg = layers_of(capture_whole(HAP["vgg"]()))
    assert len(vgg) == 19
    assert len({graph for _, graph in vgg}) == 15


def test_a_layer_that_is_applied_again_is_another_layer_with_the_same_parameters():
    model = capture_whole(example(again=2))
    assert [name for name, _ in layers_of(model)][3:6] == ["blocks.2", "blocks.0#2", "blocks.1#2"]
    assert model.layers[1].parameters == model.layers[4].parameters
    assert model.layers[1].graph == model.layers[4].graph


def test_what_a_value_passes_by_stays_one_layer():
    model = capture_whole(example(skip=True))
    assert layers_of(model) == [("first", 0), ("blocks", 1), ("last", 2)]


def test_dropouts_are_numbered_within_their_layer():
    model = capture_whole(example(dropout=0.5))
    for place in (1, 2, 3):
        operators = model.layer_graph(model.layers[place]).operators
        assert [op.attributes["index"] for op in operators if op.kind == "dropout"] == [0, 1]


def test_layers_applied_again_add_up_their_gradients():
    torch.manual_seed(1)
    one = example(again=2)
    model, inputs = capture_whole(one), random_inputs(one, 5)
    inputs |= {"mask": inputs["mask"] % 2, "labels": inputs["labels"] % 5}
    wanted = reference(one, inputs)
    state = {name: parameter.detach() for name, parameter in one.module.named_parameters()}
    compare(run_whole(None, 0, model, (), (), state, feed_of(model, inputs), 5), wanted)


class Bare(nn.Module):
    def forward(self, numbers: Tensor) -> Tensor:
        return torch.tanh(numbers).square().sum()


def test_a_model_without_parameters_is_one_layer():
    assert layers_of(capture_whole(Example(module=Bare(), inputs={"numbers": torch.zeros(2, 3)}))) == [("model", 0)]


class Named(nn.Module):
    """Parameters called as inputs, hidden states and results are in graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        for name in ("x", "t0", "hidden", "labels", "linear_0", "tanh_0"):
            self.register_parameter(name, nn.Parameter(torch.rand(4) + 0.5))
        self.blocks = nn.ModuleList([Scaled(), Scaled()])
        self.last = nn.Linear(4, 5)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        y = torch.tanh(self.first(x * self.x + hidden)) * self.t0 + self.linear_0
        for block in self.blocks:
            y = block(y)
        return self.last(torch.tanh(y * self.hidden) * self.tanh_0 + self.labels)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.linear = nn.Parameter(torch.rand(4) + 0.5), nn.Linear(4, 4)

    def forward(self, y: Tensor) -> Tensor:
        return y + torch.tanh(self.linear(y * self.x))


def test_parameters_that_are_called_like_values_are_told_from_them():
    torch.manual_seed(1)
    inputs = {"x": torch.zeros(2, 4), "hidden": torch.zeros(2, 4), "labels": torch.zeros(2, dtype=torch.int64)}
    one = Example(module=Named(), inputs=inputs, loss=functional.cross_entropy)
    model = capture_whole(one)
    assert len(model.layers) > 3
    given = {name: torch.rand(5, 4, dtype=torch.float64) for name in ("x", "hidden")}
    given["labels"] = torch.arange(5)
    wanted = reference(one, given)
    state = {name: parameter.detach() for name, parameter in one.module.named_parameters()}
    feed = feed_of(model, {fed.name: given[name] for name, fed in input_tensors(one).items() if fed.role == "data"})
    feed.labels = given["labels"]
    compare(run_whole(None, 0, model, (), (), state, feed, 5), wanted)
