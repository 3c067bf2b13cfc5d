"""Models and plans for the worker's tests: every layout of up to eight processes that the spine must run exactly."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from tests.support.decoder_variants import DECODER_VARIANTS
from tests.support.worker_cases import SEPARATOR, rows_of

from pipefit.cluster import local_cluster
from pipefit.layout import split_by_shares
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Model
from pipefit.model.registry import build_layers, describe_config
from pipefit.plan.assemble.order import lower_for_plan, make_schedule_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Edge, EdgeTransfer, Job, MeshPlan, Plan
from pipefit.run.stage.initial_values import initial_values
from pipefit.schedule.actions import Action, Schedule, parse_lanes

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}
WIDE = LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "intermediate_size": 48}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "norm_topk_prob": True, "mlp_only_layers": [0],
}  # fmt: skip
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 5}
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4,
    "initializer_range": 0.2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "tied": LLAMA | {"tie_word_embeddings": True},
    "qwen3": QWEN3,
    "wide": WIDE,
    "gpt2": GPT2,
    "mixtral": MIXTRAL,
    "qwen3-moe": QWEN3_MOE,
    "eight-experts": MIXTRAL | {"num_local_experts": 8, "num_key_value_heads": 4},
    "mistral": MISTRAL,
    "dropout": GPT2 | {"embd_pdrop": 0.2, "resid_pdrop": 0.3},
    **{name: config | {"vocab_size": 96} for name, config in DECODER_VARIANTS.items()},
}
VOCABULARY = 96
JOB = Job(batch=8, sequence=12, precision="float64", seed=5)


@lru_cache
def model(name: str) -> Model:
    """The captured model of that name in CONFIGS."""
    described = describe_config(CONFIGS[name], name, name)
    return capture_family(described.family, described.config)


def plan(name: str, job: Job = JOB, **decisions: Any) -> Plan:
    """The plan of explicit decisions for a model of CONFIGS."""
    return build_plan(model(name), local_cluster(8), job, ParallelConfig(**decisions), name=name)


def with_order(base: Plan, name: str, lanes: list[str]) -> Plan:
    """The plan with a computed order written by hand, lowered for it."""
    order = base.order
    computed = Schedule(
        name=name,
        placement=order.placement,
        microbatches=order.microbatches,
        slices=len(order.slices),
        lanes=parse_lanes(lanes),
    )
    lowered = lower_for_plan(computed, base.groups, base.stages, base.edges, base.parameters)
    return replace(base, order=make_schedule_plan(lowered, order.slices))


def zero_bubble_like(base: Plan) -> Plan:
    """1F1B with every B split into I and W, and W put off by as many microbatches as the stage is deep."""
    lanes = []
    for lane, stage in enumerate(base.order.placement):
        ahead = len(base.order.placement) - stage
        words: list[str] = []
        waiting: list[Action] = []
        for action in base.order.to_schedule().lanes[lane]:
            if action.kind == "B":
                words.append(f"{stage}I{action.microbatch}")
                waiting.append(action)
                if len(waiting) >= len(base.order.placement) - ahead + 1:
                    words.append(f"{stage}W{waiting.pop(0).microbatch}")
            elif action.kind == "F":
                words.append(str(action))
        lanes.append(" ".join([*words, *(f"{stage}W{action.microbatch}" for action in waiting)]))
    return with_order(base, "zb-like", lanes)


V_LANES = [
    "0F0 0F1 3F0 3I0 3F1 3W0 3I1 0I0 3W1 0W0 0I1 0W1",
    "1F0 2F0 1F1 2F1 2I0 1I0 2W0 2I1 1I1 1W0 2W1 1W1",
]
"""A V placement by hand: stages 0 and 3 on one lane, 1 and 2 on the other, weight gradients put off."""


V_STAGES: dict[str, Any] = {"stages": 4, "placement": (0, 1, 1, 0), "schedule": "gpipe"}
"""Decisions of a plan that V_LANES can order."""

PlanCase = tuple[str, Callable[[], Plan]]
"""A model of CONFIGS, and the function that makes a plan of it."""


def v_ordered(case: PlanCase) -> PlanCase:
    """The case, of the decisions V_STAGES, with the order V_LANES."""
    name, make = case
    return name, lambda: with_order(make(), "v", V_LANES)


def weights_late(case: PlanCase) -> PlanCase:
    """The case with its weight gradients put off to W."""
    name, make = case
    return name, lambda: zero_bubble_like(make())


def with_groups(base: Plan, grids: list[tuple[tuple[int, ...], tuple[int, ...]]], sharded: Plan | None = None) -> Plan:
    """The plan with other grids (replicas, shards) for its lanes, devices numbered lane by lane.

    Where shard counts differ, `sharded` (the same cuts under `megatron`) gives the stages of lanes with two shards.
    """
    groups, first = [], 0
    for old, (replicas, shards) in zip(base.groups, grids, strict=True):
        axes = tuple(replace(axis, shares=replicas if axis.name == "replica" else shards) for axis in old.axes)
        count = len(replicas) * len(shards)
        groups.append(MeshPlan(axes=axes, devices=tuple(range(first, first + count))))
        first += count
    many = [len(shards) > 1 for _, shards in grids]
    stages = tuple(
        sharded.stages[i] if sharded is not None and many[stage.group] else stage for i, stage in enumerate(base.stages)
    )
    parameters = tuple(
        sharded.parameters[i] if sharded is not None and many[stages[p.owner].group] else p
        for i, p in enumerate(base.parameters)
    )
    edges = tuple(_edge(edge, many[stages[edge.source].group], many[stages[edge.target].group]) for edge in base.edges)
    schedule = base.order.to_schedule()
    computed = replace(schedule, lanes=tuple(tuple(a for a in lane if a.kind in "FIWB") for lane in schedule.lanes))
    lowered = lower_for_plan(computed, groups, stages, edges, parameters)
    order = make_schedule_plan(lowered, base.order.slices)
    return replace(base, groups=tuple(groups), stages=stages, edges=edges, parameters=parameters, order=order)


def _edge(edge: Edge, source_sharded: bool, target_sharded: bool) -> Edge:
    """Between unequal shard axes partial gradients are added before they leave."""
    if source_sharded == target_sharded:
        return edge
    whole = ("G0", "I")
    partial = ("G0", "P") if target_sharded else whole
    received = ("G0", "P") if source_sharded else whole
    return replace(
        edge,
        forward=EdgeTransfer(sent=whole, wire=whole, received=whole),
        gradient=EdgeTransfer(sent=partial, wire=whole, received=received),
    )


def reference(name: str, job: Job, step: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    """(mean loss, gradients by global name) of one process: the family's plain modules, PyTorch's own autograd."""
    layers = plain_layers(name, job)
    any_plan = plan(name, job)
    tokens, labels, divisor = rows_of(any_plan, step, VOCABULARY)
    loss: Any = 0.0
    for row in range(len(tokens)) if job.documents == "apart" else ():  # each document as a sequence of its own
        ends = [i + 1 for i in range(job.sequence) if tokens[row, i] == SEPARATOR]
        for a, b in itertools.pairwise(sorted({0, *ends, job.sequence})):
            loss = loss + plain_loss(layers, tokens[row : row + 1, a:b], labels[row : row + 1, a:b], a)
    loss = (loss if job.documents == "apart" else plain_loss(layers, tokens, labels)) / divisor
    loss.backward()
    gradients: dict[str, torch.Tensor] = {}
    for layer in layers:
        for local_name, parameter in layer.named_parameters():
            gradients[layer.parameter_names[local_name]] = parameter.grad
    return float(loss.detach()), gradients


def plain_layers(name: str, job: Job) -> list[Any]:
    """The chain of plain modules with the values that every layout starts from."""
    described = describe_config(CONFIGS[name], name, name)
    layers = build_layers(described.family, described.config, device="cpu", dtype=torch.float64)
    value = initial_values(plan(name, job), model(name))
    with torch.no_grad():
        for layer in layers:
            for local_name, parameter in layer.named_parameters():
                shape = tuple(parameter.shape)
                box = tuple((0, size) for size in shape)
                parameter.copy_(value(layer.parameter_names[local_name], shape, box))
    return layers


def plain_loss(layers: list[Any], tokens: torch.Tensor, labels: torch.Tensor, start: int = 0) -> torch.Tensor:
    """The summed loss of the chain; the first token stands at place `start`."""
    import inspect

    inputs = {
        "tokens": tokens,
        "labels": labels,
        "positions": torch.arange(start, start + tokens.shape[1]).expand_as(tokens).contiguous(),
    }
    x: Any = None
    for layer in layers:
        names = list(inspect.signature(layer.forward).parameters)
        arguments = {n: inputs[n] for n in names if n in inputs}
        x = layer(**arguments) if names[0] in inputs else layer(x, **arguments)
    return x


def warm_models() -> None:
    """Capture quietly, once, before processes need the models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in CONFIGS:
            model(name)


__all__ = ["JOB", "VOCABULARY", "V_LANES", "model", "plan", "reference", "split_by_shares", "with_groups", "with_order"]
