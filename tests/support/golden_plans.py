"""How the golden plans are made. The files in golden/ are what counts: small, complete, to be read and checked by hand.

`PIPEFIT_REGENERATE=1 pytest tests/plan/test_golden.py` writes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.support.plan_toys import PATCH, PATCHES, WIDTH, seeing_model, toy_cluster, toy_model

from pipefit.cluster import Cluster
from pipefit.codec import content_digest
from pipefit.model.graph import Model
from pipefit.plan.assemble.order import lower_for_plan, make_schedule_plan
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import (
    AxisPlan,
    Edge,
    EdgeTransfer,
    InputHashes,
    Job,
    MeshPlan,
    ModelSource,
    ParameterPlan,
    Plan,
    SampleSpace,
    Stage,
)
from pipefit.schedule.actions import Schedule, parse_lanes

JOB = Job(batch=8, sequence=16)


@dataclass(frozen=True, slots=True)
class Golden:
    """A plan, and what it is for."""

    model: Model
    cluster: Cluster
    plan: Plan


def v_placement() -> Golden:
    """Two lanes, four stages: lane 0 holds the first and the last. The order is written by hand, W after I."""
    model, cluster = toy_model(5), toy_cluster(1, 2)
    context = PlannerContext(model, cluster)
    decisions = ParallelConfig(stages=4, cuts=(2, 4, 6), placement=(0, 1, 1, 0), microbatches=4, schedule="v-by-hand")
    parts = context.make_skeleton(JOB, decisions)
    lanes = parse_lanes(
        (
            "0F0 0F1 3F0 3I0 0F2 3F1 3I1 3W0 0I0 0F3 3F2 3I2 3W1 0I1 0W0 3F3 3I3 3W2 0I2 0W1 3W3 0I3 0W2 0W3",
            "1F0 2F0 1F1 2F1 2I0 1I0 1F2 2F2 2W0 2I1 1I1 1W0 1F3 2F3 2W1 2I2 1I2 1W1 2W2 2I3 1I3 1W2 2W3 1W3",
        )
    )
    computed = Schedule(name="v-by-hand", placement=(0, 1, 1, 0), microbatches=4, slices=1, lanes=lanes)
    parameters = context.plan_parameters(parts, decisions)
    lowered = lower_for_plan(
        computed, parts.groups, parts.stages, parts.edges, parameters, context.build_cost_table(parts)
    )
    return Golden(model, cluster, context.assemble_plan(parts, decisions, lowered))


def slices() -> Golden:
    """Sequences cut into three uneven slices."""
    model, cluster = toy_model(2), toy_cluster(1, 2)
    decisions = ParallelConfig(stages=2, cuts=(2,), microbatches=2, schedule="1f1b", slices=(8, 5, 3))
    return Golden(model, cluster, build_plan(model, cluster, JOB, decisions))


def tied_embeddings() -> Golden:
    """Embedding and head share one tensor and are on two stages."""
    model, cluster = toy_model(2, tied=True), toy_cluster(1, 2)
    return Golden(model, cluster, build_plan(model, cluster, JOB, ParallelConfig(stages=2, cuts=(2,), microbatches=4)))


def split_state() -> Golden:
    """ZeRO-1 over two replicas, of parameters that lie over two shards with split tokens."""
    model, cluster = toy_model(2), toy_cluster(1, 8)
    decisions = ParallelConfig(
        stages=2,
        cuts=(2,),
        microbatches=4,
        replicas=(1, 1),
        shards=(1, 1),
        sharding="megatron-sp",
        sharded_state="optimizer",
    )
    return Golden(model, cluster, build_plan(model, cluster, JOB, decisions))


def uneven_replicas() -> Golden:
    """The first replica takes two rows of three."""
    model, cluster = toy_model(2), toy_cluster(1, 4)
    decisions = ParallelConfig(stages=2, cuts=(2,), microbatches=4, replicas=(2, 1))
    return Golden(model, cluster, build_plan(model, cluster, Job(batch=12, sequence=16), decisions))


def uneven_shards() -> Golden:
    """The first shard takes three columns of four."""
    model, cluster = toy_model(2), toy_cluster(1, 4)
    decisions = ParallelConfig(stages=2, cuts=(2,), microbatches=4, shards=(3, 1), sharding="megatron")
    return Golden(model, cluster, build_plan(model, cluster, JOB, decisions))


def two_modules() -> Golden:
    """Vision on three replicas feeds language on two: another space, another number of replicas, no shard axis."""
    model, cluster = seeing_model(), toy_cluster(1, 7)
    groups = tuple(
        MeshPlan(axes=(AxisPlan(name="replica", shares=shares),), devices=devices)
        for shares, devices in (((1, 1, 1), (0, 1, 2)), ((1, 1), (3, 4)), ((1, 1), (5, 6)))
    )
    stages = (
        Stage(module="vision", layers=(0, 2), group=0, space="pictures"),
        Stage(module="language", layers=(0, 2), group=1),
        Stage(module="language", layers=(2, 5), group=2),
    )
    rows = EdgeTransfer(sent=("G0",), wire=("G0",), received=("G0",))
    edges = (
        Edge(source=0, target=1, tensor="pictures", forward=rows, gradient=rows),
        Edge(source=1, target=2, forward=rows, gradient=rows),
    )
    parameters = _parameters(model, stages)
    computed = Schedule(
        name="by-hand",
        placement=(0, 1, 2),
        microbatches=4,
        slices=1,
        lanes=parse_lanes(
            (
                "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
                "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
                "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
            )
        ),
    )
    plan = Plan(
        version=1,
        job=JOB,
        model=ModelSource(name="user", family=model.family, config=model.config),
        groups=groups,
        spaces=(
            SampleSpace(name="samples", rows=JOB.batch, tokens=JOB.sequence),
            SampleSpace(name="pictures", rows=2 * JOB.batch, tokens=PATCHES),
        ),
        stages=stages,
        edges=edges,
        parameters=parameters,
        order=make_schedule_plan(lower_for_plan(computed, groups, stages, edges, parameters), (JOB.sequence,)),
        hashes=InputHashes(model=model.hash, cluster=content_digest(cluster)),
        decisions={"vision": "3 replicas", "language": "2 replicas x 2 stages"},
    )
    assert (PATCH, WIDTH) == (12, 8), "the file is read by people: keep its numbers"
    return Golden(model, cluster, plan)


def _parameters(model: Model, stages: tuple[Stage, ...]) -> tuple[ParameterPlan, ...]:
    modules = {module.name: module for module in model.modules}
    return tuple(
        ParameterPlan(
            name=layer.parameters[spec.name],
            shape=spec.shape,
            uses=(index,),
            stored=("I",),
            state=("I",),
            owner=index,
        )
        for index, stage in enumerate(stages)
        for layer in modules[stage.module].layers[stage.layers[0] : stage.layers[1]]
        for spec in model.graphs[layer.graph].parameters
    )


GOLDEN: Mapping[str, Callable[[], Golden]] = {
    "v-placement": v_placement,
    "slices": slices,
    "tied-embeddings": tied_embeddings,
    "split-state": split_state,
    "two-modules": two_modules,
    "uneven-replicas": uneven_replicas,
    "uneven-shards": uneven_shards,
}
