"""Models that bring rows together are refused: they would be other models in every microbatch."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.support.whole_models import bert_moe, vgg
from torch import nn

from pipefit.errors import PlanError
from pipefit.model.capture.layers import capture_layers
from pipefit.model.capture.whole import capture_whole
from pipefit.model.example import Example
from pipefit.model.registry import open_model
from pipefit.shard.apart import check_row_independence, row_problems

ROWS, TOKENS, WIDTH = 4, 3, 6


class Model(nn.Module):
    def __init__(self, ending) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.mixing = nn.MultiheadAttention(WIDTH, 2)
        self.ending = ending

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ending(self.layer(x), self)


def captured(ending):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture_whole(Example(module=Model(ending), inputs={"x": torch.zeros(ROWS, TOKENS, WIDTH)}))


def tokens_first(y, model):
    y = y.transpose(0, 1)
    return model.mixing(y, y, y)[0].square().sum()


APART = {
    "sum": lambda y, _: y.square().sum(),
    "tokens first": tokens_first,
    "all in one dimension": lambda y, _: y.reshape(-1, WIDTH).softmax(-1).reshape(y.shape[0], -1).square().sum() * 0.5,
    "products within a row": lambda y, _: torch.bmm(y, y.transpose(1, 2)).square().sum(),
    "sum of two sums": lambda y, _: y.sum() - y.square().sum(),
    "a number for each row": lambda y, _: (y.new_full((y.shape[0], TOKENS, 1), 3.0) * y).sum(),
    "unknown function": lambda y, _: y.roll(1, 1).square().sum(),
    "places within a row": lambda y, _: y.gather(2, y.argsort()).tril().square().sum(),
    "a table by rows": lambda y, model: model.layer.weight[(y[:, 0, 0] > 0).to(torch.int64)].square().sum(),
}

TOGETHER = {
    "center": (lambda y, _: (y - y.mean(0)).square().sum(), "mean.dim that mixes rows"),
    "contrast": (lambda y, _: (y.flatten(1) @ y.flatten(1).T).exp().sum(), "matmul that mixes rows"),
    "softmax": (lambda y, _: (y.softmax(0) * y).sum(), "softmax that mixes rows"),
    "running": (lambda y, _: y.cumsum(0).square().sum(), "cumsum.default that mixes rows"),
    "heads": (lambda y, _: y.transpose(0, 1).reshape(TOKENS, -1).softmax(-1).sum(), r"'6\*B'"),
    "square of a sum": (lambda y, _: y.sum(0).square().sum(), "of a sum over rows"),
    "root of a loss": (lambda y, _: y.square().sum().sqrt(), "of a sum over rows"),
    "loss and number": (lambda y, _: y.square().sum() + 5.0, "add of a sum over rows"),
    "own mean": (lambda y, _: y.square().sum() / y.shape[0], "with the number of rows"),
    "the row before": (lambda y, _: (y * y.roll(1, 0)).sum(), "roll.default that mixes rows"),
    "all places before": (lambda y, _: (y * y.roll(1)).sum(), "roll.default that mixes rows"),
    "rows by number": (lambda y, _: (y * y[y[:, 0, 0].argsort()]).sum(), "argsort.default that mixes rows"),
    "the largest so far": (lambda y, _: y.cummax(0)[0].square().sum(), "cummax.default that mixes rows"),
    "rows from a table": (
        lambda y, _: (y * y[(y[:, 0, 0] > 0).to(torch.int64)]).sum(),
        "index.Tensor that mixes rows",
    ),
    "rows added to rows": (
        lambda y, _: y.index_add(0, (y[:, 0, 0] > 0).to(torch.int64), y).square().sum(),
        "index_add.default that mixes",
    ),
    "groups of rows": (
        lambda y, _: torch.nn.functional.group_norm(y.transpose(0, 1), 1).exp().sum(),
        "group_norm.default that mixes",
    ),
    "first row": (lambda y, _: y[0].square().sum(), "does not have the rows in the same place"),
    "whole norm": (lambda y, _: (y / y.norm()).sum(), "does not have the rows in the same place"),
}


@pytest.mark.parametrize("name", APART)
def test_rows_apart_are_seen(name):
    check_row_independence(captured(APART[name]))


@pytest.mark.parametrize("name", TOGETHER)
def test_rows_together_are_refused(name):
    ending, seen = TOGETHER[name]
    model = captured(ending)
    torch.manual_seed(1)  # by chance rows are in order already
    values = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64)
    module = Model(ending).double()
    with torch.no_grad():
        halves = module(values[:2]) + module(values[2:])
        whole = module(values)
    assert (whole - halves).abs() > 1e-6, "this model could be run in microbatches"
    with pytest.raises(PlanError, match=rf"mixes rows(.|\n)*{seen}(.|\n)*docs/reference/models.md"):
        check_row_independence(model)


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2", "tiny-qwen3-moe"])
def test_families_keep_rows_apart(name):
    assert list(row_problems(open_model(name))) == []


def test_whole_models_keep_rows_apart():
    assert list(row_problems(capture_whole(vgg()))) == []
    assert list(row_problems(capture_whole(bert_moe()))) == []


class Competing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.softmax(0) * self.weight


def test_a_layer_that_brings_rows_together_is_named():
    model = capture_layers([Competing()], x_features=WIDTH)
    with pytest.raises(PlanError, match=r"where: layer layers.0, (.|\n)*softmax that mixes rows"):
        check_row_independence(model)
