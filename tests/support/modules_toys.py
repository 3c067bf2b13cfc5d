"""A small multimodal model, its samples, plans for it in any layout, and what one process makes of it.

Many samples have no image, so that replicas, and whole microbatches, are without patches or latents.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from tests.support.multimodal_reference import Batch, Sample, batch_of, divisors_of, make_sample, step

from pipefit.data.stepplan import batch_shape
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Model
from pipefit.model.registry import build_layers, describe_config, typed_config
from pipefit.optimizers.sharded_state import ShardedState
from pipefit.plan.assemble.image_split import token_runs
from pipefit.plan.assemble.order import edge_keys, find_frozen_stages, lower_for_plan, make_schedule_plan
from pipefit.plan.assemble.shard_programs import ProgramCache, sharding_key
from pipefit.plan.assemble.structure import gradient_form, make_parameters
from pipefit.plan.types import (
    AxisPlan,
    Edge,
    EdgeTransfer,
    InputHashes,
    Job,
    MeshPlan,
    ModelSource,
    Plan,
    SampleSpace,
    Stage,
    collect_turns,
)
from pipefit.run.stage.initial_values import initial_values
from pipefit.run.stage_inputs import StageInputs
from pipefit.schedule.families import find_family
from pipefit.schedule.modules.inline import inline_order
from pipefit.schedule.modules.multiplexed import multiplex_stages
from pipefit.schedule.problem import ScheduleProblem

JOB = Job(batch=12, sequence=26, precision="float64", seed=3)
CONFIG: dict[str, Any] = {
    "model_type": "multimodal",
    "vision": {
        "model_type": "vit", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 2, "num_channels": 1, "initializer_range": 0.2,
    },
    "language": {
        "model_type": "llama", "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "initializer_range": 0.2,
    },
    "generator": {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "latent_size": 3, "grid_size": 4, "time_frequencies": 4, "initializer_range": 0.2,
    },
    "loss_weights": {"language": 1.0, "generator": 0.5},
}  # fmt: skip
ALL = ("vision", "language", "generator")
NO_IMAGES = 99
"""A step whose samples are text alone."""


def described(names: tuple[str, ...], frozen: tuple[str, ...] = (), tied: bool = False) -> Any:
    """The configuration of these modules, some of them frozen; `tied`: the language model's head is its embedding."""
    config = {name: part for name, part in CONFIG.items() if name in names or name not in ALL}
    weights = {name: weight for name, weight in CONFIG["loss_weights"].items() if name in names}
    config["language"] = config["language"] | {"tie_word_embeddings": tied}
    return describe_config(config | {"loss_weights": weights, "frozen": list(frozen)}, "multimodal", "config")


@lru_cache
def model(names: tuple[str, ...] = ALL, frozen: tuple[str, ...] = (), tied: bool = False) -> Model:
    """The captured model of these modules."""
    found = described(names, frozen, tied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture_family(found.family, found.config)


@dataclass(frozen=True)
class Layout:
    """How one module lies: replica shares, the layers at which its stages are cut, shards."""

    replicas: tuple[int, ...] = (1,)
    cuts: tuple[int, ...] = ()
    shards: tuple[int, ...] = (1,)
    sharding: str = "megatron"

    @property
    def size(self) -> int:
        return len(self.replicas) * len(self.shards)


def plan(
    the_model: Model,
    layouts: Mapping[str, Layout],
    *,
    microbatches: int = 3,
    order: str = "1f1b",
    sharded_state: ShardedState = "none",
    recompute: str = "none",
    job: Job = JOB,
    together: bool = False,
    shared: Mapping[str, Sequence[Layout]] | None = None,
    multiple: int = 1,
    multiples: Mapping[str, int] | None = None,
    divided: Sequence[str] = (),
) -> Plan:
    """Every module on devices of its own, one lane a stage; `together`: all stages on the same devices, one lane;
    `shared`: modules that lie on the lanes of the language model, whole, with a layout for each of them, whose stages
    take turns and `multiple` microbatches together; with one layout, on the first lane, the generator on the last;
    `multiples`: how many microbatches modules on devices of their own take together; `divided`: modules whose replicas
    divide images."""
    groups: list[MeshPlan] = []
    stages: list[Stage] = []
    shared, starts, first = shared or {}, dict[str, int](), 0
    for module in the_model.modules:
        starts[module.name] = first
        if module.name not in shared and not together:
            first += layouts[module.name].size * (len(layouts[module.name].cuts) + 1)
    for module in the_model.modules:
        each = shared.get(module.name, ())
        for turn, layout in enumerate(each):
            lane = len(layouts["language"].cuts) if module.name == "generator" and len(each) == 1 else turn
            groups.append(_group(layout, starts["language"] + lane * layout.size))
            stage = _stage(module, (0, len(module.layers)), len(groups) - 1, recompute, layout)
            stages.append(replace(stage, turn=turn, turns=len(each), microbatch_multiple=multiple))
        layout = layouts[module.name]
        for place, run in enumerate(pairwise((0, *layout.cuts, len(module.layers))) if not each else ()):
            if not together or not groups:
                groups.append(_group(layout, starts[module.name] + (0 if together else place * layout.size)))
            stage = _stage(module, run, len(groups) - 1, recompute, layout)
            stages.append(replace(stage, microbatch_multiple=(multiples or {}).get(module.name, 1)))
    stages = [replace(stage, divide="images" if stage.module in divided else "samples") for stage in stages]
    if order.startswith("inline"):
        stages = [replace(stage, group=groups.index(groups[stage.group])) for stage in stages]
        used = sorted({stage.group for stage in stages})
        stages = [replace(stage, group=used.index(stage.group)) for stage in stages]
        groups = [groups[index] for index in used]
    known: dict[frozenset[int], int] = {}
    lanes = [known.setdefault(frozenset(groups[stage.group].devices), len(known)) for stage in stages]
    programs = ProgramCache(the_model)
    edges = [_edge(*ends, stages, groups, programs) for ends in _chain(stages)]
    parameters = _parameters(the_model, stages, groups, programs, sharded_state)
    problem = ScheduleProblem(
        placement=tuple(lanes), microbatches=microbatches, edges=edge_keys(edges), turns=collect_turns(stages)
    )
    frozen = find_frozen_stages(len(stages), edges, parameters)
    beside = [index for index, stage in enumerate(stages) if stage.module in shared]
    way = find_family(order.rpartition(" ")[2])
    if order.startswith("inline"):
        computed = inline_order(way.build, problem)
    else:
        computed = multiplex_stages(way, problem, beside, frozen=frozen) if order.startswith("beside") else way(problem)
    lowered = lower_for_plan(computed, groups, stages, edges, parameters, frozen=frozen)
    packed = (SampleSpace(name=m.space, rows=job.batch, tokens=0) for m in the_model.modules if m.space != "samples")
    return Plan(
        version=2,
        job=job,
        model=ModelSource(name="toy", family=the_model.family, config=the_model.config),
        groups=tuple(groups),
        spaces=(SampleSpace(name="samples", rows=job.batch, tokens=job.sequence), *packed),
        stages=tuple(stages),
        edges=tuple(edges),
        parameters=parameters,
        order=make_schedule_plan(lowered, (job.sequence,)),
        hashes=InputHashes(model=the_model.hash, cluster=""),
    )


def _group(layout: Layout, first: int) -> MeshPlan:
    axes = (AxisPlan(name="replica", shares=layout.replicas), AxisPlan(name="shard", shares=layout.shards))
    return MeshPlan(axes=axes, devices=tuple(range(first, first + layout.size)))


def _stage(module: Any, run: tuple[int, int], group: int, recompute: Any, layout: Layout) -> Stage:
    return Stage(
        module=module.name, layers=run, group=group, space=module.space, recompute=recompute,
        sharding=layout.sharding if len(layout.shards) > 1 else "none",
    )  # fmt: skip


def _chain(stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """From each stage to the next, or to and from each of those that take turns."""
    units = [[stage for stage in range(len(stages)) if stages[stage].module == name and stages[stage].turns > 1]
             for name in dict.fromkeys(stage.module for stage in stages)]  # fmt: skip
    together = {stage: unit for unit in units for stage in unit}
    order: list[list[int]] = []
    for stage in range(len(stages)):
        unit = together.get(stage, [stage])
        if unit not in order:
            order.append(unit)
    return [(one, two) for ahead, behind in pairwise(order) for one in ahead for two in behind]


def _edge(
    source: int, target: int, stages: Sequence[Stage], groups: Sequence[MeshPlan], programs: ProgramCache
) -> Edge:
    """Partial gradients are added before they leave where the other side is no equal grid."""
    ends = [stages[source], stages[target]]
    shares = [groups[stage.group].axes[1].shares for stage in ends]
    last, first = (
        programs.layer_program(programs.module_layers(stage.module, stage.layers)[end], sharding_key(stage, None), own)
        for stage, own, end in zip(ends, shares, (-1, 0), strict=True)
    )
    rows = "G0" if ends[0].space == ends[1].space == "samples" else "G1"
    gives, takes = str(last.gives), str(first.takes)
    back, received = gradient_form(first.takes, len(shares[1])), gradient_form(last.gives, len(shares[0]))
    whole = "I" if back == "P" and (received != "P" or len(shares[0]) != len(shares[1])) else back
    return Edge(
        source=source,
        target=target,
        forward=EdgeTransfer(sent=(rows, gives), wire=(rows, gives), received=(rows, takes)),
        gradient=EdgeTransfer(sent=(rows, back), wire=(rows, whole), received=(rows, received)),
    )


def _parameters(
    the_model: Model,
    stages: Sequence[Stage],
    groups: Sequence[MeshPlan],
    programs: ProgramCache,
    sharded_state: ShardedState,
) -> Any:
    """Those of every module, numbered by the stages of the whole plan."""
    found = []
    for module in the_model.modules:
        own = [index for index, stage in enumerate(stages) if stage.module == module.name]
        split = sharded_state if len(groups[stages[own[0]].group].axes[0].shares) > 1 else "none"
        turns = stages[own[0]].turns > 1
        for one in make_parameters(
            module, [stages[index] for index in own[: 1 if turns else None]], groups, programs, split
        ):
            uses = tuple(own) if turns else tuple(own[use] for use in one.uses)
            found.append(replace(one, uses=uses, owner=own[one.owner]))
    return tuple(found)


# What is fed: functions of the step and of a sample's place in the batch.


@lru_cache
def samples(names: tuple[str, ...], step_: int) -> tuple[Sample, ...]:
    """The samples of a step, in the order of the batch: every third has images to see, every fourth some to draw,
    but for the step without images."""
    draw = np.random.default_rng(step_)

    def sizes(some: bool) -> list[tuple[int, int]]:
        count = int(draw.integers(1, 3)) if some and step_ != NO_IMAGES else 0
        return [tuple(draw.integers(1, 3, 2).tolist()) for _ in range(count)]

    config = typed_config("multimodal", described(names).config)
    return tuple(
        make_sample(
            config, JOB.sequence,
            sizes("vision" in names and place >= 4 and (place + step_) % 3 == 0),
            sizes("generator" in names and (place + step_) % 4 == 1), 1000 * step_ + place,
        )
        for place in range(JOB.batch)
    )  # fmt: skip


def names_of(the_model: Model) -> tuple[str, ...]:
    return tuple(module.name for module in the_model.modules)


def batch(names: tuple[str, ...], step_: int, places: slice) -> Batch:
    """The inputs of all modules for a run of the step's samples."""
    return batch_of(typed_config("multimodal", described(names).config), samples(names, step_)[places])


def counts(names: tuple[str, ...], step_: int) -> dict[str, list[int]]:
    """Tokens of every sample in the packed spaces."""
    made = samples(names, step_)
    return {"patches": [len(one.image_places) for one in made], "latents": [len(one.condition_places) for one in made]}


def images(names: tuple[str, ...], step_: int) -> dict[str, list[tuple[int, ...]]]:
    """Tokens of every image of every sample in the packed spaces."""
    found: dict[str, list[tuple[int, ...]]] = {"patches": [], "latents": []}
    for place in range(JOB.batch):
        made = batch(names, step_, slice(place, place + 1))
        for space, module in (("patches", "vision"), ("latents", "generator")):
            starts = made[module]["documents"][0].tolist() if module in names else []
            found[space].append(tuple(starts.count(start) for start in sorted({*starts})))
    return found


def divisors(names: tuple[str, ...], step_: int) -> dict[str, int]:
    """What every module's loss is divided by."""
    return divisors_of(batch(names, step_, slice(None)))


def feeds(the_plan: Plan, names: tuple[str, ...], device: int, step_: int) -> dict[int, list[list[StageInputs]]]:
    """Feeds of a device by stage: [microbatch][slice]."""
    shape, result = batch_shape(the_plan), {}
    for index, stage in enumerate(the_plan.stages):
        group = the_plan.groups[stage.group].to_mesh()
        if device in group.devices:
            replica = group.axis_position(device, "replica")
            result[index] = []
            for unit in shape.own_units(index):
                run = slice(*shape.batch_run(index, unit, replica))
                inputs = batch(names, step_, run)[stage.module]
                if shape.divides_images(index):
                    tokens = [*chain.from_iterable(images(names, step_)[stage.space][run])]
                    inputs = _some(inputs, token_runs(tokens, shape.shares[index])[replica])
                result[index].append([_feed(inputs, step_)])
    return result


def _some(inputs: Mapping[str, torch.Tensor], run: tuple[int, int]) -> dict[str, torch.Tensor]:
    """A run of the tokens of a packed row, as a row of its own."""
    found = {name: value[:, slice(*run)] for name, value in inputs.items()}
    return found | {"documents": found["documents"] - run[0]}


def _feed(inputs: Mapping[str, torch.Tensor], step_: int) -> StageInputs:
    roles = {name: inputs.get(name) for name in ("tokens", "positions", "labels", "documents")}
    return StageInputs(**roles, data={name: x for name, x in inputs.items() if name not in roles}, step=step_)


def reference(the_model: Model, step_: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients of what is trained) of one process: the family's plain modules, the whole batch at once."""
    names = names_of(the_model)
    layers = build_layers("multimodal", the_model.config, device="cpu", dtype=torch.float64)
    value = initial_values(plan(the_model, {name: Layout() for name in names}, microbatches=1), the_model)
    for layer in layers:
        for local, parameter in layer.named_parameters():
            shape = tuple(parameter.shape)
            parameter.data.copy_(value(layer.parameter_names[local], shape, tuple((0, n) for n in shape)))
    weights = the_model.config["loss_weights"]
    found = step(layers, batch(names, step_, slice(None)), weights)
    loss = sum(weights[name] * float(found.losses[name]) / found.divisors[name] for name in found.losses)
    return loss, dict(found.gradients)
