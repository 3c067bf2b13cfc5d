"""Collectives of ZeRO-2 and ZeRO-3 within the actions of a stage: gathers of parameters, sums of gradients.

The runtime gathers the parameters of a layer while the layer before it runs, in the direction of the action, and sums
the gradients of a layer while the layer after it runs. The first gather and the last sum overlap nothing (FSDP: Zhao et
al., 2023). An action holds two layers of complete parameters and gradients at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import fsum
from typing import NamedTuple

from pipefit.cost.comm.collectives import all_gather_s, reduce_scatter_s
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.roofline import LayerCost
from pipefit.cost.pipeline.rings import split_elements
from pipefit.cost.pipeline.stage_cost import StageCost
from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES
from pipefit.cost.work import StageWork
from pipefit.optimizers.sharded_state import shards_parameters
from pipefit.precision import Precision


class StateTraffic(NamedTuple):
    """The collectives of a stage's layers in one action, and the memory of complete layers."""

    gather_s: tuple[float, ...]
    "[layer]: seconds to gather its parameters; 0 unless they are sharded."
    gather_again_s: tuple[float, ...]
    "[layer]: the same for its backward; 0 for leading layers without one."
    reduce_s: tuple[float, ...]
    "[layer]: seconds to sum its gradients."
    parameter_bytes: float
    "Complete parameters of two neighbouring layers, the largest such pair; 0 unless parameters are sharded."
    gradient_bytes: float
    "Complete gradients of the same two layers; with groups that shard the state, also a piece that is summed."
    overlap: float
    "Part of the time beside the computation that costs nothing."

    def take_layers(self, start: int, stop: int) -> StateTraffic:
        """Return the collectives of a run of these layers; the bytes stay those of all layers."""
        fields = {name: getattr(self, name)[start:stop] for name in ("gather_s", "gather_again_s", "reduce_s")}
        return self._replace(**fields)


class StageSeconds(NamedTuple):
    """The times of a stage's actions with the collectives of its sharded layers."""

    forward_s: float
    input_s: float
    weight_s: float
    backward_s: float


def state_traffic(stage: StageWork, precision: Precision, network: Network) -> StateTraffic | None:
    """Return the collectives of a stage whose replicas shard gradients or parameters; None for another stage."""
    if not stage.has_sharded_layers:
        return None
    elements = [max(counts) for counts in stage.sharded_elements]
    nothing = (0,) * len(elements)
    counts = list(zip(elements, stage.sharded_spread or nothing, strict=True))
    frozen = [max(counts) for counts in stage.sharded_frozen] or nothing
    frozen_counts = list(zip(frozen, stage.sharded_frozen_spread or nothing, strict=True))
    gathers = shards_parameters(stage.sharded_state)
    widths = COMPUTE_BYTES[precision], GRADIENT_BYTES[precision]
    seconds = {count: _collective_seconds(stage, count, widths, network) for count in {*counts, *frozen_counts}}
    gather_s = tuple(
        seconds[trained][0] + seconds[still][0] for trained, still in zip(counts, frozen_counts, strict=True)
    )
    pair = largest_pair(elements)
    complete = largest_pair([trained + still for trained, still in zip(elements, frozen, strict=True)])
    piece = max(elements) / stage.state_group if stage.state_group else 0.0
    return StateTraffic(
        gather_s=gather_s,
        gather_again_s=(0.0,) * stage.frozen + gather_s[stage.frozen :],
        reduce_s=tuple(seconds[count][1] for count in counts),
        parameter_bytes=float(complete * widths[0]) if gathers else 0.0,
        gradient_bytes=float((pair + piece) * widths[1]),
        overlap=min(network.kinds[device].overlap for device in stage.group.devices),
    )


def _collective_seconds(
    stage: StageWork, count: tuple[int, int], widths: tuple[int, int], network: Network
) -> tuple[float, float]:
    """Return the seconds to gather parameters, 0 unless they are sharded, and to sum gradients. `count` is all of their
    elements, and those replicated over the axis that divides rows and experts; `widths` are bytes per element."""
    parts = [(size, rings) for size, rings in split_elements(stage, *count) if size]
    gathers = shards_parameters(stage.sharded_state)
    return (
        fsum(all_gather_s(network, rings, size * widths[0]) for size, rings in parts if gathers),
        fsum(reduce_scatter_s(network, rings, size * widths[1]) for size, rings in parts),
    )


def largest_pair(elements: Sequence[float]) -> float:
    """Return the largest sum of two neighbouring values, or the only value."""
    return max([first + second for first, second in pairwise(elements)] or [elements[0]])


def add_state_traffic(cost: StageCost, layers: Sequence[LayerCost], traffic: StateTraffic) -> StageCost:
    """Return the cost of a stage with the collectives of its sharded layers."""
    both = traffic.parameter_bytes + traffic.gradient_bytes
    return cost._replace(
        **stage_seconds(layers, traffic)._asdict(),
        forward_passing_bytes=cost.forward_passing_bytes + traffic.parameter_bytes,
        input_passing_bytes=cost.input_passing_bytes + traffic.parameter_bytes,
        weight_passing_bytes=cost.weight_passing_bytes + traffic.gradient_bytes,
        fused_passing_bytes=cost.fused_passing_bytes + both,
    )


def stage_seconds(layers: Sequence[LayerCost], traffic: StateTraffic) -> StageSeconds:
    """Return the times of a stage of these layers with their collectives."""
    last_first = layers[::-1]
    gathers, sums = traffic.gather_again_s[::-1], traffic.reduce_s[::-1]
    nothing = (0.0,) * len(layers)

    def add_collectives(seconds: Sequence[float], before: Sequence[float], behind: Sequence[float]) -> float:
        return overlapped_s(seconds, before, behind, traffic.overlap)

    return StageSeconds(
        forward_s=add_collectives([layer.forward_s for layer in layers], traffic.gather_s, nothing),
        input_s=add_collectives([layer.input_s for layer in last_first], gathers, nothing),
        weight_s=add_collectives([layer.weight_s for layer in last_first], nothing, sums),
        backward_s=add_collectives([layer.backward_s for layer in last_first], gathers, sums),
    )


def overlapped_s(seconds: Sequence[float], before: Sequence[float], behind: Sequence[float], overlap: float) -> float:
    """Return the seconds of an action whose layers run in this order.

    `before` are the collectives that a layer needs, `behind` those of its results. While a layer runs, the gather of
    the next layer and the sum of the previous one run one after the other. `overlap` is the part of the hidden time
    that costs nothing.
    """
    serial_s = fsum(seconds) + fsum(before) + fsum(behind)
    beside = [ahead + left for ahead, left in zip((*before[1:], 0.0), (0.0, *behind[:-1]), strict=True)]
    overlapped = before[0] + fsum(map(max, seconds, beside)) + behind[-1]
    return serial_s - overlap * (serial_s - overlapped)
