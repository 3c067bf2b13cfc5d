"""Whole models, captured unmodified: the stage of one device gives the loss and the gradients of the user's module."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.support.whole_models import HAP, OTHERS, count_of_labels, random_inputs
from tests.support.whole_runs import compare, feed_of, reference, run_whole

from pipefit.model.capture.whole import UnknownOperatorWarning, capture_whole


@pytest.mark.parametrize("name", [*HAP, *OTHERS])
def test_a_captured_model_is_the_users_model(name):
    torch.manual_seed(1)
    example = {**HAP, **OTHERS}[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnknownOperatorWarning)
        model = capture_whole(example)
    inputs = random_inputs(example, 5)
    wanted = reference(example, inputs)
    state = {n: p.detach() for n, p in example.module.named_parameters()}
    divisor = count_of_labels(example, inputs)
    feed = feed_of(model, inputs)
    for mode in ("B", "IW"):
        compare(run_whole(None, 0, model, (), (), state, feed, divisor, mode), wanted)
