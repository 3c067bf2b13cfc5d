"""Build this rank's worker from a plan: stage programs, gradient buckets, process groups, transfers.

Everything here is a function of (plan, model, device), without communication. `verify_ranks` has checked before that
all ranks read the same plan and captured the same model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pipefit.errors import StalePlanError
from pipefit.lab.pace import pace_program
from pipefit.layout import AxisName, Box, Mesh, held_box, parse_form
from pipefit.model.graph import Model
from pipefit.model.ops import KINDS
from pipefit.model.registry import build_layers
from pipefit.optimizers.sharded_state import SHARDED_FORM, form_layout, shards_parameters
from pipefit.plan.assemble.shard_programs import (
    LayerProgram,
    ProgramCache,
    check_layer_shares,
    program_hash,
    sharding_key,
)
from pipefit.plan.request.context_parts import context_problems
from pipefit.plan.request.sequence_length import length_problems
from pipefit.plan.request.sliceable import document_problems, slice_problems
from pipefit.plan.types import ParameterPlan, Plan
from pipefit.precision import NUMBER_TYPES
from pipefit.run.sharded.collectives import ShardContext
from pipefit.run.stage.initial_values import ParameterValue, initial_values
from pipefit.run.stage.products import use_product_type
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.run.transfers.comms import CommGroups
from pipefit.run.transfers.wiring import channel_pairs
from pipefit.run.update.buckets import BucketEntry, divide_trained, make_buckets
from pipefit.run.update.loss_scale import make_loss_scale
from pipefit.run.update.optimizer import OptimizerConfig
from pipefit.run.update.reduce import GradientReducer
from pipefit.run.update.state_devices import state_devices, state_process_groups
from pipefit.run.update.tied import TiedSum, TiedUse, tied_pairs
from pipefit.run.worker.planned import edge_shapes, side_loss, stage_layers
from pipefit.run.worker.runnable import check_runnable
from pipefit.run.worker.sharding import bind_sharded_layers, check_stored_forms, held_state, released_parameters
from pipefit.run.worker.stage_parameters import layer_places, parameter_box, parameter_forms, whole_gradient_names
from pipefit.run.worker.worker import Frozen, Worker, WorkerSetup, device_lane
from pipefit.schedule.lowering.frozen import with_backward
from pipefit.shard.apart import check_row_independence

BUCKET_BYTES = 32 << 20
"""Gradient bytes per reduction: large enough that latency is negligible, small enough to overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The device, lane and meshes of this rank in a plan."""

    device: int
    lane: int
    groups: Mapping[int, Mesh]
    "Stage -> its mesh, for every stage of the lane."
    ranks: Mapping[int, int]
    "Device -> global rank."
    torch_device: torch.device


def rank_place(plan: Plan, rank: int, torch_device: torch.device) -> RankPlace:
    """Return the place of a rank: rank i of a run is the i-th of the plan's devices."""
    device = plan.used_devices[rank]
    lane = device_lane(plan, device)
    ranks = {d: i for i, d in enumerate(plan.used_devices)}
    groups = {
        stage: plan.stage_mesh(stage) for stage, stage_lane in enumerate(plan.order.placement) if stage_lane == lane
    }
    return RankPlace(device=device, lane=lane, groups=groups, ranks=ranks, torch_device=torch_device)


def build_worker(
    plan: Plan,
    model: Model,
    comms: CommGroups,
    torch_device: torch.device,
    optimizer: OptimizerConfig,
    *,
    value: ParameterValue | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Worker:
    """Return the worker of this rank, with parameters from `value`, or initialised from the plan's seed.

    All ranks call this together, because it creates missing process groups. Raises PlanError for a plan that cannot be
    run, and StalePlanError if the model's programs differ from those in the plan.
    """
    check_runnable(plan)
    check_row_independence(model)
    for rule in (length_problems, slice_problems, document_problems, context_problems):
        for error in rule(plan, model):
            raise error
    location = rank_place(plan, comms.rank, torch_device)
    programs_of = stage_programs(plan, model)
    make_groups(plan, model, comms, programs_of)
    uses = tied_uses(plan, model, programs_of)
    across = shared_devices(plan, model, uses, programs_of)
    number_types = NUMBER_TYPES[plan.job.precision]
    use_product_type(number_types.product, location.torch_device)
    dtype, gradient_dtype, master_dtype = (getattr(torch, name) for name in number_types[1:])
    trained = with_backward(plan.to_schedule())
    programs = {
        stage: _build_program(plan, model, stage, programs_of[stage], location, comms, dtype, trained)
        for stage, lane in enumerate(plan.order.placement)
        if lane == location.lane
    }
    value = initial_values(plan, model) if value is None else value
    entries, frozen = _bucket_entries(plan, model, programs, programs_of, location, value)
    for entry in entries:
        if entry.name in across:
            entry.across, entry.tied = across[entry.name][location.device], False
    all_buckets = make_buckets(entries, gradient_dtype, bucket_bytes, _scatter_places(entries, location))
    buckets, frozen_buckets = divide_trained(all_buckets)
    bind_sharded_layers(programs, all_buckets, comms, location.groups, location.device, location.ranks)
    gradients = {name: view for bucket in buckets for name, view in bucket.views.items()}
    for program in programs.values():
        program.bind_gradients({name: gradients[name] for name in program.parameters if name in gradients})
    tied = {
        name: TiedSum(
            name, shape, list(who.values()), location.device, location.ranks, comms,
            2 * len(plan.edges) + number, gradients[name],
        )
        for number, (name, (shape, who)) in enumerate(sorted(uses.items()))
        if name in gradients and location.lane in who and name not in across
    }  # fmt: skip
    setup = WorkerSetup(
        device=location.device,
        ranks=location.ranks,
        comms=comms,
        world=comms.find_group(list(location.ranks.values())),
        programs=programs,
        buckets=buckets,
        reducer=GradientReducer(buckets, comms, location.groups, location.device, location.ranks, tied),
        torch_device=torch_device,
        dtype=dtype,
        shape_of=edge_shapes(plan, model),
        optimizer=optimizer,
        master_dtype=master_dtype,
        loss_modules=[module.name for module in model.modules if model.layer_graph(module.layers[-1]).loss_output],
        frozen=frozen,
        frozen_buckets=frozen_buckets,
        loss_scale=make_loss_scale(plan.job.precision),
    )
    return Worker(plan, setup)


def make_groups(
    plan: Plan, model: Model, comms: CommGroups, programs_of: Sequence[Mapping[str, LayerProgram]] | None = None
) -> None:
    """Create every process group of the plan. All ranks of the world call this with the same plan and model."""
    ranks = {device: rank for rank, device in enumerate(plan.used_devices)}
    shape_of = edge_shapes(plan, model)
    groups: list[list[int]] = [list(ranks.values())]
    for group in dict.fromkeys(plan.stage_mesh(stage) for stage in range(len(plan.stages))):
        for device in group.devices:
            for axes in group.axis_subsets():
                groups.append([ranks[d] for d in group.devices_along(device, axes)])
    groups += state_process_groups(plan, ranks)
    programs_of = stage_programs(plan, model) if programs_of is None else programs_of
    uses = tied_uses(plan, model, programs_of)
    across = shared_devices(plan, model, uses, programs_of)
    for members in across.values():
        groups += [[ranks[d] for d in devices] for devices in members.values()]
    comms.create_groups(groups)
    if comms.tagged:
        return
    pairs = channel_pairs(plan, lambda edge: shape_of(edge, 0))
    for name, (shape, who) in uses.items():
        if name not in across:
            pairs += tied_pairs(shape, list(who.values()))
    comms.make_pairs((ranks[a], ranks[b]) for a, b in pairs)


def stage_programs(plan: Plan, model: Model) -> list[Mapping[str, LayerProgram]]:
    """Return, for every stage, the program of each of its graphs. StalePlanError if a hash in the plan disagrees."""
    cache = ProgramCache(model, plan.recipes)
    result: list[Mapping[str, LayerProgram]] = []
    for index, stage in enumerate(plan.stages):
        group = plan.groups[stage.group].to_mesh()
        shares, key = group.find_axis("shard").shares, sharding_key(stage, group)
        programs = {layer.graph: cache.layer_program(layer, key, shares) for layer in stage_layers(model, stage)}
        check_layer_shares([programs[layer.graph] for layer in stage_layers(model, stage)], shares, f"stages[{index}]")
        seen = program_hash([programs[layer.graph] for layer in stage_layers(model, stage)])
        if stage.program and seen != stage.program:
            raise StalePlanError(
                "The plan was made for another program of this stage.",
                where=f"stages[{index}].program",
                seen=f"{seen} here, {stage.program} in the plan",
                next_step="make the plan again with the model as it is now",
            )
        check_stored_forms(plan, index, stage_layers(model, stage), programs)
        result.append(programs)
    return result


def _build_program(
    plan: Plan,
    model: Model,
    index: int,
    programs: Mapping[str, LayerProgram],
    place: RankPlace,
    comms: CommGroups,
    dtype: torch.dtype,
    trained: Collection[int],
) -> StageProgram:
    stage, group = plan.stages[index], place.groups[index]
    shard = _axis_place(group, ("shard",), place, comms)
    layers = [
        StageLayer(layer.name, program.graphs[shard.position if shard else 0], layer.parameters, program.shares)
        for layer in stage_layers(model, stage)
        for program in [programs[layer.graph]]
    ]
    before = [module.name for module in model.modules].index(stage.module)
    program = StageProgram(
        layers,
        StageSetup(
            recompute=stage.recompute,
            device=place.torch_device,
            dtype=dtype,
            products=NUMBER_TYPES[plan.job.precision].product,
            shard=shard,
            sequence=_axis_place(group, ("context",), place, comms),
            experts=_axis_place(group, ("expert", "shard"), place, comms),
            seed=plan.job.seed,
            first_layer_index=sum(len(module.layers) for module in model.modules[:before]) + stage.layers[0],
            slices=len(plan.order.slices),
            modules=_opaque_modules(model, layers, place.torch_device),
            backward=index in trained,
            input_gradient=any(edge.source in trained for edge in plan.edges if edge.target == index),
            side_loss=side_loss(model, stage),
            released=released_parameters(plan, index, group),
        ),
    )
    return pace_program(program)


def _axis_place(group: Mesh, names: tuple[AxisName, ...], place: RankPlace, comms: CommGroups) -> ShardContext | None:
    """Return the place of this rank on one axis of a mesh, or on several even axes together; None if the first axis has
    one position."""
    axis = group.find_axis(names[0])
    if axis.size == 1:
        return None
    devices = group.devices_along(place.device, names)
    members = comms.find_group([place.ranks[device] for device in devices])
    shares = axis.shares * (len(devices) // axis.size)
    return ShardContext(group=members, shares=shares, position=devices.index(place.device))


def _opaque_modules(
    model: Model, layers: Sequence[StageLayer], device: torch.device
) -> dict[str, torch.nn.Module] | None:
    """Return the user's modules for layers that could not be captured, by layer name. Their parameters are not used."""
    wanted = {layer.name for layer in layers if any(KINDS[op.kind].is_module for op in layer.graph.operators)}
    if not wanted:
        return None
    built = build_layers(model.family, model.config, device=str(device))
    return {str(layer.layer_name): layer for layer in built if layer.layer_name in wanted}


def _bucket_entries(
    plan: Plan,
    model: Model,
    programs: Mapping[int, StageProgram],
    programs_of: Sequence[Mapping[str, LayerProgram]],
    place: RankPlace,
    value: ParameterValue,
) -> tuple[list[BucketEntry], dict[str, Frozen]]:
    entries: dict[str, BucketEntry] = {}
    frozen: dict[str, Frozen] = {}
    for stage, program in programs.items():
        group = place.groups[stage]
        places = layer_places(model, plan.stages[stage])
        alike = whole_gradient_names(model, plan.stages[stage], programs_of[stage])
        for parameter in plan.parameters:
            tensor = program.parameters.get(parameter.name)
            if tensor is None:
                continue
            box = parameter_box(parameter, model, plan.stages[stage], programs_of[stage], (group, place.device))
            assert tuple(b - a for a, b in box) == tuple(tensor.shape), (parameter.name, box, tensor.shape)
            if parameter.name in entries:
                entries[parameter.name].twin = tensor
                continue
            fill = partial(value, parameter.name, parameter.shape, box)
            released = shards_parameters(held_state(plan, parameter, group))
            if not released:
                with torch.no_grad():
                    tensor.copy_(fill())
            form, expert_form = parameter_forms(parameter.name, model, plan.stages[stage], programs_of[stage])
            if len(parameter.uses) > 1:
                forms = [parse_form(form if axis.name == "shard" else "I") for axis in group.axes]
                assert box == held_box(parameter.shape, group, forms, place.device), parameter.name
            if tensor.requires_grad or released:
                layer = places[parameter.name]
                own_alike: tuple[AxisName, ...] = ("shard",) if parameter.name in alike else ()
                split_over: list[AxisName] = ["shard"] if form != "I" else []
                split_over += ["expert"] if expert_form != "I" else []
                entries[parameter.name] = _bucket_entry(
                    plan, parameter, stage, layer, box, tensor, place, split_over, own_alike
                )
                entries[parameter.name].fill = fill if released else None
            else:
                saves = plan.order.placement[parameter.owner] == place.lane
                frozen[parameter.name] = (parameter.shape, box, tensor, saves)
    return list(entries.values()), frozen


def _bucket_entry(
    plan: Plan,
    parameter: ParameterPlan,
    stage: int,
    layer: int,
    box: Box,
    tensor: torch.nn.Parameter,
    place: RankPlace,
    split_over: Sequence[AxisName],
    alike: Sequence[AxisName],
) -> BucketEntry:
    """Build the entry of a parameter. `split_over`: axes along which it is split in this stage, which may differ from
    the owner's; `alike`: axes along which every device has the complete gradient."""
    axes = [axis for axis in place.groups[stage].axes if axis.size > 1]
    owner = plan.groups[plan.stages[parameter.owner].group].to_mesh()
    state = {axis.name: axis_state for axis, axis_state in zip(owner.axes, parameter.state, strict=True)}
    lanes = {plan.order.placement[use] for use in parameter.uses}
    copied = [axis.name for axis in axes if axis.name not in split_over]
    return BucketEntry(
        name=parameter.name,
        stage=stage,
        layer=layer,
        shape=parameter.shape,
        box=box,
        tensor=tensor,
        sum_over=tuple(name for name in copied if name not in alike),
        alike_over=tuple(name for name in copied if name in alike),
        state_axes=tuple(axis.name for axis in axes if form_layout(state.get(axis.name, "I")) == SHARDED_FORM),
        sharded=held_state(plan, parameter, place.groups[stage]),
        state_group=plan.stages[stage].state_group,
        decays=len(parameter.shape) > 1,
        counted=plan.order.placement[parameter.owner] == place.lane,
        tied=len(lanes) > 1,
        state=parameter.state if plan.stages[stage].turns > 1 else (),
    )


def tied_uses(
    plan: Plan, model: Model, programs_of: Sequence[Mapping[str, LayerProgram]]
) -> dict[str, tuple[tuple[int, ...], dict[int, TiedUse]]]:
    """Return the parameters used by stages of several lanes: name -> (shape, lane -> use)."""
    tied = {}
    for parameter in plan.parameters:
        who: dict[int, TiedUse] = {}
        for stage in parameter.uses:
            group = plan.groups[plan.stages[stage].group].to_mesh()
            form, _ = parameter_forms(parameter.name, model, plan.stages[stage], programs_of[stage])
            forms = tuple(form if axis.name == "shard" else "I" for axis in group.axes)
            who.setdefault(plan.order.placement[stage], TiedUse(stage, group, forms))
        if len(who) > 1 and parameter.trainable:
            tied[parameter.name] = (parameter.shape, who)
    return tied


def shared_devices(
    plan: Plan,
    model: Model,
    uses: Mapping[str, tuple[tuple[int, ...], Mapping[int, TiedUse]]],
    programs_of: Sequence[Mapping[str, LayerProgram]],
) -> dict[str, dict[int, tuple[int, ...]]]:
    """Return name -> device -> devices whose gradients one sum combines, for some parameters of `tied_uses`.

    A parameter qualifies if all stages that use it take turns and hold it in the same way. The sum covers all devices
    if each has the full parameter and the gradients of its own rows and shard. It covers the devices at the same
    position of their shard axes if the parameter is split over them, or if every device has the complete gradient. If
    stages differ in this, their gradients are exchanged like those of any tied parameter.
    """
    alike = [
        whole_gradient_names(model, stage, programs) for stage, programs in zip(plan.stages, programs_of, strict=True)
    ]
    device_groups: dict[str, dict[int, tuple[int, ...]]] = {}
    for name, (_, who) in uses.items():
        lane_uses = list(who.values())
        if any(plan.stages[use.stage].turns == 1 for use in lane_uses):
            continue
        shards = {use.group.find_axis("shard").shares for use in lane_uses}
        parts = {(_shard_form(use), name in alike[use.stage]) for use in lane_uses}
        apart = parts != {("I", False)}
        if len(parts) > 1 or (apart and len(shards) > 1):
            continue
        members: dict[int, list[int]] = {}
        for use in lane_uses:
            for device, position in use.group.axis_positions("shard").items():
                members.setdefault(position if apart else 0, []).append(device)
        device_groups[name] = {device: tuple(devices) for devices in members.values() for device in devices}
    return device_groups


def _shard_form(use: TiedUse) -> str:
    return next((form for axis, form in zip(use.group.axes, use.forms, strict=True) if axis.name == "shard"), "I")


def _scatter_places(entries: Sequence[BucketEntry], place: RankPlace) -> dict[object, tuple[int, int]]:
    result: dict[object, tuple[int, int]] = {}
    for entry in entries:
        members = state_devices(place.groups[entry.stage], place.device, entry).group
        result[entry.stage, entry.state_axes] = (members.index(place.device), len(members))
    return result
