"""Arrange a batch: balance it over replicas and microbatches, then order the microbatches of every pipeline.

The result is a permutation of the batch, a pure function of metadata and plan that every rank computes for itself. The
batch keeps its samples, so gradients, which are sums over samples, do not change.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from pipefit.cost.types import Ints
from pipefit.data.multimodal.balance import balance_rows
from pipefit.data.multimodal.loads import MicrobatchBlock, block_of, forward_ns, stage_times_ns
from pipefit.data.multimodal.ordering import PipelineTimes, order_microbatches
from pipefit.data.multimodal.sample_rows import SampleRows
from pipefit.data.stepplan import BatchShape
from pipefit.schedule.actions import Schedule


def arrange_rows(shape: BatchShape, rows: SampleRows, chosen: Ints) -> Ints:
    """Return (batch,): for each position, the index in `chosen` of the row to put there, according to
    `shape.arranging`.

    `chosen` are the rows of a step.
    """
    result = np.arange(len(chosen), dtype=np.int64)
    arranging = shape.arranging
    if arranging is None:
        return result
    block, times = _cached_block(shape), _times_ns(shape, rows, chosen)
    if arranging.balance:
        result = balance_rows(block, times, [load.space for load in arranging.loads])
    if arranging.order and block.blocks > 1:
        result = result[_reorder_blocks(shape, block, [time[result] for time in times])]
    return result


def block_times_ns(shape: BatchShape, rows: SampleRows, chosen: Ints) -> tuple[Ints, Ints]:
    """Return (forward, backward) times, each (stages, blocks), of the rows in their current order.

    A stage's time is the time of its slowest replica. A block is one microbatch, or several if stages take several in
    one call.
    """
    times = enumerate(_times_ns(shape, rows, chosen))
    forward = np.stack([stage_times_ns(_cached_block(shape), stage, time) for stage, time in times])
    return forward, _estimate_backward(shape, forward)


def _times_ns(shape: BatchShape, rows: SampleRows, chosen: Ints) -> list[Ints]:
    """Return the (batch,) forward times of every stage."""
    assert shape.arranging is not None and len(shape.arranging.loads) == len(shape.shares), "a load for every stage"
    return [forward_ns(load, rows, chosen) for load in shape.arranging.loads]


def _reorder_blocks(shape: BatchShape, block: MicrobatchBlock, times: list[Ints]) -> Ints:
    """Reorder the blocks within each component independently."""
    assert shape.arranging is not None
    schedule = shape.schedule
    if schedule is not None and schedule.microbatches != block.blocks:
        schedule = None  # stages take several microbatches per call: order blocks under 1F1B
    components = int(block.component.max()) + 1
    pipeline = _cached_pipeline(len(times), block.blocks, schedule, components * shape.arranging.swaps)
    positions = np.arange(block.rows * block.blocks, dtype=np.int64).reshape(block.blocks, block.rows)
    result = positions.copy()
    for component in range(components):
        where = block.component == component
        forward = np.stack([stage_times_ns(block, stage, time, where) for stage, time in enumerate(times)])
        order = order_microbatches(pipeline, forward, _estimate_backward(shape, forward), shape.arranging.swaps)
        result[:, where] = positions[order][:, where]
    return result.reshape(-1)


def _estimate_backward(shape: BatchShape, forward: Ints) -> Ints:
    assert shape.arranging is not None
    factors = np.array([load.backward for load in shape.arranging.loads])
    times: Ints = np.rint(forward * factors[:, None]).astype(np.int64)
    return times


_recent: OrderedDict[Any, Any] = OrderedDict()
"""Cache of the last few blocks and pipelines, which are the same for all steps of a run."""


def _cached_block(shape: BatchShape) -> MicrobatchBlock:
    block: MicrobatchBlock = _get_cached(shape, lambda: block_of(shape))
    return block


def _cached_pipeline(stages: int, microbatches: int, schedule: Schedule | None, tries: int) -> PipelineTimes:
    key = (stages, microbatches, id(schedule))
    entry: tuple[Schedule | None, PipelineTimes] = _get_cached(
        key, lambda: (schedule, PipelineTimes(stages, microbatches, schedule, tries))
    )
    return entry[1]


def _get_cached(key: Any, make: Any) -> Any:
    if key not in _recent:
        _recent[key] = make()
        if len(_recent) > 8:
            _recent.popitem(last=False)
    return _recent[key]
