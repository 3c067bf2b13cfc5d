"""The sensitivity of a plan against planning and simulating on the better cluster outright."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.cluster import Cluster, link_between, parse_spec
from pipefit.cluster.catalogue import device_sheets
from pipefit.cluster.kinds import data_sheet_kind, sheet_peaks
from pipefit.cluster.measured import ClusterMeasurements, LinkCurve, RailCurve
from pipefit.cluster.spec import local_cluster
from pipefit.codec import dump_text, from_data, load_text, to_data
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.explain.text import forecast_lines
from pipefit.plan.make import make_plan
from pipefit.plan.passes.sensitivity import extend_cluster, faster_links, larger_memory, next_kind
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import Job, Plan
from pipefit.precision import PRODUCT_TYPE, Precision

JOB = Job(batch=8, sequence=512)


def measured_hosts() -> Cluster:
    cluster = parse_spec("2x2xA100-80:1GB/s")
    sizes, times = (8, 1024), (1e-6, 3e-6)
    flat = ((0.0, 2e-5), (3e-5, 0.0))
    inside = LinkCurve(sizes_bytes=sizes, time_s=times, spread=(0.0, 0.0), between_pairs=(0.0, 0.0), pairs=1)
    between = RailCurve(sizes_bytes=sizes, time_s=(flat, flat), spread=(flat, flat))
    return replace(cluster, measured=ClusterMeasurements(links={"inside": inside}, rails={"network": between}))


def test_faster_links_are_those_of_a_cluster_with_twice_the_bandwidth_and_half_the_latency() -> None:
    slow = parse_spec("2x2xA100-80:10MB/s")
    plan = make_plan(toy_model(3), slow, JOB, Constraints(stages=2, replicas=(1, 1)))
    assert plan.prediction is not None
    found = {one.change: one for one in plan.prediction.sensitivity}
    halved = faster_links(slow)
    for source, target in ((0, 1), (0, 2), (3, 1)):
        then, now = link_between(slow, source, target), link_between(halved, source, target)
        assert now.bandwidth_bytes_per_s == 2 * then.bandwidth_bytes_per_s and now.latency_s == then.latency_s / 2
    again = simulate_plan(plan, toy_model(3), halved).timeline.makespan_s
    assert found["links twice as fast"].step_s == pytest.approx(again)
    assert again < 0.66 * plan.prediction.step_s, "links are what this plan waits for"


def test_collectives_inside_layers_are_faster_on_faster_links() -> None:
    slow = parse_spec("2x2xA100-80:10MB/s")
    plan = make_plan(toy_model(3), slow, JOB, Constraints(shards=(1, 1, 1, 1), sharding="megatron"))
    assert plan.prediction is not None
    found = {one.change: one for one in plan.prediction.sensitivity}["links twice as fast"]
    assert found.step_s == pytest.approx(simulate_plan(plan, toy_model(3), faster_links(slow)).timeline.makespan_s)
    assert found.step_s < 0.66 * plan.prediction.step_s


def test_one_more_host_is_what_planning_on_the_larger_cluster_finds() -> None:
    """The larger search differs only in what the sensitivity holds; the toy's best plans agree in that."""
    job = Job(batch=12, sequence=65536)
    plan = make_plan(toy_model(6), parse_spec("2x2xA100-80:25GB/s"), job)
    larger = make_plan(toy_model(6), parse_spec("3x2xA100-80:25GB/s"), job)
    assert plan.prediction is not None and larger.prediction is not None
    found = {one.change: one for one in plan.prediction.sensitivity}["one more host"]
    assert larger.decisions["schedule"] == plan.decisions["schedule"]
    assert larger.decisions["recompute"] == plan.decisions["recompute"]
    assert found.step_s == pytest.approx(larger.prediction.step_s)
    assert found.step_s < plan.prediction.step_s


def test_clusters_grow_with_their_measured_curves() -> None:
    words, grown = extend_cluster(measured_hosts())
    assert words == "one more host" and [host.devices for host in grown.hosts] == [2, 2, 2]
    assert grown.measured is not None
    assert grown.measured.rails["network"].time_s[0] == ((0.0, 2e-5, 2e-5), (3e-5, 0.0, 3e-5), (3e-5, 2e-5, 0.0))
    faster = faster_links(measured_hosts()).measured
    assert faster is not None and faster.links["inside"].time_s == (5e-7, 1.5e-6)
    assert faster.rails["network"].time_s[1] == ((0.0, 1e-5), (1.5e-5, 0.0))
    words, grown = extend_cluster(toy_cluster())
    assert words == "one more host, joined by 50.0 GB/s (assumed)" and [host.devices for host in grown.hosts] == [4, 4]
    assert link_between(grown, 0, 4).bandwidth_bytes_per_s == 50e9
    words, grown = extend_cluster(local_cluster(3))
    assert words == "one more process" and grown.hosts[0].devices == 4


def test_twice_the_memory_is_what_planning_on_larger_devices_finds() -> None:
    small = parse_spec("1x4xA100-80")
    kinds = {name: replace(kind, memory_bytes=105_000_000) for name, kind in small.kinds.items()}
    cluster, job = replace(small, kinds=kinds), Job(batch=8, sequence=16384)
    fixed = Constraints(stages=2, replicas=(1,), shards=(1,), context=1, schedule="1f1b", microbatches=4, slices=1)
    plan = make_plan(toy_model(3), cluster, job, fixed)
    assert plan.prediction is not None and plan.decisions["recompute"] != "none"
    found = {one.change: one for one in plan.prediction.sensitivity}["twice the memory"]
    larger = make_plan(toy_model(3), larger_memory(cluster), job, fixed)
    assert larger.prediction is not None and larger.decisions["recompute"] == "none"
    assert found.step_s == pytest.approx(larger.prediction.step_s)


@pytest.mark.parametrize(
    ("kind", "better"),
    [("A100-40", "A100-80"), ("A100-80", "H100"), ("H100", "H200"), ("L4", "A10"), ("MI300X", "MI325X")],
)
def test_the_next_kind_has_no_smaller_figure(kind: str, better: str) -> None:
    grown = next_kind(parse_spec(f"2x4x{kind}:100Gbit/s"))
    assert grown is not None and grown[0] == better
    assert {host.kind for host in grown[1].hosts} == {better} and link_between(grown[1], 0, 1) == data_sheet_kind(
        better
    )[1]


@pytest.mark.parametrize("precision", PRODUCT_TYPE)
def test_the_next_kind_has_the_precision(precision: Precision) -> None:
    for name, sheet in device_sheets().items():
        if PRODUCT_TYPE[precision] in sheet_peaks(sheet):
            grown = next_kind(parse_spec(f"2x{name}"), precision)
            assert grown is None or PRODUCT_TYPE[precision] in grown[1].kinds[grown[0]].peak_flops_per_s
    assert next_kind(parse_spec("2xL4"), "fp8") == next_kind(parse_spec("2xL4"), "fp8-bfloat16-gradients")
    fp8, wide = next_kind(parse_spec("2xL4"), "fp8"), next_kind(parse_spec("2xL4"), "bfloat16")
    assert fp8 is not None and wide is not None and fp8[0] != wide[0] == "A10"


def test_measured_mixed_and_best_kinds_have_no_next_one() -> None:
    assert next_kind(measured_hosts()) is None
    assert next_kind(parse_spec("4xGB300")) is None
    one, two = parse_spec("4xA100-80"), parse_spec("4xH100")
    assert next_kind(replace(one, kinds={**one.kinds, **two.kinds})) is None


def test_it_is_printed_and_old_plans_without_it_are_read() -> None:
    plan = make_plan(toy_model(3), toy_cluster(), JOB, Constraints(stages=2))
    assert plan.prediction is not None
    line = forecast_lines(plan)[-1]
    assert line.startswith("with better hardware: links twice as fast: ") and "planned again" in line
    bare = replace(plan, prediction=replace(plan.prediction, sensitivity=()))
    data = to_data(bare)
    del data["prediction"]["sensitivity"]
    assert from_data(Plan, data, "an older plan") == bare
    assert "with better" not in "".join(forecast_lines(bare))
    assert load_text(Plan, dump_text(plan), "plan") == plan


def test_a_pinned_number_of_devices_leaves_the_host_out() -> None:
    plan = make_plan(toy_model(3), toy_cluster(), JOB, Constraints(devices=1))
    assert plan.prediction is not None
    assert [change.change for change in plan.prediction.sensitivity] == ["twice the memory", "H100 devices"]
