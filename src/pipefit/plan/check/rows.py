"""Rules about the order: stages on lanes, rows on microbatches and replicas, slices on the sequence."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.errors import PlanError
from pipefit.layout import split_by_shares
from pipefit.plan.types import Plan


def placement_problems(plan: Plan) -> Iterator[PlanError]:
    order = plan.order
    if len(order.placement) != len(plan.stages):
        yield PlanError(
            "The placement needs a lane for every stage.",
            where="order.placement",
            seen=f"{len(order.placement)} lanes for {len(plan.stages)} stages",
        )
        return
    if {*order.placement} != {*range(len(order.lanes))}:
        yield PlanError(
            "Lanes are numbered from 0 without gaps, and each holds a stage.",
            where="order.placement",
            seen=order.placement,
            allowed=f"0 to {len(order.lanes) - 1}",
        )
        return
    yield from _lanes_of_stages(plan)
    yield from _row_problems(plan)
    if order.slices and (sum(order.slices) != plan.job.sequence or min(order.slices) < 1):
        yield PlanError(
            "The slices must add up to the sequence.",
            where="order.slices",
            seen=f"{order.slices}: {sum(order.slices)} tokens",
            allowed=f"positive lengths adding up to {plan.job.sequence}",
        )
    if not order.slices:
        yield PlanError(
            "One slice is the whole sequence.", where="order.slices", seen="()", allowed=f"[{plan.job.sequence}]"
        )


def _lanes_of_stages(plan: Plan) -> Iterator[PlanError]:
    holder: dict[frozenset[int], int] = {}
    for index, (stage, lane) in enumerate(zip(plan.stages, plan.order.placement, strict=True)):
        devices = frozenset(plan.groups[stage.group].devices)
        if holder.setdefault(devices, lane) != lane:
            yield PlanError(
                "The same devices are on two lanes.",
                where=f"order.placement[{index}]",
                seen=f"lanes {holder[devices]} and {lane}",
            )
        first = plan.groups[plan.stages[plan.order.placement.index(lane)].group].devices
        if frozenset(first) != devices:
            yield PlanError(
                "The stages of a lane are held by the same devices.",
                where=f"stages[{index}].group",
                seen=f"devices {sorted(devices)} on lane {lane}, which has {sorted(first)}",
            )


def _row_problems(plan: Plan) -> Iterator[PlanError]:
    microbatches = plan.order.microbatches
    if microbatches < 1 or plan.job.batch % microbatches:
        yield PlanError(
            "The batch cannot be cut into this many equal microbatches.",
            where="order.microbatches",
            seen=f"batch {plan.job.batch}, microbatches {microbatches}",
            allowed="a divisor of the batch",
        )
        return
    spaces = {space.name: space for space in plan.spaces}
    for index, stage in enumerate(plan.stages):
        rows, multiple = spaces[stage.space].rows, stage.microbatch_multiple
        if microbatches % multiple or rows * multiple % microbatches:
            yield PlanError(
                "The rows of the stage's space cannot be cut into the schedule's microbatches.",
                where=f"stages[{index}].space",
                seen=f"{rows} rows, {microbatches} microbatches, {multiple} taken together",
            )
            continue
        replicas = plan.groups[stage.group].to_mesh().find_axis("replica")
        if stage.divide == "images":  # a replica without images has an empty packed row
            continue
        if any(start == stop for start, stop in split_by_shares(rows * multiple // microbatches, replicas.shares)):
            yield PlanError(
                "A replica would get no row of a microbatch.",
                where=f"stages[{index}]",
                seen=f"{rows * multiple // microbatches} rows over shares {replicas.shares}",
                next_step="use fewer microbatches or replicas, or more even shares",
            )
