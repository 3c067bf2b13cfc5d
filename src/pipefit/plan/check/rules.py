"""The rules of a valid plan. Each is a small function that yields a PlanError for every error, with the name of the
field.

`check_plan` raises the first; `plan_problems` yields all. `check_staleness` rejects a plan made for another model or
cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pipefit.cluster.topology import device_count
from pipefit.cluster.types import Cluster
from pipefit.codec import content_digest, dump_text, load_file, write_file
from pipefit.errors import PipefitError, PlanError, StalePlanError
from pipefit.model.graph import Model
from pipefit.optimizers import find_optimizer
from pipefit.plan.assemble.order import order_problems
from pipefit.plan.check.forms import edge_problems, parameter_problems
from pipefit.plan.check.rows import placement_problems
from pipefit.plan.check.turns import turn_problems
from pipefit.plan.request.context_parts import context_problems, mesh_problems
from pipefit.plan.request.expert_parts import expert_problems
from pipefit.plan.request.sequence_length import length_problems
from pipefit.plan.request.sliceable import document_problems, shard_problems, slice_problems
from pipefit.plan.request.state_groups import state_group_problems
from pipefit.plan.types import Plan
from pipefit.shard.apart import row_problems

VERSIONS = (1, 2)
"""Version 2 added named recipe sets; files of version 1 have the same meaning as before."""


def load_plan(path: str | Path) -> Plan:
    """Return the plan in a file, checked. Raises FormatError (not a plan file) or PlanError (the first
    contradiction)."""
    plan = load_file(Plan, Path(path))
    check_plan(plan)
    return plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as text that people can read, edit and diff. Raises PlanError if the file cannot be written."""
    write_file(path, dump_text(plan), "plan", PlanError)


def check_plan(plan: Plan, model: Model | None = None, cluster: Cluster | None = None) -> None:
    """Raise PlanError (or ScheduleError, which draws the cell) for the first rule that the plan breaks.

    With a model, the plan must have its layers and parameters, and must not exceed its positions. With a cluster, the
    plan's devices must exist.
    """
    for error in plan_problems(plan, model, cluster):
        raise error


def plan_problems(plan: Plan, model: Model | None = None, cluster: Cluster | None = None) -> Iterator[PipefitError]:
    """Yield every error, in the order of the file. The list ends after the first rule with errors, since later rules
    rely on it."""
    for rule in RULES:
        breaches = list(rule(plan))
        yield from breaches
        if breaches:
            return
    if model is not None:
        yield from context_problems(plan, model)
        yield from _model_problems(plan, model)
        yield from length_problems(plan, model)
        yield from row_problems(model)
        yield from slice_problems(plan, model)
        yield from document_problems(plan, model)
    if cluster is not None:
        yield from _cluster_problems(plan, cluster)


def check_staleness(plan: Plan, model: Model | None = None, cluster: Cluster | None = None) -> None:
    """Raise StalePlanError with the inputs that changed since the plan was made. Empty hashes are not compared."""
    changed = []
    if model is not None and plan.hashes.model and plan.hashes.model != model.hash:
        changed.append(("model", plan.hashes.model, model.hash))
    if cluster is not None and plan.hashes.cluster and plan.hashes.cluster != content_digest(cluster):
        changed.append(("cluster", plan.hashes.cluster, content_digest(cluster)))
    if changed:
        names = " and ".join(name for name, _, _ in changed)
        raise StalePlanError(
            f"The plan is stale: the {names} changed since it was made.",
            where="hashes." + ", hashes.".join(name for name, _, _ in changed),
            seen=", ".join(f"{name} {now}" for name, _, now in changed),
            allowed=", ".join(f"{name} {then}" for name, then, _ in changed),
            next_step="make the plan again with `pipefit plan`",
        )


def _version_problems(plan: Plan) -> Iterator[PlanError]:
    if plan.version not in VERSIONS:
        yield PlanError(
            "This version of the plan format is unknown.",
            where="version",
            seen=plan.version,
            allowed=" or ".join(map(str, VERSIONS)),
        )


def _job_problems(plan: Plan) -> Iterator[PlanError]:
    for name, value in (("batch", plan.job.batch), ("sequence", plan.job.sequence)):
        if value < 1:
            yield PlanError("A whole number above zero is needed.", where=f"job.{name}", seen=value)
    try:
        find_optimizer(plan.job.optimizer)
    except PlanError as error:
        yield error


def _tied_state_problems(plan: Plan) -> Iterator[PlanError]:
    """Find tied parameters whose copies would drift apart: their optimizer sums over a mesh, and the meshes differ, so
    the sums are rounded in different orders."""
    optimizer = find_optimizer(plan.job.optimizer)
    for parameter in plan.parameters:
        grids = {plan.stage_mesh(use).axes for use in parameter.uses}
        if parameter.trainable and len(grids) > 1 and optimizer.shared_state(parameter.shape):
            yield PlanError(
                f"The optimizer {optimizer.name} needs equal meshes for all stages that use a tied parameter.",
                where=f"parameters ({parameter.name}).uses",
                seen=f"{len(grids)} different meshes",
                allowed="one mesh for all of them, or an element-wise optimizer such as adamw",
            )


def _group_problems(plan: Plan) -> Iterator[PlanError]:
    if not plan.groups:
        yield PlanError("A plan needs at least one group.", where="groups")
    for index, group in enumerate(plan.groups):
        where = f"groups[{index}]"
        names = [axis.name for axis in group.axes]
        if len({*names}) != len(names):
            yield PlanError("An axis is named twice.", where=f"{where}.axes", seen=", ".join(names))
        size = 1
        for axis in group.axes:
            size *= len(axis.shares)
            if not axis.shares or min(axis.shares) < 1:
                yield PlanError(
                    "Shares are positive whole numbers.", where=f"{where}.axes ({axis.name}).shares", seen=axis.shares
                )
        if size != len(group.devices):
            yield PlanError(
                "The axes and the devices do not match: the product of the axis sizes is the number of devices.",
                where=f"{where}.devices",
                seen=f"{len(group.devices)} devices for {' x '.join(str(len(axis.shares)) for axis in group.axes)}",
            )
        if len({*group.devices}) != len(group.devices) or min(group.devices, default=0) < 0:
            yield PlanError("The devices of a group must be different numbers from 0 on.", where=f"{where}.devices")
    yield from _overlap_problems(plan)


def _overlap_problems(plan: Plan) -> Iterator[PlanError]:
    first: dict[int, int] = {}
    for index, group in enumerate(plan.groups):
        for device in group.devices:
            first_group = first.setdefault(device, index)
            if {*plan.groups[first_group].devices} != {*group.devices}:
                yield PlanError(
                    "Two groups share some of their devices; groups are disjoint, or hold the same devices.",
                    where=f"groups[{first_group}] and groups[{index}]",
                    seen=f"device {device} is in both",
                )
                return


def _space_problems(plan: Plan) -> Iterator[PlanError]:
    names = [space.name for space in plan.spaces]
    if len({*names}) != len(names):
        yield PlanError("Two spaces have the same name.", where="spaces", seen=", ".join(names))
    for space in plan.spaces:
        if space.rows < 1 or space.tokens < 0:
            yield PlanError(
                "A space has at least one row.", where=f"spaces ({space.name})", seen=f"{space.rows} x {space.tokens}"
            )


def _stage_problems(plan: Plan) -> Iterator[PlanError]:
    if not plan.stages:
        yield PlanError("A plan needs at least one stage.", where="stages")
    spaces = [space.name for space in plan.spaces]
    reached: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        where = f"stages[{index}]"
        start, stop = stage.layers
        again = stage.turn > 0 and stop == reached.get(stage.module, 0)
        if (start != reached.get(stage.module, 0) and not again) or stop <= start:
            yield PlanError(
                "Every layer of a module belongs to exactly one stage, in order (or to one of each turn).",
                where=f"{where}.layers",
                seen=f"{start} to {stop}",
                allowed=f"a run that starts at layer {reached.get(stage.module, 0)} of module {stage.module!r}",
            )
        reached[stage.module] = stop
        if not 0 <= stage.group < len(plan.groups):
            yield PlanError(
                "There is no such group.",
                where=f"{where}.group",
                seen=stage.group,
                allowed=f"0 to {len(plan.groups) - 1}",
            )
            continue
        if stage.space not in spaces:
            yield PlanError(
                "There is no such space.", where=f"{where}.space", seen=stage.space, allowed=", ".join(spaces)
            )
        shards = plan.groups[stage.group].to_mesh().find_axis("shard").size
        if (stage.sharding == "none") != (shards == 1):
            yield PlanError(
                "A stage is sharded exactly when its group has more than one shard.",
                where=f"{where}.sharding",
                seen=f"{stage.sharding!r} on {shards} shard(s)",
            )
        if stage.microbatch_multiple < 1:
            yield PlanError(
                "A whole number above zero is needed.",
                where=f"{where}.microbatch_multiple",
                seen=stage.microbatch_multiple,
            )
        yield from _divide_problems(plan, index)
    used = {stage.group for stage in plan.stages}
    for index in range(len(plan.groups)):
        if index not in used:
            yield PlanError("A group that no stage uses.", where=f"groups[{index}]", next_step="leave it out")


def _divide_problems(plan: Plan, index: int) -> Iterator[PlanError]:
    """Yield errors of a stage that divides images: its space must have images whose tokens add up to those of the
    samples."""
    stage = plan.stages[index]
    space = next((candidate for candidate in plan.spaces if candidate.name == stage.space), None)
    if stage.divide != "images" or space is None:
        return
    if space.tokens:
        yield PlanError(
            "Only a stage of packed images can divide images among its replicas.",
            where=f"stages[{index}].divide",
            seen=f"images, in the space {space.name!r} with rows of {space.tokens} tokens",
            allowed="samples, or a space whose rows differ",
        )
    elif space.counts and tuple(map(sum, space.images)) != space.counts:
        yield PlanError(
            "The images of a space do not add up to the tokens of its samples, and a stage divides its images.",
            where=f"spaces ({space.name}).images",
            seen=f"{len(space.images)} samples with {sum(map(sum, space.images))} tokens",
            allowed=f"the {sum(space.counts)} tokens of {len(space.counts)} samples, image by image",
        )


def _prediction_problems(plan: Plan) -> Iterator[PlanError]:
    if plan.prediction is not None and len(plan.prediction.lanes) != len(plan.order.lanes):
        yield PlanError(
            "The prediction needs an entry for every lane.",
            where="prediction.lanes",
            seen=len(plan.prediction.lanes),
            allowed=str(len(plan.order.lanes)),
        )


def _model_problems(plan: Plan, model: Model) -> Iterator[PlanError]:
    modules = {module.name: module for module in model.modules}
    stops: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        if stage.module not in modules:
            yield PlanError(
                "The model has no such module.",
                where=f"stages[{index}].module",
                seen=stage.module,
                allowed=", ".join(modules),
            )
            return
        stops[stage.module] = stage.layers[1]
    for name, module in modules.items():
        if stops.get(name, 0) != len(module.layers):
            yield PlanError(
                "The stages do not cover the layers of the model.",
                where=f"stages of module {name!r}",
                seen=f"{stops.get(name, 0)} layers",
                allowed=f"{len(module.layers)} layers",
            )
    shapes = {
        layer.parameters[spec.name]: spec.shape
        for layer in model.layers
        for spec in model.layer_graph(layer).parameters
    }
    planned = {parameter.name: parameter.shape for parameter in plan.parameters}
    for name in sorted({*shapes} ^ {*planned}):
        yield PlanError("The plan's parameters are not the model's.", where="parameters", seen=name)
        return
    for name, shape in shapes.items():
        if planned[name] != shape:
            yield PlanError(
                "A parameter has another shape.", where=f"parameters ({name})", seen=planned[name], allowed=str(shape)
            )


def _cluster_problems(plan: Plan, cluster: Cluster) -> Iterator[PlanError]:
    count = device_count(cluster)
    for index, group in enumerate(plan.groups):
        if max(group.devices) >= count:
            modules = dict.fromkeys(stage.module for stage in plan.stages if stage.group == index)
            yield PlanError(
                "The cluster has no such device.",
                where=f"groups[{index}].devices ({', '.join(modules)})",
                seen=max(group.devices),
                allowed=f"0 to {count - 1}",
                next_step=f"plan for this cluster (pipefit plan), or name one with {len(plan.used_devices)} "
                "devices or more",
            )


PlanRule = Callable[[Plan], Iterator[PipefitError]]

RULES: tuple[PlanRule, ...] = (
    _version_problems,
    _job_problems,
    _group_problems,
    _space_problems,
    _stage_problems,
    mesh_problems,
    edge_problems,
    parameter_problems,
    placement_problems,
    turn_problems,
    state_group_problems,
    expert_problems,
    shard_problems,
    _tied_state_problems,
    order_problems,
    _prediction_problems,
)
"""In the order of the file; later rules may rely on earlier ones."""
