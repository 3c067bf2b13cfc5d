"""Check for valid plans that the worker does not support yet."""

from __future__ import annotations

from pipefit.errors import PlanError
from pipefit.layout import Mesh
from pipefit.plan.types import Plan


def check_runnable(plan: Plan) -> None:
    """Raise PlanError for a valid plan that the worker does not support yet."""
    packed = [space.name for space in plan.spaces if not space.tokens]
    if packed and len(plan.order.slices) > 1:
        raise PlanError(
            "Packed images are not cut into slices of tokens.",
            where="order.slices",
            seen=f"{len(plan.order.slices)} slices, with the packed space {packed[0]!r}",
            allowed="one slice: the whole sequence",
        )
    for index, stage in enumerate(plan.stages):
        if stage.microbatch_multiple > 1:
            _check_together(plan, index, packed)
        first = plan.lane_mesh(plan.order.placement[index])
        if not packed and plan.stage_mesh(index) != first:
            raise PlanError(
                "Text stages on the same devices must use the same mesh.",
                where=f"stages[{index}].group",
                seen=f"{_describe_grid(plan.stage_mesh(index))}, beside {_describe_grid(first)}",
                allowed="one mesh for all stages of a lane, with the same shares and order of devices",
            )
        group = plan.stage_mesh(index)
        for device in group.devices:
            axis = group.devices_along(device, ("expert", "shard"))
            if list(axis) != sorted(axis):
                raise PlanError(
                    "The devices of a shard axis must be in rising order: ranks are numbered by device.",
                    where=f"groups[{stage.group}].devices",
                    seen=axis,
                )


def _describe_grid(group: Mesh) -> str:
    axes = ", ".join(f"{axis.name} {':'.join(map(str, axis.shares))}" for axis in group.axes)
    return f"{axes} on {', '.join(map(str, group.devices))}"


def _check_together(plan: Plan, index: int, packed: list[str]) -> None:
    """Check a stage that takes several microbatches together: its tensors are split and joined along their tokens."""
    stage = plan.stages[index]
    if stage.space not in packed:
        raise PlanError(
            "Only stages of packed images take several microbatches together.",
            where=f"stages[{index}].microbatch_multiple",
            seen=f"{stage.microbatch_multiple} in the space {stage.space!r}",
            allowed="1, or a space whose rows differ",
        )
    for number, edge in enumerate(plan.edges):
        ends = (edge.forward.sent, edge.gradient.received), (edge.forward.received, edge.gradient.sent)
        for end_stage, forms in zip((edge.source, edge.target), ends, strict=True):
            axes = plan.stage_mesh(index).axes
            if end_stage == index and any(
                axis.name == "shard" and axis.size > 1 and "G1" in (forward_form, gradient_form)
                for axis, forward_form, gradient_form in zip(axes, *forms, strict=True)
            ):
                raise PlanError(
                    "A stage that takes several microbatches together needs their tokens replicated over its shards.",
                    where=f"edges[{number}], stage {index}",
                    seen="G1 along the shards",
                    allowed="I along the shards (megatron, not megatron-sp)",
                )
