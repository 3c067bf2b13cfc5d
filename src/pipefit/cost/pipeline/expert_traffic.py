"""All-to-alls of an expert axis: tokens are exchanged over the axis and the shard axis together.

The graphs of a stage name these exchanges (`model/ops/moe.py`), so layer times include them. All replicas run them at
about the same time, so their groups share the links.
"""

from __future__ import annotations

from pipefit.cost.comm.collectives import RingTuples
from pipefit.cost.comm.lowerings import lowerings_over, shard_collective
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.operator_times import CollectiveTime
from pipefit.cost.pipeline.rings import expert_rings
from pipefit.cost.work import StageWork
from pipefit.model.ops.moe import EXPERT_EXCHANGE


def exchange_rings(stage: StageWork, network: Network) -> RingTuples:
    """Return the devices that exchange tokens over an expert axis; none for a stage without one."""
    return network.representative_rings(expert_rings(stage)) if stage.expert_parts > 1 else ()


def stage_collective(
    network: Network, rings: RingTuples, shares: tuple[int, ...], exchanging: RingTuples
) -> CollectiveTime:
    """Return the time function of the collectives of a stage: over shard groups with these shares (`rings`), and over
    an expert axis (`exchanging`: `exchange_rings`)."""
    over_shards = shard_collective(network, rings, shares)
    if not exchanging:
        return over_shards
    devices = len(exchanging[0])
    parts = (1.0 / devices,) * devices

    def collective_s(kind: str, total_bytes: float, how: str = "padded", units: tuple[int, ...] = ()) -> float:
        if kind != EXPERT_EXCHANGE:
            return over_shards(kind, total_bytes, how, units)
        return lowerings_over(network, exchanging).collective_time_s("all_to_all", how, total_bytes, parts, parts)

    return collective_s


def collective_key(
    stage: StageWork, rings: RingTuples | None, shares: tuple[int, ...], exchanging: RingTuples
) -> object:
    """Return the cache key of `stage_collective`."""
    key: object = (rings, shares) if stage.shares else rings
    return (key, exchanging) if exchanging else key
