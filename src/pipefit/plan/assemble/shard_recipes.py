"""Recipes for the shard programs of a plan with searched sharding: one for every distinct layer.

They are searched once for a job, before the rest of the plan: for the requested shares, on the first group of devices,
for the fixed rows and microbatches. If the rows are unknown, a microbatch has one row, so that no program splits rows
that a plan may not have. The search assumes that a device holds only its part of the layers. Later planning decides
whether the plan fits, with recomputation and sharded optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from pipefit.cluster.types import DeviceKind
from pipefit.cost.comm.lowerings import EVEN, lowerings_over, shard_collective
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.roofline import LayerCosts, RooflineCosts
from pipefit.layout import split_by_shares
from pipefit.model.graph import Model, ModelModule
from pipefit.optimizers import DEFAULT, find_optimizer
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.precision import Precision
from pipefit.shard.chain import ChainSearch
from pipefit.shard.pricing import ShardSetting
from pipefit.shard.synthesize import leanest_program

COLLECTIVES = EVEN


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRequest:
    """The facts of a plan that its shard programs depend on."""

    shares: tuple[int, ...]
    devices: tuple[int, ...]
    "Devices of one shard group."
    rows: int
    "Rows of a microbatch on that group."
    microbatches: int
    lanes: int
    "Largest number of lanes that share the layers."


def request_from_config(decisions: ParallelConfig, batch: int) -> RecipeRequest:
    """Return the request of these decisions, for the replica with the fewest rows."""
    rows = min(stop - start for start, stop in split_by_shares(batch // decisions.microbatches, decisions.replicas))
    return RecipeRequest(
        shares=decisions.shards,
        devices=decisions.lane_devices()[0][: len(decisions.shards)],
        rows=rows,
        microbatches=decisions.microbatches,
        lanes=decisions.lane_count,
    )


def request_from_constraints(constraints: Constraints, job: Job, devices: int) -> RecipeRequest:
    """Return the request of these constraints, on a cluster with this many devices. An invalid mapping is ignored here;
    a later check refuses it."""
    shares = constraints.shards or (1,)
    mapping = constraints.mapping
    first = mapping[: len(shares)] if isinstance(mapping, tuple) else ()
    if len(first) < len(shares) or not all(0 <= device < devices for device in first):
        first = tuple(range(len(shares)))
    microbatches = constraints.microbatches or max(1, job.batch // constraints.replica_count)
    rows = 1
    if constraints.microbatches is not None and constraints.replicas is not None and job.batch % microbatches == 0:
        parts = split_by_shares(job.batch // microbatches, constraints.replicas)
        rows = max(1, min(stop - start for start, stop in parts))
    lanes = devices // (len(shares) * constraints.replica_count)
    if constraints.lane_of_stage is not None:
        lanes = max(constraints.lane_of_stage) + 1
    elif constraints.stage_count is not None:
        lanes = min(lanes, constraints.stage_count)
    return RecipeRequest(shares=shares, devices=first, rows=rows, microbatches=microbatches, lanes=max(1, lanes))


def recipe_chains(model: Model, network: Network, layers: LayerCosts, job: Job, asked: RecipeRequest) -> ChainSearch:
    """Return the search of programs for a request. Its results hold for any number of lanes."""
    setting = shard_setting(
        model,
        network,
        layers,
        devices=asked.devices,
        rows=asked.rows,
        tokens=job.sequence,
        precision=job.precision,
        optimizer=job.optimizer,
        microbatches=asked.microbatches,
        lanes=asked.lanes,
    )
    return ChainSearch(model, setting)


def searched_recipes(chains: ChainSearch, module: ModelModule, asked: RecipeRequest) -> Mapping[str, str]:
    """Return the recipe of every graph of a module, as text. `chains` are those of the request or of another number of
    lanes. Raises PlanError if these shares have no program."""
    chains = replace(chains, setting=replace(chains.setting, lanes=asked.lanes))
    chain = leanest_program(chains, module.layers, asked.shares)
    return {layer.graph: link.layer_recipe.recipe_text for layer, link in zip(module.layers, chain.links, strict=True)}


def shard_setting(
    model: Model,
    network: Network,
    layers: LayerCosts,
    *,
    devices: tuple[int, ...],
    rows: int,
    tokens: int,
    precision: Precision,
    microbatches: int,
    lanes: int = 1,
    beside: Sequence[tuple[int, ...]] = (),
    optimizer: str = DEFAULT,
) -> ShardSetting:
    """Return the devices of a shard axis with the costs of their links and measured layers. `beside` are groups that
    run at the same time."""
    kinds = tuple(network.kinds[device] for device in devices)
    rings = [devices, *beside]

    shape = MicrobatchShape(rows, tokens, 0, tokens)

    def whole_s(source: LayerCosts, kind: DeviceKind) -> float:
        costs = [source.layer_cost(LayerQuery(graph, shape, kind, precision)) for graph in model.graphs.values()]
        return fsum(cost.forward_s + cost.input_s + cost.weight_s for cost in costs)

    slowness = {
        kind.name: whole_s(layers, kind) / whole_s(RooflineCosts(), kind)
        for kind in {kind.name: kind for kind in kinds}.values()
    }
    return ShardSetting(
        kinds=kinds,
        collective=shard_collective(network, rings, (1,) * len(devices)),
        lowered=lowerings_over(network, rings).all_of,
        reshare_s=lowerings_over(network, rings).reshare_s,
        rows=rows,
        tokens=tokens,
        precision=precision,
        microbatches=microbatches,
        optimizer=find_optimizer(optimizer),
        slowness=slowness,
        lanes=lanes,
    )
