"""The order of messages on a directed pair decides what is computed: receives deferred under a V give wrong gradients.

Under a V two neighbours exchange forward and backward tensors of one shape in the same direction. Where messages have
no tags (NCCL, and here gloo with a communicator for every directed pair), the n-th receive gets the n-th message,
whatever it is. The plan's check refuses such an order; a run that goes past the check shows what it saves us from.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans
from tests.support.blocking_lanes import deferred

from pipefit.errors import DeadlockError
from pipefit.plan.check.rules import check_plan
from pipefit.plan.types import Plan
from pipefit.schedule import FAMILIES, format_lanes

pytestmark = pytest.mark.gloo

DEVICES, MICROBATCHES = 3, 8


def plan_of(family: str) -> Plan:
    """Stages of one layer, the last one with head and loss: all that crosses has one shape."""
    placement = FAMILIES[family].placement(DEVICES)
    cuts = tuple(range(1, len(placement)))
    return plans.plan("llama", cuts=cuts, placement=placement, schedule=family, microbatches=MICROBATCHES)


def largest_error(pool, plan: Plan, tagged: bool) -> float:
    """Of all gradients, as a share of each one's largest entry in one process."""
    pool.run(cases.prepare, [(plan, plans.model("llama"))], tagged, ranks=pool.size)
    found = pool.run(cases.run_steps, plan, plans.model("llama"), plans.VOCABULARY, 1, tagged, ranks=DEVICES)[0]
    _, gradients = plans.reference("llama", plans.JOB)
    errors = []
    for name, gradient in gradients.items():
        wanted = gradient.numpy()
        errors.append(float(np.abs(found["gradients"][name] - wanted).max() / np.abs(wanted).max()))
    return max(errors)


@pytest.mark.parametrize("family", ["v-half", "zb-v"])
def test_deferred_receives_are_refused_and_would_be_wrong(gloo_pool, family: str) -> None:
    made = plan_of(family)
    check_plan(made)
    mixed_up = replace(made, order=replace(made.order, lanes=format_lanes(deferred(made.order.to_schedule()).lanes)))
    with pytest.raises(DeadlockError, match="one first-in first-out order per directed pair") as caught:
        check_plan(mixed_up)
    assert "disagree at message" in caught.value.full_text()
    assert largest_error(gloo_pool, made, tagged=False) <= 1e-10
    assert largest_error(gloo_pool, mixed_up, tagged=False) > 1e-2, "the wrong tensors, and no error"
    assert largest_error(gloo_pool, mixed_up, tagged=True) <= 1e-10, "a tag for every edge and direction"
