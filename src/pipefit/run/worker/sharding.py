"""The sharded state of each parameter of a plan, and the sharded layers of the stage programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipefit.errors import StalePlanError
from pipefit.layout import Mesh
from pipefit.model.graph import Layer
from pipefit.optimizers.sharded_state import ShardedState, shards_parameters, state_of_forms
from pipefit.plan.assemble.shard_programs import LayerProgram
from pipefit.plan.types import ParameterPlan, Plan
from pipefit.run.stage.program import StageProgram
from pipefit.run.stage.sharded_layers import ShardedBucket, ShardedLayers, gradient_passes
from pipefit.run.transfers.comms import CommGroups
from pipefit.run.update.buckets import GradientBucket
from pipefit.run.update.state_devices import state_devices


def held_state(plan: Plan, parameter: ParameterPlan, group: Mesh) -> ShardedState:
    """Return the sharded state of a parameter in a stage with this mesh. Of a frozen one only the values can be
    sharded."""
    owner = plan.groups[plan.stages[parameter.owner].group].to_mesh()
    forms = dict(zip((axis.name for axis in owner.axes), parameter.state, strict=True))
    state = state_of_forms(forms.get(axis.name, "I") for axis in group.axes if axis.size > 1)
    return state if parameter.trainable or shards_parameters(state) else "none"


def check_stored_forms(plan: Plan, index: int, layers: Sequence[Layer], programs: Mapping[str, LayerProgram]) -> None:
    """Raise StalePlanError if the plan stores a parameter that a stage owns in another form than the programs of its
    layers, by graph."""
    owned = {parameter.name: parameter for parameter in plan.parameters if parameter.owner == index}
    group = plan.stage_mesh(index)
    if group.find_axis("shard").size == 1:
        return
    axes = {axis.name: place for place, axis in enumerate(group.axes)}
    for layer in layers:
        program = programs[layer.graph]
        for local, form in program.parameters.items():
            parameter = owned.get(layer.parameters[local])
            forms = {"shard": str(form), "expert": str(program.expert_forms.get(local, "I"))}
            for name, wanted in forms.items():
                if parameter is not None and name in axes and parameter.stored[axes[name]] != wanted:
                    raise StalePlanError(
                        "The plan stores a parameter in another form than its program.",
                        where=f"stages[{index}], parameter {parameter.name!r}",
                        seen=f"{parameter.stored[axes[name]]} along the {name}s",
                        allowed=wanted,
                        next_step="make the plan again",
                    )


def released_parameters(plan: Plan, stage: int, group: Mesh) -> set[str]:
    """Return the names of the stage's parameters that are complete only while their layer runs (ZeRO-3)."""
    return {
        parameter.name
        for parameter in plan.parameters
        if stage in parameter.uses and shards_parameters(held_state(plan, parameter, group))
    }


def bind_sharded_layers(
    programs: Mapping[int, StageProgram],
    buckets: Sequence[GradientBucket],
    comms: CommGroups,
    groups: Mapping[int, Mesh],
    device: int,
    ranks: Mapping[int, int],
) -> None:
    """Give every program the layers whose gradients or parameters are sharded."""
    for stage, program in programs.items():
        layers = []
        for bucket in buckets:
            if bucket.stage == stage and bucket.shards_gradients:
                members = state_devices(groups[stage], device, bucket.entries[0]).group
                group = comms.find_group([ranks[member] for member in members])
                index = bucket.first_layer
                layers.append((index, ShardedBucket(bucket, group, _bucket_passes(program, index, bucket))))
        if layers:
            program.bind_sharded_layers(ShardedLayers(layers))


def _bucket_passes(program: StageProgram, index: int, bucket: GradientBucket) -> frozenset[str]:
    layer, names = program.layers[index], {entry.name for entry in bucket.entries}
    if not bucket.trains:
        return frozenset()
    passes = gradient_passes(layer.graph)
    return frozenset().union(*(passes[local] for local, name in layer.parameters.items() if name in names))
