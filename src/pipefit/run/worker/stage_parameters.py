"""Parts and forms of the parameters of a stage on one device, by the programs of its layers, and the layers that
complete their gradients."""

from __future__ import annotations

from collections.abc import Mapping

from pipefit.layout import Box, Mesh
from pipefit.model.graph import Model
from pipefit.model.ops.linear_factors import reduced_nowhere
from pipefit.plan.assemble.shard_programs import LayerProgram
from pipefit.plan.types import ParameterPlan, Stage
from pipefit.run.worker.planned import stage_layers


def parameter_box(
    parameter: ParameterPlan,
    model: Model,
    stage: Stage,
    programs: Mapping[str, LayerProgram],
    place: tuple[Mesh, int],
) -> Box:
    """Return the box held by a device of a mesh (`place`). Its bounds are sums of the local shapes in the sharded
    graphs, after those of the positions before it on an expert axis."""
    group, device = place
    position = group.axis_position(device, "shard")
    box = [(0, length) for length in parameter.shape]
    program, local = _program_of(parameter.name, model, stage, programs)
    form, outer = program.parameters[local], program.expert_forms.get(local)
    if outer is not None and outer.dim is not None:
        size = parameter.shape[outer.dim] // program.expert_parts
        first = size * group.axis_position(device, "expert")
        box[outer.dim] = (first, first + size)
    if form.kind == "G" and form.dim is not None:
        sizes = [graph.find_parameter(local).shape[form.dim] for graph in program.graphs]
        start = box[form.dim][0] + sum(sizes[:position])
        box[form.dim] = (start, start + sizes[position])
    return tuple(box)


def parameter_forms(name: str, model: Model, stage: Stage, programs: Mapping[str, LayerProgram]) -> tuple[str, str]:
    """Return the forms of a parameter along the shard axis and along the expert axis."""
    program, local = _program_of(name, model, stage, programs)
    return str(program.parameters[local]), str(program.expert_forms.get(local, "I"))


def whole_gradient_names(model: Model, stage: Stage, programs: Mapping[str, LayerProgram]) -> set[str]:
    """Return global names of parameters whose complete gradient is computed on every device of the shard axis."""
    return {
        layer.parameters[local]
        for layer in stage_layers(model, stage)
        for local in reduced_nowhere(programs[layer.graph].graphs[0])
    }


def layer_places(model: Model, stage: Stage) -> dict[str, int]:
    """Return global name -> the first layer within the stage that uses it: the last that a backward completes."""
    places: dict[str, int] = {}
    for index, layer in enumerate(stage_layers(model, stage)):
        for name in layer.parameters.values():
            places.setdefault(name, index)
    return places


def _program_of(
    name: str, model: Model, stage: Stage, programs: Mapping[str, LayerProgram]
) -> tuple[LayerProgram, str]:
    """Return the program of the first layer that uses a parameter, and the parameter's local name."""
    for layer in stage_layers(model, stage):
        for local, global_name in layer.parameters.items():
            if global_name == name:
                return programs[layer.graph], local
    raise AssertionError(f"{name} is not in the stage")
