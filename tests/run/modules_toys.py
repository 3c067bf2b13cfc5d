"""A model of three modules as plain graphs, its data, plans for it in any layout, and what one process makes of it.

Images come in as packed rows: `vision` (space patches) gives one vector a patch, `language` puts them among those of
its tokens and gives, beside its loss, the hidden states at some places, from which `generator` (space latents) predicts
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from pipefit.data.stepplan import batch_shape
from pipefit.model.graph import Graph, Layer, Model, Module, Operator, ParameterSpec, Tensor
from pipefit.plan.order import edge_keys, frozen_in, lower_for, order_of
from pipefit.plan.sharded import Programs
from pipefit.plan.structure import make_parameters
from pipefit.plan.types import (
    AxisPlan,
    Edge,
    GroupPlan,
    Hashes,
    Job,
    ModelSource,
    Plan,
    Space,
    Stage,
    Wire,
)
from pipefit.run.feed import Feed
from pipefit.run.initial import initial_values
from pipefit.schedule.families import family
from pipefit.schedule.problem import Problem

VOCABULARY, WIDTH, INNER, PIXELS, NUMBERS = 24, 8, 12, 6, 3
JOB = Job(batch=12, sequence=7, precision="float64", seed=3)
WEIGHTS = {"language": 1.0, "generator": 0.5}


def layer_graph(
    inputs: Sequence[Tensor],
    steps: Sequence[tuple[str, tuple[str, ...], Tensor, dict[str, Any]]],
    outputs: tuple[str, ...],
    parameters: Mapping[str, tuple[int, ...]],
    frozen: bool,
) -> Graph:
    """A graph of (kind, inputs, result, attributes) steps."""
    return Graph(
        inputs=tuple(inputs),
        outputs=outputs,
        operators=tuple(
            Operator(kind=kind, inputs=names, outputs=(made.name,), attributes=attributes)
            for kind, names, made, attributes in steps
        ),
        parameters=tuple(
            ParameterSpec(name=name, shape=shape, trainable=not frozen) for name, shape in parameters.items()
        ),
        tensors=tuple(made for _, _, made, _ in steps),
    )


def block(frozen: bool) -> Graph:
    """x + down(silu(up(x)))."""
    size = ("B", "T")
    return layer_graph(
        [Tensor(name="x", shape=(*size, WIDTH))],
        [
            ("linear", ("x", "up", ""), Tensor(name="h", shape=(*size, INNER)), {}),
            ("silu", ("h",), Tensor(name="a", shape=(*size, INNER)), {}),
            ("linear", ("a", "down", ""), Tensor(name="d", shape=(*size, WIDTH)), {}),
            ("add", ("x", "d"), Tensor(name="y", shape=(*size, WIDTH)), {}),
        ],
        ("y",),
        {"up": (INNER, WIDTH), "down": (WIDTH, INNER)},
        frozen,
    )


def pixels(frozen: bool) -> Graph:
    return layer_graph(
        [Tensor(name="pixels", shape=("B", "T", PIXELS), role="data")],
        [("linear", ("pixels", "weight", ""), Tensor(name="y", shape=("B", "T", WIDTH)), {})],
        ("y",),
        {"weight": (WIDTH, PIXELS)},
        frozen,
    )


def see(frozen: bool) -> Graph:
    """Tokens to vectors, with those of image patches in their places."""
    e, y = (Tensor(name=name, shape=("B", "T", WIDTH)) for name in ("e", "y"))
    return layer_graph(
        [
            Tensor(name="x", shape=(1, "I", WIDTH)),
            Tensor(name="tokens", shape=("B", "T"), dtype="int64", role="tokens"),
            Tensor(name="image_places", shape=(1, "I"), dtype="int64", role="data"),
        ],
        [("embedding", ("tokens", "weight"), e, {}), ("put_tokens", ("e", "x", "image_places"), y, {})],
        ("y",),
        {"weight": (VOCABULARY, WIDTH)},
        frozen,
    )


def tell(frozen: bool) -> Graph:
    """The loss, and the hidden states that the generator is conditioned on."""
    return layer_graph(
        [
            Tensor(name="x", shape=("B", "T", WIDTH)),
            Tensor(name="labels", shape=("B", "T"), dtype="int64", role="labels"),
            Tensor(name="condition_places", shape=(1, "L"), dtype="int64", role="data"),
        ],
        [
            ("linear", ("x", "weight", ""), Tensor(name="logits", shape=("B", "T", VOCABULARY)), {}),
            ("cross_entropy", ("logits", "labels"), Tensor(name="nll", shape=(), dtype="float32"),
             {"ignore_index": -100}),
            ("take_tokens", ("x", "condition_places"), Tensor(name="c", shape=(1, "L", WIDTH)), {}),
        ],
        ("c", "nll"),
        {"weight": (VOCABULARY, WIDTH)},
        frozen,
    )  # fmt: skip


def end(frozen: bool) -> Graph:
    """The loss alone, where no generator follows."""
    graph = tell(frozen)
    return replace(
        graph, inputs=graph.inputs[:2], outputs=("nll",), operators=graph.operators[:2], tensors=graph.tensors[:2]
    )


def noise(frozen: bool) -> Graph:
    return layer_graph(
        [Tensor(name="x", shape=("B", "T", WIDTH)), Tensor(name="noisy", shape=("B", "T", NUMBERS), role="data")],
        [
            ("linear", ("x", "of_x", ""), Tensor(name="a", shape=("B", "T", WIDTH)), {}),
            ("linear", ("noisy", "of_noisy", ""), Tensor(name="b", shape=("B", "T", WIDTH)), {}),
            ("add", ("a", "b"), Tensor(name="y", shape=("B", "T", WIDTH)), {}),
        ],
        ("y",),
        {"of_x": (WIDTH, WIDTH), "of_noisy": (WIDTH, NUMBERS)},
        frozen,
    )


def predict(frozen: bool) -> Graph:
    return layer_graph(
        [Tensor(name="x", shape=("B", "T", WIDTH)), Tensor(name="wanted", shape=("B", "T", NUMBERS), role="data")],
        [
            ("linear", ("x", "weight", ""), Tensor(name="y", shape=("B", "T", NUMBERS)), {}),
            ("squared_error", ("y", "wanted"), Tensor(name="loss", shape=(), dtype="float32"), {}),
        ],
        ("loss",),
        {"weight": (NUMBERS, WIDTH)},
        frozen,
    )  # fmt: skip


LAYERS = {
    "vision": ("patches", {"pixels": pixels, "block.0": block, "block.1": block}),
    "language": ("samples", {"see": see, "block.0": block, "block.1": block, "tell": tell}),
    "generator": ("latents", {"noise": noise, "block.0": block, "predict": predict}),
}


@lru_cache
def model(names: tuple[str, ...] = ("vision", "language", "generator"), frozen: tuple[str, ...] = ()) -> Model:
    """The model of these modules; those that are frozen have no trainable parameter."""
    graphs, modules = {}, []
    for name in names:
        space, layers = LAYERS[name]
        chain = []
        for own, make in layers.items():
            graph = (end if make is tell and "generator" not in names else make)(name in frozen)
            chain.append(Layer(name=f"{name}.{own}", graph=f"{name}.{own}",
                               parameters={p.name: f"{name}.{own}.{p.name}" for p in graph.parameters}))  # fmt: skip
            graphs[f"{name}.{own}"] = graph
        modules.append(Module(name=name, layers=tuple(chain), space=space))
    config = {"initializer_range": 0.4, "loss_weights": WEIGHTS}
    return Model(family="toy", config=config, modules=tuple(modules), graphs=graphs)


@dataclass(frozen=True)
class Layout:
    """How one module lies: replica shares, and the layers at which its stages are cut."""

    replicas: tuple[int, ...] = (1,)
    cuts: tuple[int, ...] = ()


def plan(
    the_model: Model,
    layouts: Mapping[str, Layout],
    *,
    microbatches: int = 3,
    order: str = "1f1b",
    zero1: bool = False,
    job: Job = JOB,
    together: bool = False,
) -> Plan:
    """Every module on devices of its own, one lane a stage; `together`: all stages on the same devices, one lane."""
    groups, stages, devices, lanes = [], [], 0, []
    for module in the_model.modules:
        layout = layouts[module.name]
        for run in pairwise((0, *layout.cuts, len(module.layers))):
            if not together or not groups:
                own = tuple(range(devices, devices + len(layout.replicas)))
                groups.append(GroupPlan(axes=(AxisPlan(name="replica", shares=layout.replicas),), devices=own))
                devices += len(own)
            lanes.append(len(groups) - 1)
            stages.append(Stage(module=module.name, layers=run, group=len(groups) - 1, space=module.space))
    edges = []
    for source, (one, two) in enumerate(pairwise(stages)):
        form = ("G0",) if one.space == two.space == "samples" else ("G1",)
        wire = Wire(sent=form, wire=form, received=form)
        edges.append(Edge(source=source, target=source + 1, forward=wire, gradient=wire))
    parameters = parameters_of(the_model, stages, groups, zero1)
    frozen = frozen_in(len(stages), edges, parameters)
    problem = Problem(placement=tuple(lanes), microbatches=microbatches, edges=edge_keys(edges))
    lowered = lower_for(family(order)(problem), groups, stages, edges, parameters, frozen=frozen)
    packed = tuple(Space(name=m.space, rows=job.batch, tokens=0) for m in the_model.modules if m.space != "samples")
    return Plan(
        version=2,
        job=job,
        model=ModelSource(name="toy", family=the_model.family, config=the_model.config),
        groups=tuple(groups),
        spaces=(Space(name="samples", rows=job.batch, tokens=job.sequence), *packed),
        stages=tuple(stages),
        edges=tuple(edges),
        parameters=parameters,
        order=order_of(lowered, (job.sequence,)),
        hashes=Hashes(model=the_model.hash, cluster=""),
    )


def parameters_of(the_model: Model, stages: Sequence[Stage], groups: Sequence[GroupPlan], zero1: bool) -> Any:
    """Those of every module, numbered by the stages of the whole plan."""
    programs, found = Programs(the_model), []
    for module in the_model.modules:
        own = [index for index, stage in enumerate(stages) if stage.module == module.name]
        split = zero1 and len(groups[stages[own[0]].group].devices) > 1
        for one in make_parameters(module, [stages[index] for index in own], groups, programs, split):
            uses = tuple(own[use] for use in one.uses)
            found.append(replace(one, uses=uses, owner=own[one.owner], stored=("I",), state=one.state[:1]))
    return tuple(found)


# What is fed: functions of the step and of a sample's place in the batch.


def counts(job: Job, step: int) -> dict[str, list[int]]:
    """Tokens of every sample: none for many, so that whole microbatches of some replicas have none."""
    draw = np.random.default_rng(1000 + step)
    patches, latents = draw.integers(0, 6, job.batch), draw.integers(0, 5, job.batch)
    patches[: job.batch // 3] = 0  # the first microbatch of three, and more
    patches[draw.random(job.batch) < 0.3] = 0
    latents[draw.random(job.batch) < 0.4] = 0
    patches[-1] = latents[-1] = 5
    return {"patches": patches.tolist(), "latents": latents.tolist()}


def sample(job: Job, step: int, place: int) -> dict[str, torch.Tensor]:
    """One sample's tensors."""
    draw = np.random.default_rng(100_000 * step + place)
    many = {space: numbers[place] for space, numbers in counts(job, step).items()}
    labels = draw.integers(0, VOCABULARY, job.sequence)
    labels[draw.random(job.sequence) < 0.2] = -100
    made = {
        "pixels": draw.normal(size=(many["patches"], PIXELS)),
        "tokens": draw.integers(0, VOCABULARY, job.sequence),
        "labels": labels,
        "image_places": draw.permutation(job.sequence)[: many["patches"]],
        "condition_places": draw.permutation(job.sequence)[: many["latents"]],
        "noisy": draw.normal(size=(many["latents"], NUMBERS)),
        "wanted": draw.normal(size=(many["latents"], NUMBERS)),
    }
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in made.items()}


def feed(job: Job, step: int, places: range) -> Feed:
    """What a stage of any module reads of these samples."""
    found = [sample(job, step, place) for place in places]

    def packed(name: str) -> torch.Tensor:
        return torch.cat([one[name] for one in found])[None]

    def places_of(name: str) -> torch.Tensor:
        return torch.cat([one[name] + row * job.sequence for row, one in enumerate(found)])[None]

    data = {name: packed(name) for name in ("pixels", "noisy", "wanted")}
    data |= {name: places_of(name) for name in ("image_places", "condition_places")}
    return Feed(
        tokens=torch.stack([one["tokens"] for one in found]),
        labels=torch.stack([one["labels"] for one in found]),
        data=data,
        step=step,
    )


def feeds(the_plan: Plan, device: int, step: int) -> dict[int, list[list[Feed]]]:
    """Feeds of a device by stage: [microbatch][slice]."""
    shape, result = batch_shape(the_plan), {}
    for index, stage in enumerate(the_plan.stages):
        group = the_plan.groups[stage.group].group()
        if device in group.devices:
            replica = group.position(device, "replica")
            runs = [shape.run(index, microbatch, replica) for microbatch in range(the_plan.order.microbatches)]
            made = [[feed(the_plan.job, step, range(*run))] for run in runs]
            if stage.space != "samples":  # packed: (1, T); the rows of the samples are not this stage's
                for each in made:
                    each[0].tokens = each[0].labels = None
                    kind = "pixels" if stage.space == "patches" else "noisy"
                    each[0].documents = torch.zeros(each[0].data[kind].shape[:2], dtype=torch.int64)
            result[index] = made
    return result


def divisors(job: Job, step: int) -> dict[str, int]:
    """What every module's loss is divided by."""
    samples = [sample(job, step, place) for place in range(job.batch)]
    labels = sum(int((one["labels"] != -100).sum()) for one in samples)
    return {"language": labels, "generator": sum(one["wanted"].numel() for one in samples)}


def reference(the_model: Model, job: Job = JOB, step: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients of what is trained) of one process in plain PyTorch, the whole batch at once."""
    names = {layer.parameters[spec.name]: spec for layer in the_model.layers
             for spec in the_model.layer_graph(layer).parameters}  # fmt: skip
    value = initial_values(plan(the_model, {m.name: Layout() for m in the_model.modules}, microbatches=1), the_model)
    p = {
        name: value(name, spec.shape, tuple((0, n) for n in spec.shape)).double().requires_grad_(spec.trainable)
        for name, spec in names.items()
    }
    whole, there = feed(job, step, range(job.batch)), [module.name for module in the_model.modules]

    def blocks(x: torch.Tensor, module: str, count: int) -> torch.Tensor:
        for index in range(count):
            up, down = p[f"{module}.block.{index}.up"], p[f"{module}.block.{index}.down"]
            x = x + functional.silu(x @ up.t()) @ down.t()
        return x

    x = blocks(whole.data["pixels"] @ p["vision.pixels.weight"].t(), "vision", 2)
    h = functional.embedding(whole.tokens, p["language.see.weight"]).reshape(-1, WIDTH)
    h = h.index_copy(0, whole.data["image_places"][0], x[0])
    h = blocks(h, "language", 2)
    logits = h @ p["language.tell.weight"].t()
    by = divisors(job, step)
    loss = functional.cross_entropy(logits, whole.labels.reshape(-1), reduction="sum") / by["language"]
    if "generator" in there:
        c = h[whole.data["condition_places"]]
        g = c @ p["generator.noise.of_x"].t() + whole.data["noisy"] @ p["generator.noise.of_noisy"].t()
        y = blocks(g, "generator", 1) @ p["generator.predict.weight"].t()
        loss = loss + WEIGHTS["generator"] * ((y - whole.data["wanted"]) ** 2).sum() / by["generator"]
    if loss.requires_grad:
        loss.backward()
    return float(loss.detach()), {name: value.grad for name, value in p.items() if value.requires_grad}
