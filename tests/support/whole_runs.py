"""Whole models captured, synthesized for a mixed cluster, and run on gloo: what each rank does, and what is compared.

The reference is the user's own module with its own loss, in float64, in one process.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from tests.support.in_float64 import AllInFloat64

from pipefit.cluster.types import DeviceKind
from pipefit.run.sharded.collectives import ShardContext
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.run.stage_inputs import StageInputs
from pipefit.shard.chain import ChainSearch
from pipefit.shard.pricing import ShardSetting
from pipefit.shard.recipe import parse_recipe, write_program
from pipefit.shard.synthesize import synthesize_program

EXACT = 1e-9


def mixed_setting(fast: int = 2, slow: int = 6, rows: int = 16, speed: float = 1e9, ratio: float = 3.0) -> ShardSetting:
    """Two kinds of devices, one of them `ratio` times as fast, with links of `speed` bytes/s."""

    def kind(name: str, flops: float) -> DeviceKind:
        return DeviceKind(
            name=name,
            memory_bytes=2**34,
            memory_bandwidth_bytes_per_s=flops / 5,
            peak_flops_per_s=dict.fromkeys(("float64", "float32", "bfloat16"), flops),
            efficiency=1.0,
            overhead_s=0.0,
        )

    count = fast + slow

    def collective(kind: str, size: float) -> float:
        once = (count - 1) * (1e-7 + size / count / speed)
        return 2 * once if kind == "all_reduce" else once

    return ShardSetting(
        kinds=(kind("fast", ratio * 1e10),) * fast + (kind("slow", 1e10),) * slow,
        collective=collective,
        rows=rows,
        tokens=1,
        precision="float64",
        microbatches=1,
    )


def synthesized(model: Any, setting: ShardSetting) -> tuple[tuple[int, ...], list[str]]:
    """(shares, the recipe of every layer)."""
    found = synthesize_program(ChainSearch(model, setting), model.layers)
    return found.shares, [link.layer_recipe.recipe_text for link in found.links]


def reference(example: Any, inputs: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients by name) of the user's module."""
    module = example.module.double().train()
    module.zero_grad()
    with AllInFloat64():
        loss = _loss(example, module, inputs)
    loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def _loss(example: Any, module: Any, inputs: dict[str, torch.Tensor]) -> Any:
    given = {**example.inputs, **inputs}
    if example.loss is not None:
        labels = given.pop(example.labels)
        return example.loss(module(**given), labels)
    result = module(**given)
    return getattr(result, "loss", result)


def feed_of(model: Any, inputs: dict[str, torch.Tensor]) -> StageInputs:
    """The feed that gives these inputs to a captured model."""
    roles = {"input_ids": "tokens", "position_ids": "positions", "labels": "labels"}
    known = {t.name: t.role for layer in model.layers for t in model.layer_graph(layer).inputs}
    feed = StageInputs(rows=torch.arange(next(iter(inputs.values())).shape[0]))
    data = {}
    for name, value in inputs.items():
        role = roles.get(name, name)
        if known.get(role) == role:
            setattr(feed, role, value)
        else:
            data[name] = value
    feed.data = data
    return feed


def run_whole(
    group: Any,
    rank: int,
    model: Any,
    shares: Any,
    recipes: Any,
    state: Any,
    feed: StageInputs,
    divisor: int,
    mode: str = "B",
    recompute: Any = "none",
) -> Any:
    """(loss, whole gradients by name) of one step, as this rank sees it; shares () for one device."""
    graphs = [model.layer_graph(layer) for layer in model.layers]
    places: dict[str, Any] = {}
    shard = None
    if shares:
        programs = [
            write_program(graph, shares, parse_recipe(text)) for graph, text in zip(graphs, recipes, strict=True)
        ]
        graphs = [program.graphs[rank] for program in programs]
        shard = ShardContext(group=group, shares=tuple(shares), position=rank)
        for layer, program in zip(model.layers, programs, strict=True):
            for name, form in program.parameter_forms.items():
                sizes = [g.find_parameter(name).shape[form.dim] for g in program.graphs] if form.dim is not None else []
                places[layer.parameters[name]] = (form.dim, [0, *itertools.accumulate(sizes)])
    layers = [
        StageLayer(layer.name, graph, layer.parameters) for layer, graph in zip(model.layers, graphs, strict=True)
    ]
    program = StageProgram(layers, StageSetup(dtype=torch.float64, shard=shard, recompute=recompute))
    buffers = {name: torch.zeros_like(p.data) for name, p in program.parameters.items()}
    for name, parameter in program.parameters.items():
        parameter.data.copy_(part(state[name], places.get(name), rank))
    program.bind_gradients(buffers)
    program.begin_step(0, divisor)
    loss = float(program.forward(0, 0, {}, feed)["loss"]) / divisor
    if mode == "B":
        program.backward(0, 0, {})
    else:
        program.backward_input(0, 0, {})
        program.backward_weight(0, 0)
    found = {}
    for name, buffer in buffers.items():
        full = torch.zeros_like(state[name])
        part(full, places.get(name), rank).copy_(buffer)
        if shares:
            dist.all_reduce(full, group=group)
        found[name] = full
    return loss, found


def part(value: torch.Tensor, place: Any, rank: int) -> torch.Tensor:
    if place is None or place[0] is None:
        return value
    dim, stops = place
    return value.narrow(dim, stops[rank], stops[rank + 1] - stops[rank])


def compare(found: Any, wanted: Any) -> None:
    """Loss and every gradient."""
    assert abs(found[0] - wanted[0]) <= EXACT * max(1.0, abs(wanted[0])), (found[0], wanted[0])
    assert set(found[1]) <= set(wanted[1])
    missing = {name for name in set(wanted[1]) - set(found[1]) if wanted[1][name].abs().max() > 0}
    assert not missing, missing
    for name, gradient in found[1].items():
        scale = wanted[1][name].abs().max().item() + 1e-12
        error = (gradient - wanted[1][name]).abs().max().item()
        assert error <= EXACT * scale + 1e-12, f"{name}: {error} of {scale}"


_GROUP: list[Any] = []


def join() -> None:
    """The group of all processes of the pool."""
    _GROUP[:] = [dist.new_group(list(range(dist.get_world_size())))]


def run_case(case: Any) -> bool:
    """One case on this rank against what the user's module gave."""
    model, shares, recipes, state, feed, divisor, wanted, mode = case
    found = run_whole(_GROUP[0], dist.get_rank(), model, shares, recipes, state, feed, divisor, mode)
    compare(found, wanted)
    return True
