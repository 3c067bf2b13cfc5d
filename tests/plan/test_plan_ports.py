"""The last look at a search's best plans: with what they share, and a better cluster in the same terms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_toys import skewed_cluster
from plan_toys import toy_model

from pipefit.cluster import parse_spec
from pipefit.cluster.kinds import data_sheet_kind
from pipefit.cluster.measured import Measured, RailCurve, Sharing, Uplink
from pipefit.plan.build import Workbench
from pipefit.plan.make import make_plan
from pipefit.plan.ports import LEAST, on_shared_ports
from pipefit.plan.predict import simulate_plan
from pipefit.plan.search import search
from pipefit.plan.sensitivity import faster_links, one_more
from pipefit.plan.types import Job

JOB = Job(batch=16, sequence=128)
PINS = {"stages": 2, "replicas": (1, 1, 1, 1), "schedule": "1f1b"}


def test_the_best_of_a_search_are_ranked_by_what_they_share() -> None:
    bench = Workbench(toy_model(6), skewed_cluster(8, seed=2))
    found = search(bench, JOB, PINS)
    again = on_shared_ports(bench, found, 1)
    assert len(again.fitting) == min(LEAST, len(found.fitting)) > 1
    assert [one.rank for one in again.fitting] == sorted(one.rank for one in again.fitting)
    for one in again.fitting:
        assert one.simulation.costs.contention is not None
        plain = next(each for each in found.fitting if each.decisions == one.decisions)
        assert plain.simulation.costs.contention is None and plain.step_s != one.step_s


def test_a_plan_says_what_the_simulator_says_of_it() -> None:
    cluster, model = skewed_cluster(8, seed=4), toy_model(6)
    plan = make_plan(model, cluster, JOB, PINS)
    assert plan.prediction is not None
    simulation = simulate_plan(plan, model, cluster)
    assert simulation.costs.contention is not None and len(simulation.costs.contention.pipelines) == 4
    assert simulation.timeline.makespan_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
    assert plan.prediction.lower_bound_s <= plan.prediction.step_s


def test_better_clusters_have_better_ports() -> None:
    cluster = parse_spec("3x1xA100-80:1GB/s")
    names = [host.name for host in cluster.hosts]
    sharing = Sharing(
        out_bytes_per_s=(1e9, 2e9, 3e9), out_shared=(True, False, True),
        in_bytes_per_s=(4e9, 5e9, 6e9), in_shared=(False, True, True),
        uplinks=(Uplink(hosts=(names[0],), up_bytes_per_s=1e8, down_bytes_per_s=None),
                 Uplink(hosts=tuple(names[1:]), up_bytes_per_s=None, down_bytes_per_s=2e8)),
    )  # fmt: skip
    zeros = ((0.0,) * 3,) * 3
    curve = RailCurve(sizes_bytes=(8,), time_s=(zeros,), spread=(zeros,), sharing=sharing)
    rail = cluster.rails[0].name
    measured = replace(cluster, measured=Measured(rails={rail: curve}))
    better = faster_links(measured).measured
    assert better is not None and better.rails[rail].sharing is not None
    assert better.rails[rail].sharing.out_bytes_per_s == (2e9, 4e9, 6e9)
    assert better.rails[rail].sharing.uplinks[1].down_bytes_per_s == 4e8
    assert better.rails[rail].sharing.uplinks[1].up_bytes_per_s is None
    _, grown = one_more(measured)
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
    plain = parse_spec("4x1xA100-80:100GB/s")
    hosts = tuple(
        replace(host, kind=kind) for host, kind in zip(plain.hosts, ("fast", "slow", "slow", "fast"), strict=True)
    )
    cluster = replace(plain, kinds=kinds, hosts=hosts)
    pins = {"stages": 2, "replicas": (1, 1), "microbatches": 1, "schedule": "1f1b", "mapping": (0, 1, 2, 3)}
    plan = make_plan(toy_model(12), cluster, Job(batch=512, sequence=4096, precision="float32"), pins)
    assert plan.prediction is not None
    bound_s = search(Workbench(toy_model(12), cluster), plan.job, pins).lower_bound_s
    assert bound_s > plan.prediction.step_s, "the case must be one"
    assert plan.prediction.lower_bound_s == 0.0
