"""Our worker runs fitted orders: made for a memory limit, some stages recomputing, on a V and on a chain of lanes.

Loss and every gradient are those of one process, in float64, as for the families (`test_families.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans

from pipefit.cluster import local_cluster
from pipefit.plan.check.rules import check_plan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.fitted_orders import fit_layout, tables_of
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Plan
from pipefit.schedule.problem import linear_placement, vee_placement

pytestmark = pytest.mark.gloo

DEVICES, MICROBATCHES = 3, 8


def fitted_plan(placement: tuple[int, ...], keep: float) -> Plan:
    """A plan with so much of the memory between recomputing everything and nothing."""
    context = PlannerContext(plans.model("llama"), local_cluster(DEVICES), name="llama")
    layout = ParallelConfig(stages=len(placement), placement=placement, microbatches=MICROBATCHES)
    layout = replace(layout, cuts=context.layer_cutter.leanest_cut(plans.JOB, layout).cuts)
    tables = tables_of(context, plans.JOB, layout, [("none",), ("full",)])
    ends = {one.decisions.recompute[0]: fit_layout(context, [one], moves=2000) for one in tables}
    none, full = ends["none"], ends["full"]
    assert none is not None and full is not None
    high, low = (max(map(float, one.simulation.timeline.peak_bytes)) for one in (none, full))
    limits = [low + keep * (high - low)] * DEVICES
    best = fit_layout(context, tables, limits, moves=2000)
    assert best is not None and max(best.simulation.timeline.peak_bytes) <= limits[0]
    made = context.assemble_plan(best.parts, best.decisions, best.simulation.timeline.schedule)
    check_plan(made)
    assert made.order.name == made.decisions["schedule"] == "fit"
    return made


@lru_cache
def reference():
    return plans.reference("llama", plans.JOB)


@pytest.mark.parametrize("keep", [0.4, 1.0])
@pytest.mark.parametrize("placement", [linear_placement(DEVICES), vee_placement(DEVICES)], ids=["linear", "v"])
def test_a_fitted_order_trains_as_one_process_does(gloo_pool, placement: tuple[int, ...], keep: float) -> None:
    made = fitted_plan(placement, keep)
    model = plans.model("llama")
    gloo_pool.run(cases.prepare, [(made, model)], ranks=gloo_pool.size)
    found = gloo_pool.run(cases.run_steps, made, model, plans.VOCABULARY, ranks=DEVICES)[0]
    loss, gradients = reference()
    assert found["steps"][0][0] == pytest.approx(loss, rel=1e-12)
    assert set(found["gradients"]) == set(gradients)
    for parameter, gradient in gradients.items():
        wanted = gradient.numpy()
        error = np.abs(found["gradients"][parameter] - wanted).max()
        assert error <= 1e-10 * np.abs(wanted).max(), f"{parameter}: {error / np.abs(wanted).max():.3g}"
