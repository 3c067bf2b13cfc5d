"""Regions that are run again in the backward, at their edges: of constants alone, and of no elements."""

from __future__ import annotations

import pytest
import torch
from tests.support.whole_models import OTHERS, count_of_labels, random_inputs
from tests.support.whole_runs import compare, feed_of, reference, run_whole
from torch.nn import functional

from pipefit.model.capture.whole import capture_whole
from pipefit.run.autograd.regions import recall_outputs, run_region

ROWS = 3


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_model_with_regions_of_constants_alone_is_run_again(recompute):
    """The rotary tables of a whole Llama are made of constants."""
    torch.manual_seed(1)
    example = OTHERS["llama"]()
    model, inputs = capture_whole(example), random_inputs(example, ROWS, seed=2)
    wanted = reference(example, inputs)
    state = {name: parameter.detach().clone() for name, parameter in example.module.named_parameters()}
    divisor = count_of_labels(example, inputs)
    for mode in ("B", "IW"):
        feed = feed_of(model, inputs)
        compare(run_whole(None, 0, model, (), (), state, feed, divisor, mode, recompute), wanted)


def test_what_is_saved_of_no_elements_is_not_taken_for_a_regions_result():
    """A device without rows: its indices and a region's result have one address, that of nothing."""
    x = torch.randn(0, 3, dtype=torch.float64, requires_grad=True)
    recipe, (y,) = run_region(lambda a: (a.sin(),), (x,), {})
    table = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    with recall_outputs((y, recipe, 0)):
        found = functional.embedding(torch.zeros(0, dtype=torch.int64), table) * y
    found.sum().backward()
    assert table.grad is not None and not table.grad.any()
    assert x.grad is not None and x.grad.shape == x.shape
