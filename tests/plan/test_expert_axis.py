"""Expert parallelism beside tensor parallelism in plans: found by the search, counted by hand, refused in words."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
from tests.plan.test_expert_parallelism import CLUSTER, JOB, many_experts
from tests.support import worker_plans as plans

from pipefit.cluster import load_cluster, parse_spec
from pipefit.codec import dump_text
from pipefit.cost.comm.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from pipefit.cost.comm.lowerings import lowerings_over, shard_collective
from pipefit.cost.comm.network import Network
from pipefit.cost.memory.lanes import lane_parts
from pipefit.cost.pipeline.reductions import gather_s, reduce_s
from pipefit.cost.pipeline.table import layer_costs
from pipefit.cost.work import COMPLETE_STATE, state_share
from pipefit.errors import PlanError, StalePlanError
from pipefit.model.ops.moe import EXPERT_EXCHANGE
from pipefit.plan.assemble.pipeline_work import pipeline_work, skeleton_from_plan
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.candidates.grid_bounds import LowerBounds
from pipefit.plan.candidates.slicings import slicer_of
from pipefit.plan.check.rules import plan_problems
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.explain.text import choice_keys, explain_text
from pipefit.plan.make import make_plan
from pipefit.plan.passes import group_state
from pipefit.plan.passes.search_space import list_base_grids
from pipefit.plan.request.constraints import NO_CONSTRAINTS, parse_constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan
from pipefit.run.worker.build import stage_programs
from pipefit.show.traffic import step_traffic

ROOT = Path(__file__).parents[2]
AXIS: dict[str, Any] = {"expert": 2, "shards": (1, 1), "sharding": "megatron-sp", "microbatches": 4}


@lru_cache
def context_of(tied: bool = False) -> PlannerContext:
    return PlannerContext(many_experts(tied=tied), CLUSTER)


def plan_of(tied: bool = False, **decisions: Any) -> Plan:
    return build_plan(many_experts(tied=tied), CLUSTER, JOB, ParallelConfig(**(AXIS | decisions)))


def held_elements(plan: Plan) -> tuple[int, int, int]:
    """(elements of experts on a device, of everything else, those of it that both shards hold), by sizes alone.

    The experts are the only parameters of three dimensions. Norms, routers and values are not split, nor are queries
    and keys, which are normed by head.
    """
    experts = rest = whole = 0
    shards = plan.stage_mesh(0).find_axis("shard").size
    for parameter in plan.parameters:
        size = prod(parameter.shape)
        if len(parameter.shape) == 3:
            experts += size // (2 * shards)
        elif any(word in parameter.name for word in ("norm", "mlp.gate.", "q_proj", "k_proj", "v_proj")):
            rest, whole = rest + size, whole + size
        else:
            rest += size // shards
    return experts, rest, whole


@pytest.mark.parametrize("replicas", [(1,), (1, 1)])
@pytest.mark.parametrize("state", ["none", "optimizer", "gradients", "parameters"])
def test_a_device_holds_its_experts_and_its_part_of_the_state(state, replicas) -> None:
    plan, count = plan_of(replicas=replicas, sharded_state=state), len(replicas)
    work = pipeline_work(skeleton_from_plan(plan), context_of().programs)
    experts, rest, _ = held_elements(plan)
    owned = experts + rest if state == "none" else experts / count + rest / count / 2
    kept = {"parameters": experts + rest, "gradients": experts + rest, "optimizer": owned}
    if state in ("gradients", "parameters"):
        kept["gradients"] = owned
    if state == "parameters":
        kept["parameters"] = owned
    (parts,) = lane_parts(work, context_of().network)
    widths = {"parameters": 2, "gradients": 4, "optimizer": 12}
    assert {name: parts[name] for name in kept} == pytest.approx({n: kept[n] * widths[n] for n in kept}, rel=1e-9)
    rows = context_of().layer_cutter.layer_static_bytes(JOB, state_share(state, replicas), "megatron-sp/ep2", (1, 1))
    assert rows.sum() == pytest.approx(sum(parts[name] for name in kept)), "the search counts as the plan"


@pytest.mark.parametrize("state", ["none", "optimizer"])
def test_gradients_are_summed_over_replicas_and_axis_and_those_of_experts_over_the_replicas(state) -> None:
    plan, network = plan_of(replicas=(1, 1), sharded_state=state), Network(CLUSTER)
    work = pipeline_work(skeleton_from_plan(plan), context_of().programs)
    experts, rest, whole = held_elements(plan)
    alike = ((0, 2, 4, 6), (1, 3, 5, 7))
    replicas, shards = tuple((d, d + 4) for d in range(4)), tuple((d, d + 1) for d in range(0, 8, 2))
    total = all_reduce_s if state == "none" else reduce_scatter_s
    expected = total(network, alike, 4.0 * rest) + total(network, replicas, 4.0 * experts)
    expected += all_reduce_s(network, shards, 4.0 * whole)
    assert reduce_s(work.stages[0], work, network) == pytest.approx(expected)
    gathered = all_gather_s(network, alike, 2.0 * rest) + all_gather_s(network, replicas, 2.0 * experts)
    assert gather_s(work.stages[0], work, network) == (pytest.approx(gathered) if state == "optimizer" else 0)


@pytest.mark.parametrize("devices", [(0, 1, 2, 3), (2, 3, 4, 5)])
def test_tokens_are_exchanged_over_the_axis_and_the_shards(devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of a host, and two pairs of shards on two hosts: only the exchange crosses the network."""
    plan = plan_of(devices=devices)
    priced, free = PlannerContext(many_experts(), CLUSTER), PlannerContext(many_experts(), CLUSTER)
    (stage,) = pipeline_work(skeleton_from_plan(plan), priced.programs).stages
    layer_s = layer_costs(stage, "bfloat16", priced.network, priced.layers)[""][1].forward_s
    monkeypatch.setattr(
        "pipefit.cost.pipeline.table.stage_collective",
        lambda network, rings, shares, exchanging: shard_collective_alone(network, rings, shares),
    )
    alone_s = layer_costs(stage, "bfloat16", free.network, free.layers)[""][1].forward_s
    size = 64 / 4 * 4096 * 4 * 2048 * 2.0  # rows of a microbatch, tokens, experts of a token, features, bytes
    even = (0.25,) * 4
    once_s = lowerings_over(priced.network, [devices]).collective_time_s("all_to_all", "alltoallv", size, even, even)
    assert layer_s - alone_s == pytest.approx(2 * once_s)


def shard_collective_alone(network: Network, rings: Any, shares: tuple[int, ...]) -> Any:
    """The collectives of the shards, with free exchanges over an expert axis."""
    real = shard_collective(network, rings, shares)
    return lambda kind, size, *rest: 0.0 if kind == EXPERT_EXCHANGE else real(kind, size, *rest)


def test_the_network_is_what_an_exchange_between_hosts_waits_for() -> None:
    def step_s(devices: tuple[int, ...]) -> float:
        return simulate_plan(plan_of(devices=devices), many_experts(), CLUSTER).timeline.makespan_s

    assert step_s((2, 3, 4, 5)) > 1.5 * step_s((0, 1, 2, 3))


def test_traffic_counts_every_group() -> None:
    """Between positions of the axis go tokens, and gradients of all but the experts; between shards also the stream."""
    plan, network = plan_of(sharded_state="optimizer"), Network(parse_spec("4xH100"))
    work = simulate_plan(plan, many_experts(), parse_spec("4xH100")).work
    traffic = step_traffic(work, network, 4)
    _, rest, whole = held_elements(plan)
    exchanged = 4 * 4 * 4 * 64 / 4 * 4096 * 4 * 2048 * 2 / 16  # layers, microbatches, ways, then as above, pairs
    assert traffic.bytes[0, 3] == pytest.approx({"shards": exchanged})
    assert traffic.bytes[0, 2] == pytest.approx(
        {"shards": exchanged, "reduction": 4 * rest / 2, "parameters": 2 * rest / 2}
    )
    assert traffic.bytes[0, 1]["shards"] > exchanged and traffic.bytes[0, 1]["reduction"] == pytest.approx(4 * whole)


def test_the_search_chooses_it_and_no_pin_is_faster() -> None:
    """Where there are more devices than rows, and experts are most of the model."""
    model, cluster = many_experts(128), parse_spec("8xH100")
    job = Job(batch=4, sequence=4096, precision="bfloat16")
    free = make_plan(model, cluster, job, NO_CONSTRAINTS)
    assert (free.decisions["expert"], free.decisions["shards"]) == ("4", "2"), free.decisions
    assert free.prediction is not None
    for pins in ("tp=2 ep=8", "tp=2 ep=4", "tp=4 ep=8", "tp=2 ep=4 pp=2", "tp=4 ep=4", "ep=4"):
        pinned = make_plan(model, cluster, job, parse_constraints(pins.split(), job.batch), tolerance=0.0)
        assert pinned.prediction is not None
        assert free.prediction.step_s <= pinned.prediction.step_s * 1.0101, pins


def test_a_pin_of_the_field_is_the_plan_of_the_planner() -> None:
    """`tp=2 ep=8 dp=8` has two replicas of four pairs of shards."""
    cluster = parse_spec("2x8xH100:400Gbit/s")
    job = Job(batch=16, sequence=2048, precision="bfloat16")
    pins = ["tp=2", "ep=8", "dp=8", "pp=1", "mbs=1", "zero=1"]
    plan = make_plan(many_experts(), cluster, job, parse_constraints(pins, 16))
    assert [(axis.name, len(axis.shares)) for axis in plan.groups[0].axes] == [
        ("replica", 2), ("expert", 4), ("shard", 2),
    ]  # fmt: skip
    assert (plan.decisions["expert"], plan.decisions["microbatches"]) == ("4", "2")
    assert "expert" in choice_keys(plan.decisions) and "2 replicas x 4 expert parts x 2 shards" in explain_text(plan)
    assert not list(plan_problems(plan, many_experts(), cluster))


def test_a_plan_by_hand_is_checked() -> None:
    plan = plan_of(sharded_state="optimizer", replicas=(1, 1))
    assert not list(plan_problems(plan))
    (group,), (stage,) = plan.groups, plan.stages

    def told(changed: Plan) -> str:
        return " ".join(error.what for error in plan_problems(changed))

    assert "over all devices of a stage" in told(replace(plan, stages=(replace(stage, state_group=2),)))
    other = replace(stage, sharding="megatron")
    assert "tensor parallelism that divides tokens" in told(replace(plan, stages=(other,)))
    turned = replace(group, devices=(2, 3, 0, 1, *group.devices[4:]))
    assert "in rising order" in told(replace(plan, groups=(turned,)))
    few = replace(plan, job=replace(JOB, batch=20), spaces=(replace(plan.spaces[0], rows=20),))
    assert "do not divide among the devices" in told(few)


def test_state_is_sharded_over_the_axis_unless_it_divides_the_parameter() -> None:
    plan = plan_of(sharded_state="optimizer", replicas=(1, 1))
    states = {len(parameter.shape) == 3: parameter.state[:2] for parameter in plan.parameters}
    assert states == {True: ("Gflat", "G0"), False: ("Gflat", "Gflat")}


def test_groups_that_shard_state_are_not_tried_for_it() -> None:
    """On slow links between hosts a search of groups follows; without the axis it has grids to try."""
    context = PlannerContext(many_experts(), parse_spec("2x4xH100:25Gbit/s"))
    for pins, tried in (("tp=2 ep=4 dp=4", 0), ("tp=1 dp=8", 1)):
        fixed = parse_constraints([*pins.split(), "pp=1", "zero=2", "microbatches=8"], JOB.batch)
        grids = list_base_grids(context, JOB, fixed)
        assert min(1, sum(len([*group_state._with_groups(grid, context)]) for grid in grids)) == tried


@pytest.mark.parametrize("program", [("megatron-sp/ep2", (1, 1)), ("expert", (1, 1))])
def test_a_sequence_in_one_slice_costs_as_much_as_one_without(program) -> None:
    cutter = PlannerContext(many_experts(), parse_spec("8xH100")).layer_cutter
    pairs, slicer = frozenset({("H100", 8)}), slicer_of(cutter, JOB, NO_CONSTRAINTS)
    row = slicer.rows.slice_row(slicer.stage_work(pairs, "none", program), (JOB.sequence,), JOB.precision)
    layers = cutter.layer_row(JOB, pairs, "none", COMPLETE_STATE, program)
    assert row.forward_s[0] == pytest.approx(layers.forward_s)


def test_parameters_in_other_forms_are_refused() -> None:
    plan = plan_of()
    stored = [replace(p, stored=("I", "I", *p.stored[2:]), state=("I", "I", *p.state[2:])) for p in plan.parameters]
    with pytest.raises(StalePlanError, match="another form"):
        stage_programs(replace(plan, parameters=tuple(stored)), many_experts())


def test_bounds_are_those_of_the_exact_rows() -> None:
    job, pins = Job(batch=16, sequence=512, precision="bfloat16"), ["tp=2", "ep=4", "dp=4", "microbatches=2", "pp=1"]
    constraints = parse_constraints([*pins, "recompute=none"], 16)
    context = PlannerContext(many_experts(), parse_spec("8xH100"))
    cutter = context.layer_cutter
    for grid in list_base_grids(context, job, constraints):
        bounds = LowerBounds(cutter, job, slicer_of(cutter, job, constraints)).bound_grid(grid)
        exact = cutter.stage_rows(job, grid.decisions_at(0))[0]
        assert grid.program == ("megatron-sp/ep2", (1, 1))
        assert bounds.lane_forward_s.max() == pytest.approx(exact.forward_s.sum())


def test_unlike_devices_are_planned_on_request() -> None:
    cluster = load_cluster(ROOT / "examples" / "clusters" / "mixed-kinds.json")
    job = Job(batch=16, sequence=512, precision="bfloat16")
    plan = make_plan(many_experts(), cluster, job, parse_constraints(["tp=2", "ep=4", "microbatches=4"], 16))
    assert plan.decisions["expert"] == "2" and not list(plan_problems(plan, many_experts(), cluster))


def test_nearest_fixes_keep_the_axis_beside_shards() -> None:
    job = Job(batch=16, sequence=512, precision="bfloat16")
    with pytest.raises(PlanError, match="more devices than the cluster has") as refused:
        make_plan(many_experts(), parse_spec("8xH100"), job, parse_constraints(["tp=2", "ep=8", "pp=2"], 16))
    assert "expert=2 shards=2 stages=2" in str(refused.value) and "shards=1" not in str(refused.value)


REFUSED: list[tuple[str, list[str]]] = [
    ("tp=64 ep=64", ["more devices than experts", "64 devices, 32 experts", "at most 32"]),
    ("tp=3 ep=8", ["tp divides ep", "tp=3 and ep=8", "1, 2, 4, 8", "ep=6"]),
    ("tp=2:1 ep=8", ["tp divides ep", "tp=2:1 and ep=8"]),
    ("tp=4 ep=2", ["tp divides ep", "tp=4 and ep=2", "ep=4"]),
    ("tp=2 ep=8 dp=6", ["divides the devices of data parallelism", "dp=6", "dp=4"]),
    ("tp=2 ep=64", ["do not divide among the devices", "32 experts for 32 x 2 devices", "ep=32 beside tp=2"]),
    ("tp=2 ep=8 sp=false", ["two fixes", "sp=false"]),
    ("tp=2 ep=8 dp=8 hsdp=2", ["over all devices of a stage", "expert=4, state_group=2", "leave out state_group"]),
    ("tp=2 ep=8 microbatches=32", ["do not divide among", "2 rows for 1 x 4 devices", "a multiple of 4 rows"]),
    ("expert=4", ["goes with tensor parallelism", "shards=4 and sharding=expert (ep=4)"]),
    ("shards=2 sharding=megatron expert=4", ["goes with tensor parallelism", "sharding=megatron-sp"]),
    ("shards=2:1 sharding=megatron-sp expert=4", ["shards are equal", "shards 2:1", "shards=2"]),
]


@pytest.mark.parametrize(("pins", "told"), REFUSED)
def test_what_it_does_not_go_with_is_refused(pins: str, told: list[str]) -> None:
    cluster = parse_spec("16x4xH100:400Gbit/s")
    with pytest.raises(PlanError) as refused:
        make_plan(many_experts(), cluster, JOB, parse_constraints(pins.split(), JOB.batch))
    assert all(text.lower() in str(refused.value).lower() for text in told), str(refused.value)


def test_positions_have_equally_many_experts() -> None:
    job = Job(batch=48, sequence=4096, precision="bfloat16")
    with pytest.raises(PlanError, match=r"32 experts for 3 x 2 devices[\s\S]*expert of 2, 4, 8, 16 beside 2 shards"):
        build_plan(many_experts(), CLUSTER, job, ParallelConfig(**(AXIS | {"expert": 3})))


def test_a_model_without_experts_is_refused() -> None:
    for ask in (
        lambda: make_plan(plans.model("llama"), CLUSTER, JOB, parse_constraints(["tp=2", "ep=4"])),
        lambda: make_plan(plans.model("llama"), CLUSTER, JOB, parse_constraints(["tp=2", "ep=2"])),
        lambda: build_plan(plans.model("llama"), CLUSTER, JOB, ParallelConfig(**AXIS)),
    ):
        with pytest.raises(PlanError, match=r"this model has none[\s\S]*expert=[12]"):
            ask()


def test_the_command_refuses_with_exit_code_2(pipefit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "model.json"
    path.write_text(dump_text(many_experts()))
    words = ("--cluster", "8xH100", "--batch", "16", "--seq", "512")
    for pins, code in (("tp=2", 0), ("tp=3", 2)):
        out = ("--output", str(tmp_path / "plan.json"))
        seen, _, told = pipefit("plan", "--model", str(path), *words, *out, "--fix", pins, "--fix", "ep=4")
        assert seen == code, told
    assert "tp divides ep" in told
