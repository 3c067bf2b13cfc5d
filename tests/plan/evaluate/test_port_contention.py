"""The search with what transfers share, and a better cluster in the same terms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.placement_toys import skewed_cluster
from tests.support.plan_toys import toy_model

from benchmarks.plain_devices import plain_spec
from pipefit.cluster import Cluster
from pipefit.cluster.kinds import data_sheet_kind
from pipefit.cluster.measured import ClusterMeasurements, HostUplink, PortSharing, RailCurve
from pipefit.cost.pipeline.contention import split_pipelines
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.bounds.step_bounds import table_bound_s
from pipefit.plan.candidates.space import iter_candidates
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.evaluate.port_contention import slowest_pipeline_bound_s
from pipefit.plan.make import make_plan
from pipefit.plan.passes.search import search_plans
from pipefit.plan.passes.sensitivity import extend_cluster, faster_links
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import Job
from pipefit.simulate import simulate_schedule

JOB = Job(batch=16, sequence=128)
FIXED = Constraints(stages=2, replicas=(1, 1, 1, 1), schedule="1f1b")


def crowded(rate: float) -> Cluster:
    """Two hosts of two devices, measured: a quarter of a link's rate leaves or enters a host."""
    plain = plain_spec("2x2xA100-80:10MB/s")
    ports = (rate / 4, rate / 4)
    sharing = PortSharing(out_bytes_per_s=ports, out_shared=(True,) * 2, in_bytes_per_s=ports, in_shared=(True,) * 2)
    sizes = (1, 1_000_001)
    times = tuple(tuple(tuple(0.0 if a == b else size / rate for b in (0, 1)) for a in (0, 1)) for size in sizes)
    curve = RailCurve(sizes_bytes=sizes, time_s=times, spread=(((0.0,) * 2,) * 2,) * 2, sharing=sharing)
    return replace(plain, measured=ClusterMeasurements(rails={plain.rails[0].name: curve}))


def in_step_s(one: EvaluatedPlan) -> float:
    """What the plain simulator says: a port for every lane, all replicas in step."""
    costs = replace(one.simulation.costs, contention=None)
    return simulate_schedule(one.simulation.timeline.schedule, costs).makespan_s


CROWDED = Constraints(recompute=("none",), devices=4, sharded_state="none")


@pytest.mark.parametrize(("sequence", "rate"), [(512, 1e9), (2048, 3e9)])
def test_the_search_finds_the_best_of_all_simulated_with_what_they_share(sequence: int, rate: float) -> None:
    """Every candidate simulated with shared ports. The best without them is another one, a tenth slower or more; and
    replicas at their own pace beat the bound of replicas in step somewhere."""
    context, job = PlannerContext(toy_model(3), crowded(rate)), Job(batch=8, sequence=sequence)
    every = [
        evaluate_candidate(context, decisions, context.make_skeleton(job, decisions))
        for decisions in iter_candidates(job, len(context.only_module.layers), 4, 2, CROWDED, context.layer_cutter)
    ]
    beaten = 0
    for one in every:
        costs, count = one.simulation.costs, one.decisions.microbatches
        assert costs.contention is not None
        alone = split_pipelines(costs, one.simulation.work, context.network, context.layers)
        assert slowest_pipeline_bound_s(alone, one.parts.placement, count, one.decisions.schedule) <= one.step_s * (
            1 + 1e-9
        )
        beaten += table_bound_s(costs, one.parts.placement, count, one.decisions.schedule) > one.step_s * (1 + 1e-9)
    assert beaten
    fitting = [one for one in every if one.simulation.fits_in_memory]
    found = search_plans(context, job, CROWDED, top=3)
    assert found.fitting[0].step_s == pytest.approx(min(one.step_s for one in fitting), rel=1e-12)
    unlike = {replace(one.decisions, stages=one.decisions.stage_count): one.step_s for one in fitting}
    assert [one.step_s for one in found.fitting[:3]] == pytest.approx(sorted(unlike.values())[:3], rel=1e-12)
    assert min(fitting, key=in_step_s).step_s > found.fitting[0].step_s * 1.1, "the case must be one"


def test_a_plan_says_what_the_simulator_says_of_it() -> None:
    cluster, model = skewed_cluster(8, seed=4), toy_model(6)
    plan = make_plan(model, cluster, JOB, FIXED)
    assert plan.prediction is not None
    simulation = simulate_plan(plan, model, cluster)
    assert simulation.costs.contention is not None and len(simulation.costs.contention.pipelines) == 4
    assert simulation.timeline.makespan_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
    assert plan.prediction.lower_bound_s <= plan.prediction.step_s


def test_better_clusters_have_better_ports() -> None:
    cluster = plain_spec("3x1xA100-80:1GB/s")
    names = [host.name for host in cluster.hosts]
    sharing = PortSharing(
        out_bytes_per_s=(1e9, 2e9, 3e9), out_shared=(True, False, True),
        in_bytes_per_s=(4e9, 5e9, 6e9), in_shared=(False, True, True),
        uplinks=(HostUplink(hosts=(names[0],), up_bytes_per_s=1e8, down_bytes_per_s=None),
                 HostUplink(hosts=tuple(names[1:]), up_bytes_per_s=None, down_bytes_per_s=2e8)),
    )  # fmt: skip
    zeros = ((0.0,) * 3,) * 3
    curve = RailCurve(sizes_bytes=(8,), time_s=(zeros,), spread=(zeros,), sharing=sharing)
    rail = cluster.rails[0].name
    measured = replace(cluster, measured=ClusterMeasurements(rails={rail: curve}))
    better = faster_links(measured).measured
    assert better is not None and better.rails[rail].sharing is not None
    assert better.rails[rail].sharing.out_bytes_per_s == (2e9, 4e9, 6e9)
    assert better.rails[rail].sharing.uplinks[1].down_bytes_per_s == 4e8
    assert better.rails[rail].sharing.uplinks[1].up_bytes_per_s is None
    _, grown = extend_cluster(measured)
    assert grown.measured is not None and grown.measured.rails[rail].sharing is not None
    more = grown.measured.rails[rail].sharing
    assert (more.out_bytes_per_s, more.in_shared) == ((1e9, 2e9, 3e9, 3e9), (False, True, True, True))
    assert more.uplinks[1].hosts == (*names[1:], grown.hosts[-1].name) and more.uplinks[0].hosts == (names[0],)


def test_a_bound_that_replicas_at_their_own_pace_beat_is_not_told() -> None:
    """Two pipelines, one with the slow device first, one with it last: in step both stages would be slow."""
    quick, _ = data_sheet_kind("A100-80")
    kinds = {
        name: replace(
            quick,
            name=name,
            peak_flops_per_s={dtype: times * peak / 1000 for dtype, peak in quick.peak_flops_per_s.items()},
            memory_bandwidth_bytes_per_s=times * quick.memory_bandwidth_bytes_per_s / 1000,
            overhead_s=0.0,
        )
        for name, times in (("fast", 4.0), ("slow", 1.0))
    }
    plain = plain_spec("4x1xA100-80:100GB/s")
    hosts = tuple(
        replace(host, kind=kind) for host, kind in zip(plain.hosts, ("fast", "slow", "slow", "fast"), strict=True)
    )
    cluster = replace(plain, kinds=kinds, hosts=hosts)
    constraints = Constraints(
        stages=2, replicas=(1, 1), microbatches=1, schedule="1f1b", mapping=(0, 1, 2, 3), slices=1
    )
    plan = make_plan(toy_model(12), cluster, Job(batch=512, sequence=4096, precision="float32"), constraints)
    assert plan.prediction is not None
    bound_s = search_plans(PlannerContext(toy_model(12), cluster), plan.job, constraints).lower_bound_s
    assert bound_s > plan.prediction.step_s, "the case must be one"
    assert plan.prediction.lower_bound_s == 0.0
