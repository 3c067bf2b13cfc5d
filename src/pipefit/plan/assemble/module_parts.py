"""Groups, stages, edges and parameters of a plan of several modules, joined into one chain.

If a packed row is at either end of an edge, replicas hold the tokens of their samples: form `G1` along the replica
axis. Between modules the shard axes must be compatible as between any two stages (`structure.can_transfer`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pipefit.model.graph import Model
from pipefit.optimizers.sharded_state import ShardedState, effective_state, shards_optimizer
from pipefit.plan.assemble.pipeline_work import PlanSkeleton
from pipefit.plan.assemble.shard_programs import LayerProgram, ProgramCache, sharding_key
from pipefit.plan.assemble.structure import (
    FormsError,
    can_transfer,
    gradient_form,
    make_groups,
    make_parameters,
    make_stages,
    shard_shares,
)
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.plan.types import Edge, EdgeTransfer, Job, MeshPlan, ParameterPlan, SampleSpace, Stage


def module_skeleton(
    model: Model, programs: ProgramCache, job: Job, decisions: MultiModuleConfig, spaces: Sequence[SampleSpace]
) -> PlanSkeleton:
    """Return the skeleton of these decisions. Raises FormsError if neighbouring stages hold the hidden state in
    incompatible forms."""
    groups: list[MeshPlan] = []
    stages: list[Stage] = []
    sharded_state: list[ShardedState] = []
    modules = {module.name: module for module in model.modules}
    runs: list[list[int]] = []
    first, lies = _first_group(decisions), dict(decisions.modules)
    for name, config in decisions.modules:
        runs.append([])
        if name in decisions.inline:
            (stage,) = make_stages(modules[name], config, (), programs)
            runs[-1].append(len(stages))
            end = decisions.inline_lane(name)
            grid = first + end if decisions.in_grid(name) else len(groups)
            stages.append(replace(stage, group=grid, divide=decisions.divide_of(name)))
            sharded_state.append(effective_state(decisions.sharded_state, len(config.replicas)))
            if not decisions.in_grid(name):
                groups += make_groups(replace(config, devices=lies[decisions.backbone].lane_devices()[end]))
            continue
        for turn, placed in enumerate(_module_instances(decisions, name, config)):
            for stage in make_stages(modules[name], placed, placed.cuts, programs):
                runs[-1].append(len(stages))
                stages.append(
                    replace(
                        stage,
                        group=stage.group + len(groups),
                        turn=turn,
                        turns=decisions.copy_count(name),
                        microbatch_multiple=decisions.multiple_of(name),
                        divide=decisions.divide_of(name),
                    )
                )
                sharded_state.append(effective_state(decisions.sharded_state, len(config.replicas)))
            groups += make_groups(placed)
    return PlanSkeleton(
        job=job,
        groups=tuple(groups),
        spaces=tuple(spaces),
        stages=tuple(stages),
        edges=tuple(
            module_edges(
                _stage_pairs(decisions, runs),
                stages,
                groups,
                programs,
                {space.name for space in spaces if space.tokens == 0},
            )
        ),
        placement=decisions.lane_of_stage,
        microbatches=decisions.microbatches,
        slices=(job.sequence,),
        sharded_state=tuple(sharded_state),
    )


def _first_group(decisions: MultiModuleConfig) -> int:
    """Return the index of the backbone's first group, used by inline modules in the backbone's grid."""
    names = [name for name, _ in decisions.modules]
    before = decisions.modules[: names.index(decisions.backbone)] if decisions.inline else ()
    return sum(
        config.stage_count * decisions.copy_count(name)
        for name, config in before
        if name not in decisions.inline or not decisions.in_grid(name)
    )


def _module_instances(decisions: MultiModuleConfig, name: str, own: ParallelConfig) -> list[ParallelConfig]:
    """Return the layouts of a module: one, or for a guest one per lane of the backbone."""
    if name not in decisions.guests:
        return [own]
    return [replace(own, devices=lane) for lane in dict(decisions.modules)[decisions.backbone].lane_devices()]


def _stage_pairs(decisions: MultiModuleConfig, runs: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the (source, target) pairs of stages; `runs` are the stages of every module.

    Every stage of a guest connects to the end stage of the module beside it.
    """
    guest = [name in decisions.guests for name, _ in decisions.modules]
    pairs = []
    for index, run in enumerate(runs):
        pairs += [] if guest[index] else list(pairwise(run))
        if index + 1 < len(runs):
            ends, starts = (run if guest[index] else run[-1:]), runs[index + 1]
            pairs += [(end, start) for end in ends for start in (starts if guest[index + 1] else starts[:1])]
    return sorted(pairs)


def module_edges(
    pairs: Sequence[tuple[int, int]],
    stages: Sequence[Stage],
    groups: Sequence[MeshPlan],
    programs: ProgramCache,
    packed: set[str],
) -> list[Edge]:
    """Return the edges of the hidden state, within modules and between them."""
    edges = []
    for source, target in pairs:
        sender, receiver = stages[source], stages[target]
        ahead, behind = (shard_shares(groups[stage.group]) for stage in (sender, receiver))
        gives = end_program(programs, sender, ahead, -1).gives
        takes = end_program(programs, receiver, behind, 0).takes
        if not can_transfer((gives, len(ahead)), (takes, len(behind))):
            raise FormsError(
                "Neighbouring stages hold the hidden state in incompatible forms.",
                where=f"{sender.module}, then {receiver.module}",
                seen=f"{gives} on {len(ahead)} device(s), then {takes} on {len(behind)}",
                allowed="a replicated tensor only from an equally sized group that holds it replicated",
            )
        rows = "G1" if {sender.space, receiver.space} & packed else "G0"
        edges.append(
            Edge(
                source=source,
                target=target,
                forward=_make_transfer(rows, str(gives), str(takes)),
                gradient=_make_transfer(rows, gradient_form(takes, len(behind)), gradient_form(gives, len(ahead))),
            )
        )
    return edges


def end_program(programs: ProgramCache, stage: Stage, shares: tuple[int, ...], end: int) -> LayerProgram:
    """Return the program of the first (0) or last (-1) layer of a stage."""
    layer = programs.module_layers(stage.module, stage.layers)[end]
    return programs.layer_program(layer, sharding_key(stage, None), shares)


def module_parameters(model: Model, parts: PlanSkeleton, programs: ProgramCache) -> tuple[ParameterPlan, ...]:
    """Return every parameter once, module by module, with the plan's stage numbers."""
    parameters = []
    for module in model.modules:
        stage_indices = [index for index, stage in enumerate(parts.stages) if stage.module == module.name]
        stages = [parts.stages[index] for index in stage_indices]
        states = [parts.sharded_state[index] for index in stage_indices]
        split: ShardedState = next(filter(shards_optimizer, states), "none")
        local = make_parameters(module, stages, parts.groups, programs, split)
        if len(stages) == len(parts.stages):  # the only module: its stages have their numbers already
            return local
        for parameter in local:
            parameters.append(
                replace(
                    parameter,
                    uses=tuple(stage_indices[use] for use in parameter.uses),
                    owner=stage_indices[parameter.owner],
                )
            )
    return tuple(parameters)


def host_order(sizes: Sequence[tuple[int, int]], host_devices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the devices of every module, from its (devices, shards); empty if they do not fit.

    Modules with more shards come first, so that no shard group crosses hosts whose size is a multiple of it.
    """
    starts = list(itertools.accumulate(host_devices, initial=0))
    free = [list(range(start, stop)) for start, stop in pairwise(starts)]
    assigned: list[tuple[int, ...]] = [()] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index][1], index)):
        devices, shards = sizes[index]
        chosen: list[int] = []
        for host in free:
            while len(chosen) < devices and len(host) >= shards:
                chosen += host[:shards]
                del host[:shards]
        if len(chosen) < devices:
            return ()
        assigned[index] = tuple(chosen)
    return tuple(assigned)


def within_hosts(decisions: MultiModuleConfig, host_devices: Sequence[int]) -> bool:
    """Return whether the shard groups of guests, runs of the backbone's lanes, lie within hosts."""
    hosts = [host for host, count in enumerate(host_devices) for _ in range(count)]
    for name, config in decisions.modules:
        if name in decisions.guests:
            for lane in dict(decisions.modules)[decisions.backbone].lane_devices():
                for start in range(0, len(lane), len(config.shards)):
                    if len({hosts[device] for device in lane[start : start + len(config.shards)]}) > 1:
                        return False
    return True


def _make_transfer(rows: str, sent: str, received: str) -> EdgeTransfer:
    return EdgeTransfer(sent=(rows, sent), wire=(rows, sent), received=(rows, received))
