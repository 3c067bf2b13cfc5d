"""Context parallelism: which jobs and models may split their sequences over devices.

Each of c devices holds two of 2 c chunks of every sequence (`layout.zigzag_runs`). Only attention sees the tokens of
other devices: it gathers their keys and values. All other operators must work on each token separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pipefit.errors import PlanError
from pipefit.model.graph import Graph, Model
from pipefit.model.ops import KINDS
from pipefit.plan.request.sliceable import layer_obstacles
from pipefit.plan.types import Job, Plan

CONTEXT: Final = "context"
"""The mesh axis, and the key of `--fix`."""

HOLD_PARTS: Final = "hold the parts of a sequence"


def check_context(parts: int, job: Job, sharding: str, slices: int, where: str) -> None:
    """Raise PlanError if a job's sequences cannot be split into this many parts, beside this sharding and number of
    slices."""
    if parts == 1:
        return
    if job.sequence % (2 * parts):
        raise PlanError(
            "The sequence cannot be split into equal parts: every device holds two chunks of equal length.",
            where=where,
            seen=f"{job.sequence} tokens in {2 * parts} chunks",
            allowed=f"a sequence of a multiple of {2 * parts} tokens",
            next_step=f"use --seq {max(1, job.sequence // (2 * parts)) * 2 * parts}, or another {CONTEXT}",
        )
    if slices > 1:
        raise PlanError(
            "Sequences that are split over devices cannot be cut into token slices as well.",
            where=f"{where} and slices",
            seen=f"{parts} parts and {slices} slices",
            allowed=f"slices=1, or {CONTEXT}=1",
            next_step=f"leave out the slices, or {CONTEXT}",
        )
    if job.documents == "apart":
        raise PlanError(
            "Documents cannot be kept apart in sequences that are split over devices.",
            where=f"{where} and job.documents",
            seen=f"{parts} parts, documents apart",
            allowed=f"joined documents, or {CONTEXT}=1",
            next_step=f"plan with --documents joined, or leave out {CONTEXT}",
        )
    if sharding == "searched":
        raise PlanError(
            "Searched shard programs cannot run on sequences that are split over devices.",
            where=f"{where} and sharding",
            seen=f"{parts} parts, sharding searched",
            allowed="none, megatron, megatron-sp or expert",
            next_step="add --fix sharding=megatron-sp",
        )


def check_context_model(model: Model, parts: int, where: str) -> None:
    """Raise PlanError for the first layer that prevents splitting sequences into several parts."""
    for error in context_obstacles(model, where) if parts > 1 else ():
        raise error


def context_problems(plan: Plan, model: Model) -> Iterator[PlanError]:
    """Yield the reasons why a plan whose meshes have a context axis cannot run."""
    yield from mesh_problems(plan)
    if any(axis.name == CONTEXT and len(axis.shares) > 1 for group in plan.groups for axis in group.axes):
        yield from context_obstacles(model, "groups (context)")


def mesh_problems(plan: Plan) -> Iterator[PlanError]:
    """Yield errors of the context axes of a plan's meshes."""
    sizes = {index: group.to_mesh().find_axis(CONTEXT) for index, group in enumerate(plan.groups)}
    for index, axis in sizes.items():
        if axis.size > 1 and not axis.is_even:
            yield PlanError(
                "The parts of a sequence on the devices of a context axis are equal.",
                where=f"groups[{index}].axes ({CONTEXT}).shares",
                seen=axis.shares,
                allowed="equal shares",
            )
    if len({axis.size for axis in sizes.values()}) > 1:
        yield PlanError(
            "All stages split sequences into the same number of parts.",
            where=f"groups.axes ({CONTEXT})",
            seen=", ".join(f"{axis.size} in groups[{index}]" for index, axis in sizes.items()),
            allowed="one size for all groups",
        )
        return
    size = next((axis.size for axis in sizes.values()), 1)
    try:
        for index, group in enumerate(plan.groups):
            mesh = group.to_mesh()
            for device in group.devices:
                check_rising(mesh.devices_along(device, (CONTEXT,)), HOLD_PARTS, f"groups[{index}].devices")
        for stage in plan.stages:
            check_context(size, plan.job, stage.sharding, len(plan.order.slices), f"groups.axes ({CONTEXT})")
    except PlanError as error:
        yield error


def check_device_order(parts: int, shards: int, devices: Sequence[int], where: str) -> None:
    """Raise PlanError unless the parts of each sequence are on devices in rising order. `devices` are those of a lane,
    in grid order."""
    for start in range(0, len(devices) if parts > 1 else 0, parts * shards):
        for shard in range(shards):
            check_rising(devices[start : start + parts * shards][shard::shards], HOLD_PARTS, where)


def check_rising(devices: Sequence[int], task: str, where: str) -> None:
    """Raise PlanError unless devices with a common task are in rising order."""
    if list(devices) != sorted(devices):
        raise PlanError(
            f"The devices that {task} must be in rising order: ranks are numbered by device.",
            where=where,
            seen=", ".join(map(str, devices)),
            allowed=", ".join(map(str, sorted(devices))),
        )


def context_obstacles(model: Model, where: str) -> Iterator[PlanError]:
    """Yield an error for every layer that prevents splitting sequences over devices; none if it is possible."""
    if len(model.modules) > 1:
        yield PlanError(
            "The sequences of a model of several modules cannot be split over devices.",
            where=where,
            seen=", ".join(module.name for module in model.modules),
            allowed=f"{CONTEXT}=1",
            next_step=f"leave out {CONTEXT}",
        )
        return
    for module in model.modules:
        for layer in module.layers:
            graph, where_layer = model.layer_graph(layer), f"{where} and layer {layer.name}"
            obstacle = next(layer_obstacles(graph, where_layer, sees_later=True), None)
            seen = obstacle.seen if obstacle is not None else _unsplit_input(graph)
            if seen:
                yield PlanError(
                    "Sequences cannot be split over devices: a layer mixes tokens outside of attention, or may do so.",
                    where=where_layer if obstacle is None else obstacle.where,
                    seen=seen,
                    allowed=f"{CONTEXT}=1",
                    next_step=f"leave out {CONTEXT}; or write the layer so that it can be captured, with "
                    "scaled_dot_product_attention (docs/reference/models.md)",
                )


def _unsplit_input(graph: Graph) -> str:
    """Return, in words, an operator or input that is not split along the tokens of sequences; '' if there is none."""
    for operator in graph.operators:
        kind = KINDS[operator.kind]
        if kind.is_attention and not kind.read_later:
            return operator.kind
    return next((f"input {tensor.name!r}" for tensor in graph.inputs if tensor.role in ("data", "documents")), "")
