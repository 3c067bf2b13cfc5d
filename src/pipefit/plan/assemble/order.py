"""The order of a plan: the lanes of a schedule family, lowered, as text; and the rules for such lanes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pipefit.cost.types import CostTable
from pipefit.errors import PipefitError, PlanError, ScheduleError
from pipefit.optimizers.sharded_state import is_gathered_after_update
from pipefit.plan.assemble.pipeline_work import PlanSkeleton
from pipefit.plan.types import Edge, MeshPlan, ParameterPlan, Plan, SchedulePlan, Stage, collect_turns
from pipefit.schedule.actions import Schedule, format_lanes
from pipefit.schedule.families import find_family
from pipefit.schedule.lowering.frozen import frozen_stages, with_backward, without_backward
from pipefit.schedule.lowering.lower import lower_schedule
from pipefit.schedule.problem import ScheduleProblem


def computed_schedule(
    family_name: str, parts: PlanSkeleton, costs: CostTable | None, limit_bytes: Sequence[float] | None = None
) -> Schedule:
    """Return the order of the named family for these parts: compute actions only.

    `limit_bytes` of every lane matter to families that adapt to memory. Raises ScheduleError if the family has no order
    for these parts.
    """
    return find_family(family_name)(order_problem(parts, costs, limit_bytes))


def order_problem(
    parts: PlanSkeleton, costs: CostTable | None, limit_bytes: Sequence[float] | None = None
) -> ScheduleProblem:
    """Return the scheduling problem of these parts."""
    return ScheduleProblem(
        placement=parts.placement,
        microbatches=parts.microbatches,
        slices=len(parts.slices),
        edges=edge_keys(parts.edges),
        costs=costs,
        limit_bytes=None if limit_bytes is None else tuple(limit_bytes),
        turns=collect_turns(parts.stages),
    )


def lower_for_plan(
    computed: Schedule,
    groups: Sequence[MeshPlan],
    stages: Sequence[Stage],
    edges: Sequence[Edge],
    parameters: Sequence[ParameterPlan],
    costs: CostTable | None = None,
    frozen: Collection[int] = (),
) -> Schedule:
    """Return the lowered schedule, with the reductions and gathers of the parameters, and without the backward of the
    `frozen` stages (`find_frozen_stages`)."""
    return lower_schedule(
        without_backward(computed, frozen),
        edge_keys(edges),
        costs,
        reductions=reduced_stages(groups, stages),
        tied=tied_buckets(parameters),
        zero=gathered_stages(groups, stages, parameters),
    )


def make_schedule_plan(schedule: Schedule, slices: Sequence[int]) -> SchedulePlan:
    """Return a lowered schedule as it stands in a plan file; `slices` are the token counts."""
    return SchedulePlan(
        name=schedule.name,
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        slices=tuple(slices),
        lanes=format_lanes(schedule.lanes),
    )


def edge_keys(edges: Sequence[Edge]) -> tuple[tuple[int, int, str], ...]:
    """Return the edges as schedules name them: (source, target, tensor)."""
    return tuple((edge.source, edge.target, edge.tensor) for edge in edges)


def reduced_stages(groups: Sequence[MeshPlan], stages: Sequence[Stage]) -> tuple[int, ...]:
    """Return the stages on several devices: gradients are summed over replicas, and over shards if replicated there."""
    return tuple(index for index, stage in enumerate(stages) if len(groups[stage.group].devices) > 1)


def gathered_stages(
    groups: Sequence[MeshPlan], stages: Sequence[Stage], parameters: Sequence[ParameterPlan]
) -> tuple[int, ...]:
    """Return the stages that use a trained parameter that is all-gathered after each update: its optimizer state is
    sharded over an axis of more than one device, and it is stored complete."""
    gathered: set[int] = set()
    for parameter in parameters:
        if not parameter.trainable:
            continue
        axes = groups[stages[parameter.owner].group].axes
        for axis, form in zip(axes, parameter.state, strict=True):
            if is_gathered_after_update(form) and len(axis.shares) > 1:
                gathered.update(parameter.uses)
    return tuple(sorted(gathered))


def find_frozen_stages(stages: int, edges: Sequence[Edge], parameters: Sequence[ParameterPlan]) -> frozenset[int]:
    """Return the stages without a backward pass: neither they nor stages before them hold trained parameters."""
    trained = {use for parameter in parameters if parameter.trainable for use in parameter.uses}
    return frozen_stages(stages, edge_keys(edges), trained)


def tied_buckets(parameters: Sequence[ParameterPlan]) -> dict[str, tuple[int, ...]]:
    """Return {bucket name: stages} for parameters used by several stages. Stages 0 and 3 share the bucket
    `tied.0.3`."""
    uses = {parameter.uses for parameter in parameters if len(parameter.uses) > 1 and parameter.trainable}
    return {"tied." + ".".join(map(str, stages)): stages for stages in sorted(uses)}


def order_problems(plan: Plan) -> Iterator[PipefitError]:
    """Yield every error of the lanes: they must parse, have each unit of work once, match the edges, and not
    deadlock."""
    try:
        schedule = plan.to_schedule()
    except ScheduleError as error:
        yield error
        return
    if not schedule.is_lowered:
        yield PlanError(
            "The lanes of a plan are lowered: with transfers, reductions, NORM and STEP.",
            where="order.lanes",
            next_step="lower them with pipefit.plan.assemble.order.lower_for_plan",
        )
        return
    yield from _schedule_problems(schedule, plan)


def _schedule_problems(schedule: Schedule, plan: Plan) -> Iterator[PipefitError]:
    from pipefit.schedule.check.deadlock import find_deadlock
    from pipefit.schedule.check.rules import check_schedule

    try:
        check_schedule(
            schedule, edge_keys(plan.edges), find_frozen_stages(len(plan.stages), plan.edges, plan.parameters)
        )
    except ScheduleError as error:
        yield error
        return
    deadlock = find_deadlock(schedule)
    if deadlock is not None:
        yield deadlock
        return
    have = {(action.kind, action.stage, action.what) for _, _, action in schedule}
    trained = with_backward(schedule)
    wanted = {("REDUCE", stage, "") for stage in reduced_stages(plan.groups, plan.stages) if stage in trained}
    wanted |= {("REDUCE", stage, name) for name, stages in tied_buckets(plan.parameters).items() for stage in stages}
    wanted |= {("GATHER", stage, "") for stage in gathered_stages(plan.groups, plan.stages, plan.parameters)}
    for kind, stage, what in sorted(wanted - have):
        yield PlanError(
            "The lanes lack an action that the plan needs.",
            where=f"order.lanes[{schedule.placement[stage]}]",
            seen=f"no {stage}{kind}" + (f":{what}" if what else ""),
        )
