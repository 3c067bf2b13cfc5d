"""Reductions beside the last backward: closed forms, the simulator, and the runtime's bucket size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.plan_toys import toy_model

from pipefit.cluster import Cluster, parse_spec
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.pipeline.overlap import BUCKET_BYTES, bucket_finish_times, hidden_s
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.bounds.step_bounds import table_bound_s
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.schedule import ScheduleProblem, find_family, linear_placement, lower_schedule, uniform_costs
from pipefit.simulate import simulate_schedule


def test_buckets_fill_from_the_last_layer() -> None:
    layers = [(10.0, 1.0), (10.0, 2.0), (0.0, 4.0), (25.0, 3.0)]
    assert bucket_finish_times(layers, 30.0) == [(25.0, 3.0), (20.0, 10.0)]
    assert bucket_finish_times(layers, 1.0) == [(25.0, 3.0), (10.0, 9.0), (10.0, 10.0)]
    assert bucket_finish_times([(0.0, 1.0)], 30.0) == []


@pytest.mark.parametrize(
    ("reduce_s", "hidden"),
    [
        (4.0, 3.0),  # links faster than the backward: only the last of four buckets remains
        (8.0, 3 * 2.0),  # still: each bucket takes two, as long as a layer of the backward
        (40.0, 6.0),  # slower: busy from the first bucket on, and the backward takes 6 after it
        (0.0, 0.0),
    ],
)
def test_four_equal_buckets(reduce_s: float, hidden: float) -> None:
    """n buckets of r each beside layers of t each: min((n - 1) r, (n - 1) t) is hidden."""
    assert hidden_s(reduce_s, [(10.0, 2.0)] * 4, 10.0) == pytest.approx(hidden)
    assert hidden_s(reduce_s, [(10.0, 2.0)] * 4, 1000.0) == 0.0, "one bucket waits for all layers"


def test_the_simulator_starts_with_what_is_left_and_asks_whether_the_last_backward_is_w() -> None:
    costs = uniform_costs(linear_placement(2), forward_s=1, input_s=1, weight_s=1)
    costs.reduce_s[:] = (4.0, 7.0)
    hidden = {"B": np.array([2.0, 3.0]), "W": np.array([1.0, 1.5])}
    for name, way in (("1f1b", "B"), ("zb-h1", "W")):
        computed = find_family(name)(ScheduleProblem(placement=linear_placement(2), microbatches=2))
        timeline = simulate_schedule(lower_schedule(computed, costs=costs), replace(costs, reduce_hidden_s=hidden))
        last = [
            max(span.stop_s for span in timeline.all_spans() if span.lane == lane and span.action.kind in ("B", "W"))
            for lane in range(2)
        ]
        left = costs.reduce_s - hidden[way]
        assert timeline.makespan_s == max(last[0] + left[0], last[1] + left[1])


def cluster(overlap: float) -> Cluster:
    found = parse_spec("4xA100-80")
    kinds = {name: replace(kind, overlap=overlap) for name, kind in found.kinds.items()}
    links = {name: replace(link, bandwidth_bytes_per_s=1e6) for name, link in found.links.items()}
    return replace(found, kinds=kinds, links=links)


def test_a_plan_hides_what_the_closed_form_says_times_the_share_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pipefit.cost.pipeline.overlap.bucket_finish_times", lambda layers, size: bucket_finish_times(layers, 1.0)
    )
    model, job = toy_model(4), Job(batch=8, sequence=4096)
    decisions = ParallelConfig(stages=1, replicas=(1, 1), microbatches=1)
    plan = build_plan(model, cluster(0.5), job, decisions)
    costs = simulate_plan(plan, model, cluster(0.5)).costs
    none = simulate_plan(plan, model, cluster(0.0))
    assert none.costs.reduce_hidden_s["B"].tolist() == [0.0]
    context = PlannerContext(model, cluster(0.5))
    kind, shape = context.network.kinds[0], MicrobatchShape(4, 4096, 0, 4096)
    queries = [LayerQuery(model.layer_graph(layer), shape, kind, "float32") for layer in model.layers]
    layer_costs = [context.layers.layer_cost(query) for query in queries]
    sizes = [4.0 * sum(p.shape[0] * p.shape[1] for p in model.layer_graph(layer).parameters) for layer in model.layers]
    seconds = [cost.input_s + cost.weight_s for cost in layer_costs]
    expected = 0.5 * hidden_s(float(costs.reduce_s[0]), list(zip(sizes, seconds, strict=True)), 1.0)
    assert expected > 0
    assert costs.reduce_hidden_s["B"][0] == pytest.approx(expected)
    faster = simulate_plan(plan, model, cluster(0.5)).timeline.makespan_s
    assert none.timeline.makespan_s - faster == pytest.approx(expected)
    assert table_bound_s(costs, (0,), 1, "1f1b") <= faster * (1 + 1e-12)


def test_buckets_are_as_large_as_the_runtime_makes_them() -> None:
    from pipefit.run.worker.build import BUCKET_BYTES as USED

    assert BUCKET_BYTES == USED
