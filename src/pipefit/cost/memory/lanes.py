"""Static memory on the devices of every lane, and its differences between the device kinds of a lane.

Replicas may differ in rows and in their share of a sharded optimizer state, shards in their part of the parameters. If
device kinds coincide with such differences, each kind is compared with its own memory by its own fullest device: a
small device with few rows is not rejected for the bytes of a large one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from pipefit.cost.comm.network import Network
from pipefit.cost.memory.step_end import stage_state_share
from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES, static_parts
from pipefit.cost.work import PipelineWork, StageWork
from pipefit.optimizers.sharded_state import shards_parameters


@dataclass(frozen=True, slots=True)
class StageHolding:
    """The largest parts of a stage on any device of one kind."""

    rows: int
    "Rows of a microbatch."
    positions: tuple[int, ...]
    "Positions of the shard axis; empty if all positions hold the same."
    share: float
    "Share of the optimizer state of the stage's parameters."


def stage_holdings(stage: StageWork, network: Network) -> Mapping[str, StageHolding]:
    """Return the holding of every device kind in the stage's mesh, by name."""
    names = [axis.name for axis in stage.group.axes]
    shares, total = stage.group.find_axis("replica").shares, sum(stage.data_shares)
    part, spread_part = 1.0 / stage.state_group if stage.state_group else 0.0, stage.spread_part
    even = stage.group.find_axis("shard").is_even
    holdings: dict[str, StageHolding] = {}
    places = itertools.product(*(range(axis.size) for axis in stage.group.axes))
    for device, coordinates in zip(stage.group.devices, places, strict=True):
        replica = coordinates[names.index("replica")] if "replica" in names else 0
        position = () if even else (coordinates[names.index("shard")],)
        share = (part or shares[replica] / total) * spread_part if stage.shards_state else 1.0
        known = holdings.get(network.kinds[device].name, StageHolding(0, (), 0.0))
        positions = known.positions if {*position} <= {*known.positions} else (*known.positions, *position)
        holdings[network.kinds[device].name] = StageHolding(
            max(known.rows, stage.rows[replica]), positions, max(known.share, share)
        )
    return holdings


def lanes_differ(work: PipelineWork, network: Network) -> bool:
    """Return whether devices of some lane hold different amounts because they are of different kinds."""
    if len(network.cluster.kinds) == 1:
        return False
    return any(len({*stage_holdings(stage, network).values()}) > 1 for stage in work.stages)


def lane_limits(work: PipelineWork, network: Network, kind: str = "") -> tuple[float, ...]:
    """Return the usable bytes of a process on every lane: of the smallest device, or of the devices of one kind.

    A lane without devices of that kind has an infinite limit.
    """
    limits = [float("inf")] * work.num_lanes
    for stage in work.stages:
        kinds = [network.kinds[device] for device in stage.group.devices]
        sizes = (device_kind.memory_bytes for device_kind in kinds if not kind or device_kind.name == kind)
        limits[stage.lane] = min(limits[stage.lane], float(min(sizes, default=float("inf"))))
    return tuple(limits)


def lane_parts(work: PipelineWork, network: Network | None = None, kind: str = "") -> tuple[Mapping[str, float], ...]:
    """Return the static bytes of every lane by part, on its fullest device, or on the fullest one of a kind."""
    held = [_kind_holding(stage, network, kind) for stage in work.stages]
    lanes = []
    for lane in range(work.num_lanes):
        stages = [pair for pair in zip(work.stages, held, strict=True) if pair[0].lane == lane]
        num_positions = max(len(stage.parameters.trainable) for stage, _ in stages)
        positions = {position for _, holding in stages for position in holding.positions} or range(num_positions)
        places = [
            [_stage_parts(stage, position, holding.share, work) for stage, holding in stages] for position in positions
        ]
        sums = [{name: fsum(parts[name] for parts in stage_parts) for name in stage_parts[0]} for stage_parts in places]
        for total, stage_parts in zip(sums, places, strict=True):
            total["workspace"] = stage_parts[0]["workspace"]
            for name, size in _tied_parts(work, lane, held).items():
                total[name] += size
        lanes.append(max(sums, key=lambda parts: fsum(parts.values())))
    return tuple(lanes)


def _stage_parts(stage: StageWork, position: int, share: float, work: PipelineWork) -> dict[str, float]:
    """Return the static bytes of a stage by part, at one position of the shard axis."""
    elements = _stored_elements(stage, position)
    shared_bytes = stage.parameters.shared_state_bytes
    parts = dict(static_parts(*elements, share, work.precision, work.optimizer, shared_bytes))
    if stage.has_sharded_layers:
        away = _sharded_away(stage, position, share, stage.sharded_elements, stage.sharded_spread)
        parts["gradients"] -= away * GRADIENT_BYTES[work.precision]
        if shards_parameters(stage.sharded_state):
            away += _sharded_away(stage, position, share, stage.sharded_frozen, stage.sharded_frozen_spread)
            parts["parameters"] -= away * COMPUTE_BYTES[work.precision]
    return parts


def _sharded_away(
    stage: StageWork, position: int, share: float, elements: Sequence[Sequence[int]], spread: Sequence[int]
) -> float:
    """Return those of the elements [layer][position of the shard axis] that other replicas keep."""
    sharded = sum(counts[min(position, len(counts) - 1)] for counts in elements)
    if stage.row_parts == 1:
        return (1.0 - share) * sharded
    # `share` belongs to all parameters of the stage; some may not be sharded
    divided = sum(spread) * (1.0 - 1.0 / stage.row_parts)
    return sharded - share / stage.spread_part * (sharded - divided)


def state_shares(work: PipelineWork, network: Network, kind: str) -> list[float]:
    """Return, per stage, the largest part of the optimizer state on a device of this kind."""
    return [_kind_holding(stage, network, kind).share for stage in work.stages]


def _kind_holding(stage: StageWork, network: Network | None, kind: str) -> StageHolding:
    everything = StageHolding(max(stage.rows), (), stage_state_share(stage))
    if network is None or not kind:
        return everything
    return stage_holdings(stage, network).get(kind, everything)


def _tied_parts(work: PipelineWork, lane: int, held: Sequence[StageHolding]) -> Mapping[str, float]:
    """Return the static bytes that shared parameters add to a lane.

    Each other lane that uses them adds a gradient buffer. Parameters stored once for several stages of the lane are
    subtracted.
    """
    changes = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for tied in work.tied:
        lane_stages = [index for index in tied.stages if work.stages[index].lane == lane]
        if not lane_stages or tied.rings:  # a sum over all devices is done in place
            continue
        num_peers = len({work.stages[index].lane for index in tied.stages}) - 1
        changes["gradients"] += num_peers * tied.elements * GRADIENT_BYTES[work.precision]
        for index in lane_stages[1:]:
            once = static_parts(
                tied.elements, 0, held[index].share, work.precision, work.optimizer, tied.shared_state_bytes
            )
            for name in changes:
                changes[name] -= once[name]
    return changes


def _stored_elements(stage: StageWork, position: int) -> tuple[int, int]:
    counts = stage.parameters
    index = min(position, len(counts.trainable) - 1)
    return counts.trainable[index], counts.frozen[index]
