"""Expert parallelism in plans: found by the search, counted by hand, refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import pytest
from tests.support import worker_plans as plans

from pipefit.cluster import parse_spec
from pipefit.cost.comm.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from pipefit.cost.comm.network import Network
from pipefit.cost.memory.lanes import lane_parts
from pipefit.cost.pipeline.reductions import gather_s, reduce_s
from pipefit.cost.work import state_share
from pipefit.errors import PlanError
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Model
from pipefit.model.registry import describe_config
from pipefit.plan.assemble.pipeline_work import pipeline_work, skeleton_from_plan
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.candidates.grid_bounds import LowerBounds
from pipefit.plan.candidates.slicings import slicer_of
from pipefit.plan.check.rules import plan_problems
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.explain.text import choice_keys
from pipefit.plan.make import make_plan
from pipefit.plan.passes.search_space import list_base_grids
from pipefit.plan.request.constraints import NO_CONSTRAINTS, parse_constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.show.traffic import step_traffic

CLUSTER = parse_spec("2x4xH100:400Gbit/s")
JOB = Job(batch=64, sequence=4096, precision="bfloat16")
EXPERT: dict[str, Any] = {"shards": (1, 1, 1, 1), "sharding": "expert", "microbatches": 4}


@lru_cache
def many_experts(count: int = 32, tied: bool = False) -> Model:
    """Four layers of many experts, most of the parameters."""
    config = plans.QWEN3_MOE | {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 64, "num_experts": count, "num_experts_per_tok": 4,
        "moe_intermediate_size": 768, "mlp_only_layers": [], "tie_word_embeddings": tied,
    }  # fmt: skip
    described = describe_config(config, "many", "many")
    return capture_family(described.family, described.config)


def counted(model: Model) -> tuple[int, int]:
    """(elements of the experts, of everything else); a tied table counts once."""
    experts, rest, seen = 0, 0, set[str]()
    for layer in model.modules[0].layers:
        for spec in model.graphs[layer.graph].parameters:
            if layer.parameters[spec.name] in seen:
                continue
            seen.add(layer.parameters[spec.name])
            size = prod(spec.shape)
            if len(spec.shape) == 3:
                experts += size
            else:
                rest += size
    return experts, rest


@pytest.mark.parametrize(("replicas", "devices"), [((1,), 4), ((1, 1), 8)])
@pytest.mark.parametrize("state", ["none", "optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_device_holds_its_experts_and_its_part_of_the_state(state, replicas, devices, tied) -> None:
    """A tied table stays complete, with its gradient; only its optimizer state is sharded."""
    model = many_experts(tied=tied)
    plan = build_plan(model, CLUSTER, JOB, ParallelConfig(**EXPERT, replicas=replicas, sharded_state=state))
    context = PlannerContext(model, CLUSTER)
    work = pipeline_work(skeleton_from_plan(plan), context.programs)
    experts, rest = counted(model)
    experts //= 4
    owned = experts + rest if state == "none" else experts / len(replicas) + rest / devices
    kept = {"parameters": experts + rest, "gradients": experts + rest, "optimizer": owned}
    complete = 32000 * 2048 * (1 - 1 / devices) if tied else 0
    if state in ("gradients", "parameters"):
        kept["gradients"] = owned + complete
    if state == "parameters":
        kept["parameters"] = owned + complete
    (parts,) = lane_parts(work, context.network)
    widths = {"parameters": 2, "gradients": 4, "optimizer": 12}
    assert {name: parts[name] for name in kept} == pytest.approx({n: kept[n] * widths[n] for n in kept}, rel=1e-9)
    rows = context.layer_cutter.layer_static_bytes(JOB, state_share(state, replicas), "expert", (1, 1, 1, 1))
    assert rows.sum() == pytest.approx(sum(parts[name] for name in kept), rel=1e-9), "the search counts as the plan"


@pytest.mark.parametrize("state", ["none", "optimizer"])
def test_gradients_are_summed_over_all_devices_and_those_of_experts_over_the_replicas(state) -> None:
    model, network = many_experts(), Network(CLUSTER)
    plan = build_plan(model, CLUSTER, JOB, ParallelConfig(**EXPERT, replicas=(1, 1), sharded_state=state))
    work = pipeline_work(skeleton_from_plan(plan), PlannerContext(model, CLUSTER).programs)
    experts, rest = counted(model)
    everyone, pairs = (tuple(range(8)),), tuple((device, device + 4) for device in range(4))
    total = all_reduce_s if state == "none" else reduce_scatter_s
    expected = total(network, everyone, 4.0 * rest) + total(network, pairs, 4.0 * experts / 4)
    assert reduce_s(work.stages[0], work, network) == pytest.approx(expected)
    gathered = all_gather_s(network, everyone, 2.0 * rest) + all_gather_s(network, pairs, 2.0 * experts / 4)
    assert gather_s(work.stages[0], work, network) == (pytest.approx(gathered) if state == "optimizer" else 0)


def test_the_search_chooses_it_and_no_pin_is_faster() -> None:
    """Where experts are most of the model, and each device sends few of their tokens."""
    model, cluster = many_experts(128), parse_spec("8xH100")
    job = Job(batch=32, sequence=2048, precision="bfloat16")
    free = make_plan(model, cluster, job, NO_CONSTRAINTS)
    assert free.decisions["sharding"] == "expert", free.decisions
    assert {form for parameter in free.parameters for form in parameter.stored[-1:]} == {"I", "G0"}
    assert free.prediction is not None
    for pins in ("ep=8", "ep=4 dp=8 zero=1", "ep=2 pp=2", "ep=4 pp=1 recompute=full", "tp=4 ep=4", "dp=8"):
        pinned = make_plan(model, cluster, job, parse_constraints(pins.split(), job.batch), tolerance=0.0)
        assert pinned.prediction is not None
        assert free.prediction.step_s <= pinned.prediction.step_s * 1.0101, pins


def test_traffic_counts_both_groups() -> None:
    """On one host: a ring of four devices for the shared parameters, two rings of two for the experts."""
    model, cluster = many_experts(), parse_spec("4xH100")
    decisions = ParallelConfig(
        shards=(1, 1), sharding="expert", replicas=(1, 1), microbatches=2, sharded_state="optimizer"
    )
    work = simulate_plan(build_plan(model, cluster, JOB, decisions), model, cluster).work
    traffic = step_traffic(work, Network(cluster), 2)
    experts, rest = counted(model)
    assert traffic.bytes[0, 1]["reduction"] == pytest.approx(4 * rest * 3 / 4)
    assert traffic.bytes[0, 1]["parameters"] == pytest.approx(2 * rest * 3 / 4)
    assert traffic.bytes[0, 2] == pytest.approx({"reduction": 4 * experts / 2 / 2, "parameters": 2 * experts / 2 / 2})


def test_groups_that_shard_state_are_not_tried_for_it() -> None:
    """On slow links between hosts a search of groups follows, and must not ask for them."""
    cluster = parse_spec("2x4xH100:25Gbit/s")
    plan = make_plan(many_experts(), cluster, JOB, parse_constraints(["ep=2", "dp=8", "zero=2", "microbatches=8"]))
    assert plan.decisions["sharding"] == "expert" and "state_group" not in plan.decisions


def test_uneven_replicas_take_microbatches_whose_rows_divide() -> None:
    job = Job(batch=12, sequence=1024, precision="bfloat16")
    cluster = parse_spec("5x2xH100:100Gbit/s")
    plan = make_plan(many_experts(), cluster, job, parse_constraints(["ep=2", "replicas=3:2", "pp=1"], 12))
    assert plan.decisions["microbatches"] == "3", "7 and 5 rows cannot be halved, 2 and 2 can"


def test_tables_name_the_program_if_plans_differ_in_it() -> None:
    """Expert and tensor parallelism may have equal choices otherwise."""
    expert, tensor, alone = ({"shards": "2", "sharding": name} for name in ("expert", "megatron-sp", "none"))
    keys = choice_keys(expert, tensor, alone)
    assert keys[keys.index("shards") + 1] == "sharding"
    assert "sharding" not in choice_keys(expert, alone, expert)


def test_a_plan_by_hand_is_checked() -> None:
    plan = build_plan(
        many_experts(), CLUSTER, JOB, ParallelConfig(**EXPERT, replicas=(1, 1), sharded_state="optimizer")
    )
    assert not list(plan_problems(plan))
    grouped = replace(plan, stages=(replace(plan.stages[0], state_group=2),))
    assert any("over all devices of a stage" in error.what for error in plan_problems(grouped))
    few = replace(plan, job=replace(JOB, batch=20), spaces=(replace(plan.spaces[0], rows=20),))
    assert any("do not divide among the devices" in error.what for error in plan_problems(few))


def test_bounds_of_uneven_replicas_hold_for_any_number_of_devices() -> None:
    """Three devices: 15 rows are five for each. A bound between 8 and 16 rows would take six of 16 on one device."""
    job, pins = Job(batch=27, sequence=512, precision="bfloat16"), ["ep=3", "replicas=5:4", "microbatches=1", "pp=1"]
    constraints = parse_constraints([*pins, "recompute=none"])
    context = PlannerContext(many_experts(), parse_spec("6xH100"))
    cutter = context.layer_cutter
    grid = list_base_grids(context, job, constraints)[0]
    bounds = LowerBounds(cutter, job, slicer_of(cutter, job, constraints)).bound_grid(grid)
    exact = cutter.stage_rows(job, grid.decisions_at(0))[0]
    assert cutter.rows_of(job, 1, (5, 4)) == (15, 12)
    assert bounds.lane_forward_s.max() <= exact.forward_s.sum() * (1 + 1e-9)


@pytest.mark.parametrize(
    ("pins", "told"),
    [
        ("ep=64", ["more devices than", "64 devices, 32 experts", "at most 32"]),
        ("shards=2:1 sharding=expert", ["same number of rows", "shares 2:1", "equal shares: shards=2"]),
        ("ep=4 microbatches=32", ["do not divide", "2 rows for 1 x 4 devices", "a multiple of 4 rows"]),
        ("ep=2 hsdp=2", ["over all devices of a stage", "leave out state_group"]),
        ("sharding=expert", ["A sharding needs the number of shards"]),
    ],
)
def test_what_it_does_not_go_with_is_refused(pins: str, told: list[str]) -> None:
    cluster = parse_spec("16x4xH100:400Gbit/s")
    with pytest.raises(PlanError) as refused:
        make_plan(many_experts(), cluster, JOB, parse_constraints(pins.split(), JOB.batch))
    assert all(text in str(refused.value) for text in told), str(refused.value)


def test_a_model_without_experts_is_refused() -> None:
    for ask in (
        lambda: make_plan(plans.model("llama"), CLUSTER, JOB, parse_constraints(["ep=2"])),
        lambda: build_plan(plans.model("llama"), CLUSTER, JOB, ParallelConfig(**EXPERT)),
    ):
        with pytest.raises(PlanError, match="this model has none"):
            ask()
