"""Sequences split over devices: work, collectives and memory by hand, in whole plans, and in a search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support import worker_plans as plans

from pipefit.cluster import parse_spec
from pipefit.cost.comm.collectives import all_gather_s, reduce_scatter_s
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.layer_query import MicrobatchShape
from pipefit.cost.compute.packed_rows import equivalent_rows
from pipefit.cost.memory.lanes import lane_parts
from pipefit.cost.pipeline.context_traffic import context_symbols
from pipefit.cost.pipeline.rings import context_rings, replica_rings
from pipefit.errors import ScheduleError
from pipefit.layout import zigzag_runs
from pipefit.model.analysis.saved import operator_call
from pipefit.model.ops.attention import computed_pairs
from pipefit.plan.assemble.predict import PlanSimulation, simulate_plan
from pipefit.plan.candidates.space import iter_candidates
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.show.traffic import step_traffic

MODEL = plans.model("llama")
CLUSTER = parse_spec("8xH100")
JOB = Job(batch=4, sequence=96, precision="bfloat16")
WIDTH, LAYERS = 2, 4
KEYS = 2 * 8  # groups x head dim of the model


def simulate(job: Job = JOB, **decisions: Any) -> PlanSimulation:
    plan = build_plan(MODEL, CLUSTER, job, ParallelConfig(**({"microbatches": 2} | decisions)))
    return simulate_plan(plan, MODEL, CLUSTER)


def pairs_on_device(length: int, parts: int, position: int, window: int | None) -> int:
    """Return the pairs that the kernels of one device compute: a triangle for each chunk, and all keys before it."""
    pairs = 0
    for start, stop in zigzag_runs(length, parts)[position]:
        size = stop - start
        pairs += size * (size + 1) // 2 if window is None or window >= size else size * size
        pairs += size * start if window != 1 else 0
    return pairs


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_every_device_computes_the_same_pairs(parts: int, window: int | None) -> None:
    graph = next(graph for graph in MODEL.graphs.values() if any(op.kind == "attention" for op in graph.operators))
    operator = next(op for op in graph.operators if op.kind == "attention")
    operator = replace(operator, attributes={**operator.attributes, "window": window})
    length = 48 * parts
    call = operator_call(graph, operator, {"B": 1, "T": 48, **dict(context_symbols(parts))}, WIDTH)
    counts = {pairs_on_device(length, parts, position, window) for position in range(parts)}
    assert counts == {computed_pairs(call)}
    if window is None:
        assert parts * computed_pairs(call) == length * (length + 1) // 2


def test_measured_curves_are_read_for_fewer_rows_of_complete_sequences() -> None:
    shape = MicrobatchShape(6, 100, 0, 100, symbols=context_symbols(3))
    assert equivalent_rows(shape) == (2.0, 300)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_attention_waits_for_its_collectives(recompute: str) -> None:
    job = replace(JOB, sequence=1 << 14)
    (split,) = simulate(job, context=4, recompute=(recompute,)).work.stages
    network, instant = Network(CLUSTER), Network(instant_links())
    size = float(2 * job.sequence * KEYS * WIDTH)  # of two rows: keys, and equally values
    gather_s, sum_s = (
        call(network, context_rings(split), size) - call(instant, context_rings(split), size)
        for call in (all_gather_s, reduce_scatter_s)
    )
    slow, fast = (simulate_links(job, links, recompute).costs.actions for links in (CLUSTER, instant_links()))
    again = 2 if recompute == "full" else 1
    expected = {"F": 2 * gather_s, "B": 2 * (again * gather_s + sum_s)}
    for kind, more_s in expected.items():
        measured_s = slow[kind].cost_of(0, 0, 0).time_s - fast[kind].cost_of(0, 0, 0).time_s
        assert measured_s == pytest.approx(LAYERS * more_s, rel=1e-9), kind


def instant_links() -> Any:
    """The cluster with links of a thousand times the bandwidth."""
    links = {
        name: replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * 1000)
        for name, link in CLUSTER.links.items()
    }
    return replace(CLUSTER, links=links)


def simulate_links(job: Job, cluster: Any, recompute: str) -> PlanSimulation:
    config = ParallelConfig(microbatches=2, context=4, recompute=(recompute,))  # type: ignore[arg-type]
    return simulate_plan(build_plan(MODEL, cluster, job, config), MODEL, cluster)


def test_a_device_keeps_the_activations_of_its_part() -> None:
    shorter, split = simulate(replace(JOB, sequence=48)), simulate(context=2)
    held = [costs.costs.actions["F"].cost_of(0, 0, 0).held_bytes for costs in (shorter, split)]
    assert held[0] == held[1]
    assert lane_parts(shorter.work) == lane_parts(split.work)
    peaks = [costs.costs.actions["B"].cost_of(0, 0, 0).peak_bytes for costs in (shorter, split)]
    assert peaks[1] >= peaks[0], "the gathered keys and values"


def test_state_is_sharded_over_replicas_and_parts() -> None:
    parts = lane_parts(simulate(context=2, replicas=(1, 1), sharded_state="optimizer").work)[0]
    complete = lane_parts(simulate().work)[0]
    assert parts["optimizer"] == pytest.approx(complete["optimizer"] / 4)
    assert parts["parameters"] == complete["parameters"]


def test_gradients_are_summed_over_replicas_and_parts() -> None:
    (stage,) = simulate(context=2, replicas=(1, 1), shards=(1, 1), sharding="megatron").work.stages
    assert context_rings(stage) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert replica_rings(stage) == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_collectives_of_attention_load_the_ports_of_other_lanes() -> None:
    """Two lanes, each with the parts of its sequences on two hosts, which share the ports of the hosts."""
    cluster = parse_spec("2x4xH100:10GB/s")
    job = replace(JOB, sequence=1 << 12)
    config = ParallelConfig(
        context=2, replicas=(1, 1), stages=2, microbatches=2, devices=(0, 4, 1, 5, 2, 6, 3, 7), cuts=(3,)
    )
    contention = simulate_plan(build_plan(MODEL, cluster, job, config), MODEL, cluster).costs.contention
    assert contention is not None
    wanted = {(kind, stage, 0, pipeline) for kind in "FB" for stage in (0, 1) for pipeline in (0, 1)}
    assert wanted | {("REDUCE", 0, 0, 0), ("REDUCE", 1, 0, 0)} <= {*contention.flows}
    assert all(0 < max(contention.flows[key].use) <= 1 for key in wanted)


def test_messages_carry_a_part_of_the_tokens() -> None:
    work = simulate(context=2, stages=2, replicas=(1, 1)).work
    assert work.edges[0].forward == (tuple((device, device + 4, 1.0 * 48 * 32 * WIDTH) for device in range(4)),)


@pytest.mark.parametrize(("recompute", "gathers"), [("none", 2), ("full", 3)])
def test_the_report_counts_keys_and_values_on_the_links(recompute: str, gathers: int) -> None:
    simulation = simulate(context=2, recompute=(recompute,))
    traffic = step_traffic(simulation.work, Network(CLUSTER), 2)
    sent = [parts["context"] for parts in traffic.bytes.values()]
    complete = JOB.batch * JOB.sequence * KEYS * WIDTH * 2  # keys and values of the step
    assert sent == [LAYERS * (gathers + 1) * complete / 2] * 2


def test_nothing_in_the_space_is_faster() -> None:
    """All candidates with a context axis of two on four devices and no recomputation, simulated one by one."""
    cluster = parse_spec("4xH100")
    constraints = Constraints(context=2, slices=1, mapping="hostname", recompute=("none",))
    chosen = make_plan(MODEL, cluster, JOB, constraints, tolerance=0.0)
    assert chosen.prediction is not None
    planner = PlannerContext(MODEL, cluster).split_sequences(2)
    count = len(MODEL.modules[0].layers)
    steps = []
    for config in iter_candidates(JOB, count, 4, 1, constraints, planner.layer_cutter):
        if config.sharding == "searched":
            continue
        try:
            plan = build_plan(MODEL, cluster, JOB, config, context=planner)
        except ScheduleError:
            continue
        simulation = simulate_plan(plan, MODEL, cluster, programs=planner.programs)
        assert config.context == 2
        if simulation.fits_in_memory:
            steps.append(simulation.timeline.makespan_s)
    assert len(steps) > 20
    assert chosen.prediction.step_s <= min(steps) * (1 + 1e-9)
    assert chosen.prediction.lower_bound_s <= min(steps)
