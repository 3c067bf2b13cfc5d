"""Transient memory at the end of an iteration: reductions, shared parameters, the norm and the update.

PyTorch's gloo reduce-scatter sums a copy, and a bucket's copy lives until all buckets have been waited for
(`run/update/reduce.py`); NCCL needs no copy. After the activations are freed, lanes that share a parameter each send a
copy of their gradient and add it to another (`run/update/tied.py`). The norm and the update process a run of elements
at a time (`optimizers/base.py`), with at most 8 bytes each, or the optimizer's temporary tensors and the gradient in
the type of the state. These bytes are the peak only if activations are few.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.cost.static_memory import GRADIENT_BYTES, STATE_BYTES
from pipefit.cost.work import PipelineWork, StageWork, state_share

RUN_ELEMENTS = {"cpu": 1 << 18, "gpu": 1 << 24}
"""Elements that the norm and the update process at a time."""


def reduce_copy_bytes(work: PipelineWork, gloo: bool) -> tuple[float, ...]:
    """Return, per stage, the bytes held by its reduction from its last backward until all reductions are done.

    Parameters shared between lanes are not reduce-scattered (with shards they are counted, on the safe side).
    """
    width = GRADIENT_BYTES[work.precision]
    copy_bytes = []
    for index, stage in enumerate(work.stages):
        members = len(stage.data_shares) * stage.row_parts
        copies = gloo and stage.shards_state and members > 1 and stage.turns == 1
        tied_groups = [tied for tied in work.tied if index in tied.stages and stage.group.find_axis("shard").size == 1]
        shared = sum(
            tied.elements for tied in tied_groups if len({work.stages[member].lane for member in tied.stages}) > 1
        )
        scattered = stage.reduced_elements if len(stage.data_shares) > 1 else stage.reduced_spread
        copy_bytes.append(float((scattered - shared) * width) if copies else 0.0)
    return tuple(copy_bytes)


def stage_state_share(stage: StageWork) -> float:
    """Return the largest part of the optimizer state on one device."""
    if not stage.shards_state:
        return 1.0
    return state_share(stage.sharded_state, stage.state_shares).part * stage.spread_part


def end_bytes(work: PipelineWork, gloo: bool, shares: Sequence[float] | None = None) -> tuple[float, ...]:
    """Return the bytes per lane on its fullest device, or on a device with these `shares` of the optimizer states.

    Devices that communicate over `gloo` are processors.
    """
    width = GRADIENT_BYTES[work.precision]
    temporaries = work.optimizer.temporaries + (width < STATE_BYTES[work.precision])
    run, exchanged = ([0.0] * work.num_lanes for _ in range(2))
    for index, stage in enumerate(work.stages):
        shared = [tied.elements for tied in work.tied if index in tied.stages]
        largest = _largest_bucket(stage, shared) * (stage_state_share(stage) if shares is None else shares[index])
        per_element = max(8.0, temporaries * STATE_BYTES[work.precision])
        statistics = stage.parameters.shared_state_bytes  # an update adds up new values of them
        size = per_element * min(largest, RUN_ELEMENTS["cpu" if gloo else "gpu"]) + statistics
        run[stage.lane] = max(run[stage.lane], size)
    for tied in work.tied:
        lanes = {work.stages[index].lane for index in tied.stages}
        for lane in lanes if len(lanes) > 1 and not tied.rings else ():
            exchanged[lane] += len(lanes) * tied.elements * width  # a copy per other lane, and its own
    return tuple(map(max, run, exchanged))


def _largest_bucket(stage: StageWork, shared: Sequence[int]) -> int:
    """Return the largest number of elements that are reduced and updated together.

    Shared parameters have their own buckets, and so do parameters replicated over the shard axis
    (`run/update/buckets.py`).
    """
    elements = max(stage.parameters.trainable)
    if stage.group.find_axis("shard").size == 1:
        return max(elements - sum(shared), *shared, 0)
    replicated = max(stage.parameters.whole)
    return max(elements - replicated, replicated - sum(shared) if replicated >= sum(shared) else replicated, *shared)
