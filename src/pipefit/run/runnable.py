"""What plans can express and the worker does not run yet."""

from __future__ import annotations

from pipefit.errors import PlanError
from pipefit.layout import Group
from pipefit.plan.types import Plan


def check_runnable(plan: Plan) -> None:
    """Raises PlanError for what plans can express and the worker does not run yet."""
    packed = [space.name for space in plan.spaces if not space.tokens]
    if packed and len(plan.order.slices) > 1:
        raise PlanError(
            "Packed images are not cut into slices of tokens.",
            where="order.slices",
            seen=f"{len(plan.order.slices)} slices, with the packed space {packed[0]!r}",
            allowed="one slice: the whole sequence",
        )
    for index, stage in enumerate(plan.stages):
        first = plan.lane_group(plan.order.placement[index])
        if plan.groups[stage.group].group() != first:
            raise PlanError(
                "Stages on the same devices that lie there in different grids are not run yet.",
                where=f"stages[{index}].group",
                seen=f"{_grid(plan.groups[stage.group].group())}, beside {_grid(first)}",
                allowed="one grid for all stages of a lane, with the same shares and order of devices",
                next_step="give modules of different layouts devices of their own",
            )
        if stage.microbatch_multiple != 1:
            raise PlanError(
                "A stage that takes several microbatches together can be planned and simulated, but not run yet.",
                where=f"stages[{index}].microbatch_multiple",
                seen=stage.microbatch_multiple,
                allowed="1",
            )
        group = plan.groups[stage.group].group()
        for device in group.devices:
            axis = group.along(device, ("shard",))
            if list(axis) != sorted(axis):
                raise PlanError(
                    "The devices of a shard axis must be in rising order: ranks are numbered by device.",
                    where=f"groups[{stage.group}].devices",
                    seen=axis,
                )
        for axis_ in group.axes:
            if axis_.name not in ("replica", "shard") and axis_.size > 1:
                raise PlanError("This axis is not run yet.", where=f"groups[{stage.group}].axes", seen=axis_.name)


def _grid(group: Group) -> str:
    axes = ", ".join(f"{axis.name} {':'.join(map(str, axis.shares))}" for axis in group.axes)
    return f"{axes} on {', '.join(map(str, group.devices))}"
