"""The memory of a lane under any cut, read off the order, against the simulator."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.cost.types import EdgeCost
from pipefit.plan.assemble.order import computed_schedule
from pipefit.plan.cutting.memory import CutMemory
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.schedule.families import FAMILIES
from pipefit.simulate import simulate_schedule

JOB = Job(batch=16, sequence=512, precision="bfloat16")


def weightless(edge: EdgeCost) -> EdgeCost:
    """The edge without the buffers of its messages."""
    names = [field.name for field in fields(edge) if field.name.endswith("_bytes")]
    return replace(edge, **{name: 0 * getattr(edge, name) for name in names})


@pytest.mark.parametrize("family", ["1f1b", "interleaved-1f1b", "zb-h1", "v-half", "zb-v"])
def test_peaks_are_those_of_the_simulator_without_its_buffers(family: str) -> None:
    context, seen = PlannerContext(toy_model(9), toy_cluster(1, 3)), set()
    placement = FAMILIES[family].placement(3)
    layers = len(context.only_module.layers)
    for seed in range(6):
        cuts = tuple(sorted(random.Random(seed).sample(range(1, layers), len(placement) - 1)))
        decisions = ParallelConfig(cuts=cuts, placement=placement, schedule=family, microbatches=12)
        parts = context.make_skeleton(JOB, decisions)
        costs = context.build_cost_table(parts)
        computed = computed_schedule(family, parts, costs)
        found = CutMemory(computed, context.layer_cutter.stage_rows(JOB, decisions)).lane_peaks((0, *cuts, layers))
        peaks = simulate_schedule(computed, replace(costs, edges=tuple(map(weightless, costs.edges)))).peak_bytes
        assert found == pytest.approx(peaks.tolist(), rel=1e-12)
        seen |= {*found}
    assert len(seen) > 6, "cuts differ in what lanes need"
