"""Losses of users' models: each is the sum that it is the mean of, divided by what it was the mean over."""

from __future__ import annotations

import pytest
import torch
from tests.support.whole_runs import compare, feed_of, reference, run_whole
from torch import Tensor, nn
from torch.nn import functional

from pipefit.errors import ModelError
from pipefit.model.capture.counted import loss_divisor
from pipefit.model.capture.whole import capture_whole
from pipefit.model.example import Example
from pipefit.plan.request.sequence_length import fixed_length
from pipefit.run.inputs.label_count import LabelCount
from pipefit.shard.apart import check_row_independence


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.inner(x))


def custom(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target).abs() + 0.1 * y**2).mean()


def weighted_rows(y: Tensor, target: Tensor) -> Tensor:
    return (0.5 * (y - target) ** 2).sum(1).mean()


LOSSES = {
    "mse": functional.mse_loss,
    "half of mse": lambda y, target: 0.5 * functional.mse_loss(y, target),
    "l1": functional.l1_loss,
    "smooth l1": functional.smooth_l1_loss,
    "huber": functional.huber_loss,
    "bce": functional.binary_cross_entropy,
    "bce with logits": functional.binary_cross_entropy_with_logits,
    "kl": functional.kl_div,
    "own": custom,
    "own, of rows": weighted_rows,
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_of_a_function_of_each_element(name):
    torch.manual_seed(1)
    example = Example(module=Net(), inputs={"x": torch.zeros(2, 4), "labels": torch.zeros(2, 5)}, loss=LOSSES[name])
    model = capture_whole(example)
    check_row_independence(model)
    inputs = {"x": torch.randn(6, 4, dtype=torch.float64), "labels": torch.rand(6, 5, dtype=torch.float64)}
    wanted = reference(example, inputs)
    state = {name: parameter.detach() for name, parameter in example.module.named_parameters()}
    divisor = loss_divisor(model).per_row * 6
    compare(run_whole(None, 0, model, (), (), state, feed_of(model, inputs), divisor), wanted)


def test_labels_are_counted_as_the_model_sees_them():
    from tests.support.whole_models import OTHERS

    model = capture_whole(OTHERS["llama"]())  # looks one token ahead by itself: the first label never counts
    labels = torch.zeros(3, 11, dtype=torch.int64)
    labels[0, :2] = -100
    labels[2, 10] = -100
    feed = feed_of(model, {"input_ids": labels.clamp(min=0), "labels": labels})
    how = loss_divisor(model)
    assert how.per_row == 0
    assert LabelCount(how)(feed) == 3 * 10 - 1 - 1
    assert fixed_length(model) == 11


REFUSED = {
    "smoothed": (
        lambda y, t: functional.cross_entropy(y, t, label_smoothing=0.1),
        ["not a sum over rows", "smoothing"],
    ),
    "two means": (lambda y, t: functional.cross_entropy(y, t) + y.mean(), ["combines means", "2 mean(s)", "Loss"]),
    "root": (lambda y, t: functional.cross_entropy(y, t).sqrt(), ["combines means"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_cannot_be_split_is_refused(name):
    loss, words = REFUSED[name]
    inputs = {"x": torch.zeros(2, 4), "labels": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ModelError) as refused:
        capture_whole(Example(module=Net(), inputs=inputs, loss=loss))
    assert all(word in refused.value.full_text() for word in words), refused.value.full_text()


class Normed(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["changes the buffer norm.running_mean", "BatchNorm1d", "GroupNorm"]),
        (
            {"track_running_stats": False},
            ["Batch norm computes statistics over rows", "model.norm (BatchNorm1d)", "GroupNorm"],
        ),
    ],
)
def test_batch_norm_is_refused_by_name(options, words):
    inputs = {"x": torch.zeros(2, 4), "labels": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ModelError) as refused:
        capture_whole(Example(module=Normed(**options), inputs=inputs, loss=functional.cross_entropy))
    assert all(word in refused.value.full_text() for word in words), refused.value.full_text()


def test_running_statistics_of_an_instance_norm_are_refused_by_name():
    inputs = {"input": torch.zeros(2, 3, 4), "labels": torch.zeros(2, 4, dtype=torch.int64)}
    with pytest.raises(ModelError, match=r"Instance norm keeps running statistics(.|\n)*track_running_stats=False"):
        norm = nn.InstanceNorm1d(3, track_running_stats=True)
        capture_whole(Example(module=norm, inputs=inputs, loss=functional.cross_entropy))
