"""The grouped products that CUDA uses for experts, tried on the CPU against the loop over experts."""

from __future__ import annotations

import pytest
import torch

from pipefit.run.ops import moe

functional = torch.nn.functional
pytestmark = pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="this PyTorch has no grouped_mm")


@pytest.mark.parametrize(
    "form", [moe.USUAL_FORM, moe.WeightForm(True), moe.WeightForm(True, 24), moe.WeightForm(False, 24)]
)
def test_grouped_products_equal_the_loop(form):
    torch.manual_seed(0)
    stops = [5, 5, 9, 16]
    x = torch.randn(16, 8, dtype=torch.bfloat16)
    dy = torch.randn(16, 24, dtype=torch.bfloat16)
    stored = {(False, 0): (4, 24, 8), (True, 0): (4, 8, 24), (False, 24): (96, 8), (True, 24): (96, 8)}[form]
    if form == (True, 24):
        x, dy = dy, x
    weight = torch.randn(stored, dtype=torch.bfloat16)
    ends = torch.tensor(stops, dtype=torch.int32)
    assert torch.allclose(
        moe.expert_product(x, form.stack_matrices(weight).transpose(1, 2), ends).float(),
        moe.expert_product(x, form.stack_matrices(weight).transpose(1, 2), stops).float(),
        rtol=0.02, atol=0.05,
    )  # fmt: skip
    sums = []
    for where in (ends, stops):
        parameter = torch.nn.Parameter(weight.clone())
        parameter.main_grad = torch.zeros(weight.shape)
        moe.accumulate_experts(parameter, where, x, dy, form)
        sums.append(parameter.main_grad)
    assert torch.allclose(sums[0], sums[1], rtol=0.02, atol=0.05)
    assert not form.split_experts(sums[0])[1].any(), "an expert without tokens got a gradient"
