"""Assembling a plan from explicit decisions: deterministic, and the one place that does it.

The search calls it for its winner, tests and tools call it directly, and what a person writes by hand has the same
parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.cluster.topology import device_count
from pipefit.cluster.types import Cluster
from pipefit.codec import digest
from pipefit.cost.types import CostTable
from pipefit.errors import PlanError
from pipefit.layout import split
from pipefit.model.graph import Model
from pipefit.plan.decisions import Decisions, check_decisions
from pipefit.plan.order import make_order
from pipefit.plan.sharded import layer_programs
from pipefit.plan.structure import make_edges, make_groups, make_parameters, make_stages
from pipefit.plan.types import Hashes, Job, ModelSource, Plan, Space

VERSION = 1


def build_plan(
    model: Model,
    cluster: Cluster,
    job: Job,
    decisions: Decisions,
    *,
    name: str = "",
    costs: CostTable | None = None,
) -> Plan:
    """The plan that these decisions stand for, without predictions.

    `name` is what the user typed for the model. `costs`, where given, order the transfers by simulated time; without
    them all stages count as alike. Raises PlanError for decisions that contradict themselves, the job, the model or
    the cluster, and ScheduleError where the schedule cannot be made.
    """
    if len(model.modules) != 1:
        raise PlanError(
            "Plans of several modules are not searched yet; they can be written by hand.",
            where="model.modules",
            seen=", ".join(module.name for module in model.modules),
        )
    module = model.modules[0]
    check_decisions(decisions, job, len(module.layers), device_count(cluster))
    programs = layer_programs(model, module, decisions.sharding, decisions.shards)
    cuts = decisions.cuts or even_cuts(len(module.layers), decisions.stage_count)
    stages = make_stages(module, decisions, cuts, programs)
    edges = make_edges(module, stages, programs, len(decisions.shards))
    parameters = make_parameters(module, stages, programs, decisions.zero1 and len(decisions.replicas) > 1)
    groups = make_groups(decisions)
    return Plan(
        version=VERSION,
        job=job,
        model=ModelSource(name=name or model.family, family=model.family, config=model.config),
        groups=groups,
        spaces=(Space(name=module.space, rows=job.batch, tokens=job.sequence),),
        stages=stages,
        edges=edges,
        parameters=parameters,
        order=make_order(decisions, job, groups, stages, edges, parameters, costs),
        hashes=Hashes(model=model.hash, cluster=digest(cluster)),
        decisions=decisions.words(tuple(cuts)),
    )


def even_cuts(layers: int, stages: int) -> tuple[int, ...]:
    """Boundaries that give every stage the same number of layers, the first ones one more if need be."""
    return tuple(start for start, _ in split(layers, (1,) * stages)[1:])


def microbatch_rows(job: Job, microbatches: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Rows of one microbatch on each replica."""
    return tuple(stop - start for start, stop in split(job.batch // microbatches, shares))
