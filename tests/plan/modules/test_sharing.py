"""Modules on the devices of the largest one: whole plans, what they cost, who wins, and what cannot be asked for."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from tests.plan.modules.test_search import layouts
from tests.support.three_modules import WIDTH, skewed_samples, three_modules

from benchmarks.plain_devices import plain_spec
from pipefit.codec import dump_text, load_text
from pipefit.cost.comm.collectives import all_reduce_s
from pipefit.cost.comm.network import Network
from pipefit.cost.pipeline.table import cost_table
from pipefit.errors import PlanError
from pipefit.model.graph import Model
from pipefit.plan.assemble.pipeline_work import pipeline_work, skeleton_from_plan
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.assemble.shard_programs import ProgramCache
from pipefit.plan.check.rules import check_plan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.explain.text import forecast_lines
from pipefit.plan.make import make_plan
from pipefit.plan.modules.orchestrate import ModuleArrangement, ModuleLayout
from pipefit.plan.modules.search import ModuleSearch, first_guest_orders, more_guest_orders
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.request.sampled_batches import deal_samples
from pipefit.plan.types import Job, Plan

JOB = Job(batch=8, sequence=4096)
CLUSTER = plain_spec("8xA100-80")
SAMPLES = skewed_samples(8)
TWO_LANES = ("modules=shared", "language.stages=2", "language.replicas=2", "microbatches=4", "schedule=1f1b")


def made(*fixes: str, frozen: tuple[str, ...] = (), cluster: str = "8xA100-80", **more: Any) -> Plan:
    model = three_modules(frozen)
    return make_plan(
        model, plain_spec(cluster), JOB, parse_constraints(fixes), samples=more.pop("samples", SAMPLES), **more
    )


def test_a_plan_of_modules_that_share_devices_is_whole_and_simulated() -> None:
    plan, model = made(*TWO_LANES, "vision.multiple=1", "generator.multiple=1"), three_modules()
    check_plan(plan, model, CLUSTER)
    assert load_text(Plan, dump_text(plan), "plan") == plan
    assert [(stage.module, stage.turn, stage.turns) for stage in plan.stages] == [
        ("vision", 0, 2), ("vision", 1, 2), ("language", 0, 1), ("language", 0, 1), ("generator", 0, 2),
        ("generator", 1, 2),
    ]  # fmt: skip
    assert plan.order.placement == (0, 1, 0, 1, 0, 1)
    for lane in range(2):
        devices = {plan.groups[plan.stages[stage].group].devices for stage in (lane, 2 + lane, 4 + lane)}
        assert len(devices) == 1, "the same devices for all stages of a lane"
    simulation = simulate_plan(plan, model, CLUSTER)
    assert plan.prediction is not None
    assert simulation.timeline.makespan_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
    assert simulation.peaks_bytes == pytest.approx([lane.peak_bytes for lane in plan.prediction.lanes], rel=1e-12)
    units = [word for word in plan.order.lanes[1].split() if word[:2] in ("1F", "5F", "1B", "5B")]
    assert sorted(units) == sorted(f"{stage}{kind}{m}" for stage in (1, 5) for kind in "FB" for m in (1, 3))
    tied = {parameter.uses for parameter in plan.parameters if len(parameter.uses) > 1}
    assert tied == {(0, 1), (4, 5)} and "0REDUCE:tied.0.1" in plan.order.lanes[0]


def elements_of(model: Model, module: int, layers: tuple[int, int]) -> int:
    """Of the parameters of a run of layers."""
    own = model.modules[module].layers[layers[0] : layers[1]]
    return sum(math.prod(map(int, spec.shape)) for one in own for spec in model.graphs[one.graph].parameters)


def test_gradients_of_all_lanes_are_summed_at_once_and_waited_for() -> None:
    plan, network = made(*TWO_LANES, "vision.shards=1"), Network(CLUSTER)
    work = pipeline_work(skeleton_from_plan(plan), ProgramCache(three_modules()))
    simulation = simulate_plan(plan, three_modules(), CLUSTER)
    devices = plan.groups[plan.stages[0].group].devices + plan.groups[plan.stages[1].group].devices
    tied = next(one for one in work.tied if one.stages == (0, 1))
    elements = elements_of(three_modules(), 0, (0, 3))
    assert tied.rings == (devices,) and tied.elements == elements
    wanted = all_reduce_s(network, (devices,), 4 * elements)
    assert simulation.costs.tied_s[0] == simulation.costs.tied_s[1] == pytest.approx(wanted)
    assert simulation.costs.reduce_s[0] == 0.0
    spans = [span for span in simulation.timeline.all_spans() if span.action.what == "tied.0.1"]
    norm_s = min(span.start_s for span in simulation.timeline.all_spans() if span.action.kind == "NORM")
    assert len(spans) == 2 and max(span.stop_s for span in spans) <= norm_s + 1e-12
    assert all(span.stop_s - span.start_s == pytest.approx(wanted) for span in spans)


def test_the_whole_module_lies_on_every_lane() -> None:
    plan, model = made(*TWO_LANES, "vision.shards=1", "generator.shards=1"), three_modules()
    assert plan.prediction is not None

    for lane, stage in ((0, 2), (1, 3)):
        guests = elements_of(model, 0, (0, 3)) + elements_of(model, 2, (0, 3))
        wanted = 4.0 * (guests + elements_of(model, 1, plan.stages[stage].layers))
        assert plan.prediction.lanes[lane].parts["parameters"] == pytest.approx(wanted)
        assert plan.prediction.lanes[lane].parts["gradients"] == pytest.approx(wanted), "summed in place"


def test_every_microbatch_crosses_one_of_the_edges() -> None:
    plan = made(*TWO_LANES, "vision.shards=1")
    work = pipeline_work(skeleton_from_plan(plan), ProgramCache(three_modules()))
    patches = next(space for space in plan.spaces if space.name == "patches")
    ends = [edge for edge in work.edges if edge.target == 2]
    assert [edge.source for edge in ends] == [0, 1]
    for microbatch in range(4):
        sizes = [sum(size for _, _, size in edge.ragged[microbatch][0]) for edge in ends]
        tokens = sum(patches.counts[2 * microbatch : 2 * microbatch + 2])
        assert sorted(sizes) == [0.0, 4.0 * tokens * WIDTH] and sizes[microbatch % 2] > 0.0


def test_handing_over_on_a_lane_takes_the_exchange_between_grids() -> None:
    """Four devices of one lane: two replicas of two shards behind four replicas."""
    plan = made(
        "modules=shared", "language.stages=1", "language.shards=2", "vision.shards=1", "microbatches=2",
        "generator.placement=disjoint", cluster="8xA100-80",
    )  # fmt: skip
    model, network = three_modules(), Network(CLUSTER)
    costs = simulate_plan(plan, model, CLUSTER).costs
    work = pipeline_work(skeleton_from_plan(plan), ProgramCache(model))
    edge = next(edge for edge in work.edges if edge.source == 0)
    assert work.stages[0].group != work.stages[1].group
    alone = replace(work, edges=tuple(one for one in work.edges if one is not edge))
    context = PlannerContext(model, CLUSTER)
    plain = cost_table(alone, network, context.layers)
    for microbatch in range(2):
        ahead = network.transfer_time(edge.ragged[microbatch][0]).whole_s
        assert ahead > 0.0
        more = costs.actions["F"].time_s[0, microbatch, 0] - plain.actions["F"].time_s[0, microbatch, 0]
        assert more == pytest.approx(ahead)


def test_no_layout_that_shares_on_a_small_cluster_is_faster_in_the_simulator() -> None:
    """Every number of microbatches, replicas and stages on four devices in every order, nothing recomputed."""
    model, cluster = three_modules(), plain_spec("4xA100-80")
    whole = [f"{module.name}.recompute=none" for module in model.modules]
    shards = [f"{module.name}.shards=1" for module in model.modules]
    constraints = parse_constraints(["modules=shared", *whole, *shards])
    finder = ModuleSearch(PlannerContext(model, cluster), JOB, constraints, skewed_samples(8, 1), deal_samples)
    for count, grid in itertools.product((1, 2, 4, 8), layouts(finder.trials.costed[1])):
        lane = grid.replicas
        if grid.device_count > 4 or lane > 8 // count or grid.stage_count > count:
            continue
        guests = [
            ModuleLayout(module=name, replicas=lane, shards=1, cuts=(), recompute="none", shared=True)
            for name in ("vision", "generator")
        ]
        arrangement = ModuleArrangement(microbatches=count, modules=(guests[0], grid, guests[1]), step_s=0.0)
        decisions = finder.decisions_for(arrangement)
        assert decisions is not None
        for one in finder.with_orders(decisions, (*first_guest_orders(), *more_guest_orders())):
            finder.trials.simulate_plan(one)
    assert len(finder.trials.fitting) > 20
    plan = make_plan(model, cluster, JOB, constraints, samples=finder.trials.samples)
    assert plan.prediction is not None
    assert plan.prediction.step_s <= min(one.step_s for one in finder.trials.fitting) * (1 + 1e-9)


def test_all_placements_are_scored_and_told() -> None:
    """On as many devices as modules each has one, and waits for the others; together they share the work."""
    plan = made(cluster="4xA100-80")
    assert plan.decisions["modules"] == "shared" and plan.prediction is not None
    apart = made("modules=disjoint", cluster="4xA100-80")
    assert apart.prediction is not None and apart.decisions["modules"] == "disjoint"
    assert plan.prediction.step_s < apart.prediction.step_s
    notes = "\n".join(forecast_lines(plan))
    assert "on the devices of language (shared)" in notes
    for words in (
        "all disjoint: ",
        "vision shared: ",
        "generator shared: ",
        "generator and vision shared: ",
        "generator and vision inline: ",
    ):
        assert f"modules: {words}" in notes
    assert any(one.decisions["modules"] == "disjoint" for one in plan.alternatives)
    assert {one.decisions["vision.placement"] for one in plan.alternatives} == {"shared", "inline", "disjoint"}


def test_a_frozen_encoder_shares_with_its_forward_alone() -> None:
    alone = (*TWO_LANES, "vision.multiple=1", "generator.multiple=1")
    trained, frozen = (made(*alone, frozen=names, samples=None) for names in ((), ("vision",)))
    check_plan(frozen, three_modules(("vision",)), CLUSTER)
    words = {*frozen.order.lanes[0].split()}
    assert {"0F0", "0F2"} <= words and not {"0B0", "0REDUCE", "0REDUCE:tied.0.1"} & words
    assert trained.prediction is not None and frozen.prediction is not None
    assert frozen.prediction.step_s < trained.prediction.step_s
    assert frozen.prediction.lanes[0].peak_bytes < trained.prediction.lanes[0].peak_bytes


def test_one_module_by_its_own_placement() -> None:
    plan = made("modules=shared", "generator.placement=disjoint", "language.stages=2", "microbatches=4")
    check_plan(plan, three_modules(), CLUSTER)
    assert plan.decisions["vision.placement"] == "shared" and plan.decisions["generator.placement"] == "disjoint"
    lanes = dict(zip([stage.module for stage in plan.stages], plan.order.placement, strict=True))
    assert lanes["vision"] == lanes["language"] == 1 < lanes["generator"]
    assert "vision.stages" not in plan.decisions and plan.decisions["ahead"].isdigit()


def test_orders_that_are_asked_for() -> None:
    plan = made("modules=shared", "ahead=3", "schedule=zb-h1", "language.stages=2", "microbatches=4")
    assert plan.decisions["ahead"] == "3" and plan.order.name == "zb-h1"


@pytest.mark.parametrize(
    ("fixes", "message", "seen"),
    [
        (("language.placement=shared",), "cannot share the devices of another", "shared"),
        (("vision.placement=0,1",), "has its own devices, or shares those of the largest", "0,1"),
        (("vision.placement=shared", "vision.stages=2"), "has no stages or devices of its own", "vision.stages"),
        (("modules=shared", "vision.stages=1", "generator.devices=2"), "No module can share", "shared"),
        (("modules=both",), "valid value for 'modules'", "modules=both"),
    ],
)
def test_placements_that_cannot_be(fixes: tuple[str, ...], message: str, seen: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        made(*fixes)
    assert (seen in str(caught.value.seen) and caught.value.allowed) or caught.value.next_step


def test_messages_in_proportion_are_those_of_the_microbatches_that_a_stage_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on large groups, where only the largest microbatch is worked out: as many bytes in all of each."""
    plan = made(*TWO_LANES, "vision.shards=1")
    exact = pipeline_work(skeleton_from_plan(plan), ProgramCache(three_modules()))
    monkeypatch.setattr("pipefit.plan.assemble.pipeline_work.PAIRS", 1)
    scaled = pipeline_work(skeleton_from_plan(plan), ProgramCache(three_modules()))
    for one, other in zip(exact.edges, scaled.edges, strict=True):
        for (ahead, _), (near, _) in zip(one.ragged, other.ragged, strict=True):
            assert sum(size for *_, size in near) == pytest.approx(sum(size for *_, size in ahead))
