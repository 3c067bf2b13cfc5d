"""What the end of an iteration needs beside what always stays: reductions, shared parameters, the norm and the update.

PyTorch's gloo sums a copy of what it scatters, and a bucket's copy lives until all buckets have been waited for
(`run/update/reduce.py`); NCCL needs none. When activations are gone, lanes that share a parameter each send a copy of
their gradient and add to another (`run/update/tied.py`), and the norm and the update go through a run of elements at a
time (`run/update/optimizer.py`), in 8 bytes each at most: the peak only where activations were few.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.cost.static_memory import GRADIENT_BYTES
from pipefit.cost.work import PipelineWork, StageWork

RUN_ELEMENTS = {"cpu": 1 << 18, "gpu": 1 << 24}
"""Elements that the norm and the update go through at a time."""


def reduce_copy_bytes(work: PipelineWork, gloo: bool) -> tuple[float, ...]:
    """Of every stage: what its reduction holds from its last backward until all reductions are over. Parameters that
    lanes share are not scattered (with shards they are counted, on the safe side)."""
    width = GRADIENT_BYTES[work.precision]
    copy_bytes = []
    for index, stage in enumerate(work.stages):
        copies = gloo and stage.split_state and stage.group.find_axis("replica").size > 1 and stage.turns == 1
        tied_groups = [tied for tied in work.tied if index in tied.stages and stage.group.find_axis("shard").size == 1]
        shared = sum(
            tied.elements for tied in tied_groups if len({work.stages[member].lane for member in tied.stages}) > 1
        )
        copy_bytes.append(float((max(stage.parameters.trainable) - shared) * width) if copies else 0.0)
    return tuple(copy_bytes)


def state_share(stage: StageWork) -> float:
    """The largest part of the optimizer state that a replica keeps."""
    shares = stage.group.find_axis("replica").shares
    return max(shares) / sum(shares) if stage.split_state else 1.0


def end_bytes(work: PipelineWork, gloo: bool, shares: Sequence[float] | None = None) -> tuple[float, ...]:
    """Of every lane, on its fullest device, or on one that keeps these `shares` of the stages' optimizer state.
    Devices that talk over `gloo` are processors."""
    width = GRADIENT_BYTES[work.precision]
    run, exchanged = ([0.0] * work.num_lanes for _ in range(2))
    for index, stage in enumerate(work.stages):
        shared = [tied.elements for tied in work.tied if index in tied.stages]
        largest = _largest_bucket(stage, shared) * (state_share(stage) if shares is None else shares[index])
        run[stage.lane] = max(run[stage.lane], 8.0 * min(largest, RUN_ELEMENTS["cpu" if gloo else "gpu"]))
    for tied in work.tied:
        lanes = {work.stages[index].lane for index in tied.stages}
        for lane in lanes if len(lanes) > 1 and not tied.rings else ():
            exchanged[lane] += len(lanes) * tied.elements * width  # a copy for each of the others, and of its own
    return tuple(map(max, run, exchanged))


def _largest_bucket(stage: StageWork, shared: Sequence[int]) -> int:
    """At most so many elements are reduced and updated together: shared parameters have buckets of their own, and what
    is split over the shard axis has others than what is whole there (`run/update/buckets.py`)."""
    elements = max(stage.parameters.trainable)
    if stage.group.find_axis("shard").size == 1:
        return max(elements - sum(shared), *shared, 0)
    replicated = max(stage.parameters.whole)
    return max(elements - replicated, replicated - sum(shared) if replicated >= sum(shared) else replicated, *shared)
