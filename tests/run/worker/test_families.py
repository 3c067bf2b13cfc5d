"""Our worker runs every schedule family: loss and every gradient are those of one process, in float64.

Three processes; every family on its own placement, with whole sequences and with slices, with I and W apart where the
family splits backwards, and under recomputation.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans

from pipefit.plan.check.rules import check_plan
from pipefit.plan.types import Plan
from pipefit.schedule import FAMILIES

pytestmark = pytest.mark.gloo

DEVICES, MICROBATCHES = 3, 8

EXTRAS = {
    "plain": ("llama", {}),
    "slices": ("llama", {"slices": (5, 7)}),
    "tied, recomputed": ("tied", {"recompute": ("full",)}),
}


def plan_of(family: str, extra: str) -> Plan:
    """The planner's plan of that family on its own placement."""
    name, decisions = EXTRAS[extra]
    placement = FAMILIES[family].placement(DEVICES)
    return plans.plan(
        name,
        stages=len(placement),
        placement=() if len(placement) == DEVICES else placement,
        schedule=family,
        microbatches=MICROBATCHES,
        **decisions,
    )


@lru_cache
def reference(name: str):
    return plans.reference(name, plans.JOB)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_trains_as_one_process_does(gloo_pool, family: str, extra: str) -> None:
    made = plan_of(family, extra)
    check_plan(made)
    assert made.order.name == family
    name = EXTRAS[extra][0]
    arguments = (made, plans.model(name), plans.VOCABULARY)
    gloo_pool.run(cases.prepare, [(made, plans.model(name))], ranks=gloo_pool.size)
    found = gloo_pool.run(cases.run_steps, *arguments, ranks=DEVICES)[0]
    loss, gradients = reference(name)
    assert found["steps"][0][0] == pytest.approx(loss, rel=1e-12)
    assert set(found["gradients"]) == set(gradients)
    for parameter, gradient in gradients.items():
        wanted = gradient.numpy()
        error = np.abs(found["gradients"][parameter] - wanted).max()
        assert error <= 1e-10 * np.abs(wanted).max(), f"{parameter}: {error / np.abs(wanted).max():.3g}"
