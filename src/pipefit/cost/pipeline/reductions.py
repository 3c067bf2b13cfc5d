"""Seconds of the collectives at the end of an iteration: gradient sums, and gathers of updated parameters.

Gradients that the replicas shard between the microbatches (ZeRO-2 and 3) are summed within the actions instead
(`cost/pipeline/state_traffic.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum

from pipefit.cost.comm.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from pipefit.cost.comm.network import Network
from pipefit.cost.memory.step_end import stage_state_share
from pipefit.cost.pipeline.overlap import LayerGradient, hidden_s
from pipefit.cost.pipeline.rings import copy_rings, shard_rings, split_elements
from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES
from pipefit.cost.work import PipelineWork, StageWork


def reduce_s(stage: StageWork, work: PipelineWork, network: Network) -> float:
    """Return the seconds to sum the stage's gradients.

    They are summed over the replicas and the parts of their sequences, and over an axis that divides rows for
    parameters replicated there, at once; over another shard axis beforehand. Stages that take turns are summed together
    (`cost/pipeline/turns.py`). Groups that shard the state sum their pieces with the other groups at last (`copies_s`).
    """
    if stage.turns > 1:
        return 0.0
    width = GRADIENT_BYTES[work.precision]
    total = 0.0
    if stage.group.find_axis("shard").size > 1 and not stage.splits_rows:
        part = stage_state_share(stage) if stage.has_sharded_layers else 1.0
        total += all_reduce_s(network, shard_rings(stage), max(stage.parameters.whole) * part * width)
    collective = reduce_scatter_s if stage.shards_state else all_reduce_s
    for elements, rings in split_elements(stage, stage.reduced_elements, stage.reduced_spread):
        if len(rings[0]) > 1 and (elements or not stage.has_sharded_layers):
            total += collective(network, rings, elements * width)
    return total + copies_s(stage, work, network)


def copies_s(stage: StageWork, work: PipelineWork, network: Network) -> float:
    """Return the seconds to sum the pieces of the gradients over the groups that hold copies of them.

    The runtime does this once a step, after the sums within the groups.
    """
    if not stage.copied_elements:
        return 0.0
    return all_reduce_s(network, copy_rings(stage), stage.copied_elements * GRADIENT_BYTES[work.precision])


def gather_s(stage: StageWork, work: PipelineWork, network: Network) -> float:
    """Return the seconds to all-gather the updated parameters under ZeRO-1 and 2."""
    if not stage.shards_state or (stage.has_sharded_layers and not stage.gathered_elements):
        return 0.0
    width = COMPUTE_BYTES[work.precision]
    return fsum(
        all_gather_s(network, rings, elements * width)
        for elements, rings in split_elements(stage, stage.gathered_elements, stage.gathered_spread)
        if len(rings[0]) > 1
    )


def hidden_reduction_s(
    once_s: float,
    stage: StageWork,
    work: PipelineWork,
    network: Network,
    beside: tuple[float, Mapping[str, Sequence[LayerGradient]]],
) -> dict[str, float]:
    """Return the seconds of a stage's reduction (`once_s`) that overlap its last backward, if that is a B or a W.

    `beside` is the stage's `overlap_share`. Sharded layers have buckets of their own, of which only the sums over
    several groups come at the end.
    """
    share, pieces = beside
    if not once_s or not share:
        return {"B": 0.0, "W": 0.0}
    bucket_bytes = work.bucket_bytes
    if stage.has_sharded_layers:
        once_s, bucket_bytes = copies_s(stage, work, network), 0.0
    return {kind: share * hidden_s(once_s, pieces[kind], bucket_bytes) for kind in ("B", "W")}
