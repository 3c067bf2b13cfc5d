"""Groups, stages, edges and parameters of a plan from explicit decisions: all of it except the order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

from pipefit.errors import PlanError
from pipefit.layout import TensorForm
from pipefit.model.graph import ModelModule
from pipefit.optimizers.sharded_state import ShardedState, parameter_state, state_form
from pipefit.plan.assemble.shard_programs import ProgramCache, program_hash, sharding_key, whole_shape
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.expert_parts import splits_rows
from pipefit.plan.types import AxisPlan, Edge, EdgeTransfer, MeshPlan, ParameterPlan, Stage


class FormsError(PlanError):
    """Neighbouring stages hold the hidden state, or stages with a tied parameter hold that, in incompatible forms.
    Other layouts of the same groups may be valid."""


def make_groups(decisions: ParallelConfig) -> tuple[MeshPlan, ...]:
    """Return one group per lane with the axes `replica`, `context` and `expert` (if they have several parts) and
    `shard`, the shard axis fastest."""
    axes = [AxisPlan(name="replica", shares=decisions.replicas)]
    if decisions.context > 1:
        axes.append(AxisPlan(name="context", shares=(1,) * decisions.context))
    if decisions.expert > 1:
        axes.append(AxisPlan(name="expert", shares=(1,) * decisions.expert))
    return tuple(
        MeshPlan(axes=(*axes, AxisPlan(name="shard", shares=decisions.shards_of(lane))), devices=devices)
        for lane, devices in enumerate(decisions.lane_devices())
    )


def make_stages(
    module: ModelModule, decisions: ParallelConfig, cuts: Sequence[int], programs: ProgramCache
) -> tuple[Stage, ...]:
    """Return the stages of one module, in chain order."""
    stages = []
    for index, run in enumerate(pairwise((0, *cuts, len(module.layers)))):
        lane = decisions.lane_of_stage[index]
        stage = Stage(
            module=module.name,
            layers=run,
            group=lane,
            space=module.space,
            recompute=decisions.recompute_of(index),
            sharding=decisions.sharding_of(lane),
            recipes=decisions.recipes_of(lane),
            state_group=decisions.hybrid_group,
        )
        sharding, shares = decisions.sharding_key(lane), decisions.shards_of(lane)
        layer_programs = [programs.layer_program(layer, sharding, shares) for layer in module.layers[slice(*run)]]
        stages.append(replace(stage, program=program_hash(layer_programs)))
    return tuple(stages)


def make_edges(
    module: ModelModule, stages: Sequence[Stage], groups: Sequence[MeshPlan], programs: ProgramCache
) -> tuple[Edge, ...]:
    """Return the edges of the hidden state: rows sharded over replicas and an expert axis, tokens over a context axis,
    the shard axes as the programs define.

    Each side holds it in its program's form, and the overlaps are transferred (`layout.transfer_moves`). Over a shard
    axis, the gradient is partial if the hidden state is replicated, and sharded if it is sharded (reference: HAP's
    duality of forms). Raises FormsError if the forms of two neighbours are incompatible.
    """
    edges = []
    for source, (sender, receiver) in enumerate(pairwise(stages)):
        ahead, behind = (shard_shares(groups[stage.group]) for stage in (sender, receiver))
        keys = [sharding_key(stage, groups[stage.group]) for stage in (sender, receiver)]
        gives = programs.layer_program(module.layers[sender.layers[1] - 1], keys[0], ahead).gives
        takes = programs.layer_program(module.layers[receiver.layers[0]], keys[1], behind).takes
        if not can_transfer((gives, len(ahead)), (takes, len(behind)), sender.group == receiver.group):
            raise FormsError(
                "Neighbouring stages hold the hidden state in incompatible forms.",
                where=f"cuts: layer {receiver.layers[0]}",
                seen=f"{gives} on {len(ahead)} device(s), then {takes} on {len(behind)}",
                allowed="equal forms on the same devices; between devices a replicated tensor only from an "
                "equally sized group that holds it replicated",
                next_step="cut between layers that use the same form",
            )
        outer = outer_forms(groups[sender.group], "G0", "G1", "G0")
        back = [gradient_form(gives, len(ahead)), gradient_form(takes, len(behind))]
        edges.append(
            Edge(
                source=source,
                target=source + 1,
                forward=_make_transfer(outer, str(gives), str(takes)),
                gradient=_make_transfer(outer, back[1], back[0]),
            )
        )
    return tuple(edges)


def can_transfer(one: tuple[TensorForm, int], two: tuple[TensorForm, int], same: bool = False) -> bool:
    """Return whether a tensor can move from its form on one set of devices to another form on other devices, or on the
    `same` ones.

    The gradient of a replicated tensor is partial, and no step sums it between two groups. So a replicated tensor is
    received by several devices only from an equally sized group that holds it replicated.
    """
    (gives, ahead), (takes, behind) = one, two
    if same:
        return gives == takes
    return behind == 1 or takes.kind == "G" or (gives == takes and ahead == behind)


def gradient_form(form: TensorForm, devices: int) -> str:
    """Return the form of the gradient of a tensor in this form on this many devices."""
    return "P" if form.kind == "I" and devices > 1 else str(form)


def outer_forms(group: MeshPlan, replica: str, context: str, expert: str) -> tuple[str, ...]:
    """Return the forms of a tensor along the axes before the shard axis."""
    forms = {"replica": replica, "context": context, "expert": expert}
    return tuple(forms[axis.name] for axis in group.axes if axis.name != "shard")


def shard_shares(group: MeshPlan) -> tuple[int, ...]:
    """Return the shares of a group's shard axis; (1,) without one."""
    return group.to_mesh().find_axis("shard").shares


def make_parameters(
    module: ModelModule,
    stages: Sequence[Stage],
    groups: Sequence[MeshPlan],
    programs: ProgramCache,
    sharded_state: ShardedState,
) -> tuple[ParameterPlan, ...]:
    """Return every parameter once, in order of first use. A tied parameter lists all stages that use it; the first owns
    it.

    From ZeRO-1 on, the optimizer state of a device's parameters is sharded flat over the replicas and the parts of
    their sequences, and over an axis that divides rows and experts if the parameter is replicated there.
    """
    outer = groups[stages[0].group]
    uses: dict[str, list[int]] = {}
    layer_uses: Counter[str] = Counter()
    facts: dict[str, tuple[tuple[int, ...], bool, str]] = {}
    divided: dict[str, str] = {}
    for index, stage in enumerate(stages):
        group = groups[stage.group]
        sharding, shares = sharding_key(stage, group), shard_shares(group)
        for layer in module.layers[stage.layers[0] : stage.layers[1]]:
            program = programs.layer_program(layer, sharding, shares)
            for spec in program.graphs[0].parameters:
                name = layer.parameters[spec.name]
                if (form := program.expert_forms.get(spec.name)) is not None:
                    divided[name] = str(form)
                fact = (whole_shape(program, spec.name), spec.trainable, str(program.parameters[spec.name]))
                if facts.setdefault(name, fact) != fact:
                    raise FormsError(
                        "A tied parameter is stored differently by its two uses.",
                        where=f"parameter {name!r}, layer {layer.name!r}",
                        seen=f"{facts[name]} and {fact}",
                        next_step=f"lay {module.name} out without shards",
                    )
                layer_uses[name] += 1
                if index not in uses.setdefault(name, []):
                    uses[name].append(index)
    states = {count: state_form(parameter_state(sharded_state, count)) for count in layer_uses.values()}
    spreads_state = splits_rows(stages[0].sharding)
    forms_of = cache(partial(outer_forms, outer))

    def shard_state(name: str) -> str:
        """Return the form of the optimizer state along the shard axis."""
        stored = facts[name][2]
        return states[layer_uses[name]] if spreads_state and stored == "I" else stored

    def outer_state(name: str) -> tuple[str, ...]:
        """Return the forms of the optimizer state along the axes before the shard axis."""
        state = states[layer_uses[name]]
        return forms_of(state, state, divided.get(name, state))

    return tuple(
        ParameterPlan(
            name=name,
            shape=facts[name][0],
            trainable=facts[name][1],
            uses=tuple(uses[name]),
            stored=(*forms_of("I", "I", divided.get(name, "I")), facts[name][2]),
            state=(*outer_state(name), shard_state(name)),
            owner=uses[name][0],
        )
        for name in uses
    )


def _make_transfer(outer: tuple[str, ...], sent: str, received: str) -> EdgeTransfer:
    """Return a transfer with these forms along the axes before the shard axes and along the shard axes."""
    return EdgeTransfer(sent=(*outer, sent), wire=(*outer, sent), received=(*outer, received))
