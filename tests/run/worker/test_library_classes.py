"""Classes of `transformers` without a family of pipefit, in two stages: training equals the class in one process.

Losses of two steps and all parameters afterwards are compared with plain PyTorch in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support import whole_cases
from tests.support import worker_cases as cases

from benchmarks.models.coverage import TOKENS, tiny_example

pytestmark = pytest.mark.gloo

STEPS = 2
TYPES = ("stablelm", "olmo3", "afmoe", "mpt")
"""Partial rotary positions; windows; experts with a shared one; ALiBi."""


@pytest.mark.parametrize("kind", TYPES)
def test_two_stages_train_like_the_class(gloo_pool, kind):
    example = tiny_example(kind, dropout=False)
    if hasattr(example.module, "set_experts_implementation"):
        example.module.set_experts_implementation("eager")
    torch.manual_seed(1)
    case = whole_cases.Whole(example, sequence=TOKENS)
    plan = case.plan(stages=2, microbatches=2)
    gloo_pool.run(cases.prepare, [(plan, case.model)], ranks=8)
    losses, parameters, _ = gloo_pool.run(whole_cases.train_whole, plan, *case.material, STEPS, ranks=2)[0]
    wanted_losses, wanted = case.reference(plan, STEPS)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-9)
    for name, value in parameters.items():
        bound = 1e-8 * np.abs(wanted[name]).max() + 1e-12  # some gradients are zero but for rounding
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=bound, err_msg=name)
