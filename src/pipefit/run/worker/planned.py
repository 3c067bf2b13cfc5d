"""Layers, edge shapes and side losses of a plan's stages, looked up in the model."""

from __future__ import annotations

from collections.abc import Callable

from pipefit.errors import StalePlanError
from pipefit.model.graph import Layer, Model, ModelModule, size_value
from pipefit.plan.types import Edge, Plan, Stage
from pipefit.run.transfers.packed import packed_space


def edge_shapes(plan: Plan, model: Model) -> Callable[[Edge, int], tuple[int, ...]]:
    """Return a function (edge, slice) -> global shape of one microbatch's slice of the edge's tensor. In a packed space
    the number of tokens differs between microbatches: the shape has one token per row."""
    spaces = {space.name: space for space in plan.spaces}

    def shape_of(edge: Edge, slice_: int) -> tuple[int, ...]:
        graph = model.layer_graph(stage_layers(model, plan.stages[edge.source])[-1])
        tensor = graph.find_tensor(edge.tensor or graph.outputs[0])
        rows = plan.job.batch // plan.order.microbatches
        if packed_space(plan, edge):
            return 1, rows, int(tensor.shape[-1])
        space = spaces[plan.stages[edge.source].space]
        tokens = plan.order.slices[slice_]
        if space.tokens != plan.job.sequence:
            rows, tokens = space.rows // plan.order.microbatches, space.tokens
        return tuple(size_value(size, {"B": rows, "T": tokens}) for size in tensor.shape)

    return shape_of


def side_loss(model: Model, stage: Stage) -> str:
    """Return the loss output of a stage that also passes its hidden state to another module; '' if there is none."""
    module = stage_module(model, stage)
    graph = model.layer_graph(module.layers[-1])
    return graph.loss_output or "" if stage.layers[1] == len(module.layers) and graph.hidden_output else ""


def stage_module(model: Model, stage: Stage) -> ModelModule:
    """Return the module of a stage. Raises StalePlanError if the model has no module of that name."""
    for module in model.modules:
        if module.name == stage.module:
            return module
    raise StalePlanError(
        "The plan names a module that the model does not have.",
        seen=stage.module,
        allowed=", ".join(module.name for module in model.modules),
    )


def stage_layers(model: Model, stage: Stage) -> tuple[Layer, ...]:
    """Return the layers of a stage. Raises StalePlanError if the model has fewer."""
    module = stage_module(model, stage)
    if stage.layers[1] > len(module.layers):
        raise StalePlanError(
            "The plan's stages go beyond the model's layers.",
            where=f"module {stage.module!r}",
            seen=f"layers up to {stage.layers[1]}",
            allowed=f"{len(module.layers)} layers",
            next_step="make the plan again with the model as it is now",
        )
    return module.layers[stage.layers[0] : stage.layers[1]]
