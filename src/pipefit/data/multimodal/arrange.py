"""Arranging a batch: balance it over replicas and microbatches, then order the microbatches of every pipeline.

The result is a permutation of the batch, a pure function of metadata and plan, which every rank works out by itself.
The batch keeps its samples: gradients are sums over them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipefit.data.multimodal.balance import balanced
from pipefit.data.multimodal.loads import Block, Ints, StageLoad, block_of, stage_times_ns
from pipefit.data.multimodal.ordering import Pipeline, ordered
from pipefit.data.multimodal.sample_rows import SampleRows
from pipefit.data.stepplan import BatchShape
from pipefit.schedule.actions import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How batches are arranged; a part of the plan's parameters, so that a resumed run arranges alike."""

    stages: tuple[StageLoad, ...]
    "What rows cost on every stage of the plan."
    balance: bool = True
    "Whether rows change between replicas and microbatches."
    order: bool = True
    "Whether microbatches change places within their pipeline."
    swaps: int = 250
    "Exchanges that are tried on the simulator after the greedy order; 0: the greedy order alone."
    schedule: Schedule | None = None
    "The plan's order of actions; None is 1F1B with a lane for every stage."


def arranged(arrangement: Arrangement, shape: BatchShape, rows: SampleRows, chosen: Ints) -> Ints:
    """(batch,): the position in `chosen`, the rows of a step, of the row that is to stand at each position."""
    assert len(arrangement.stages) == len(shape.shares), "a load for every stage"
    block = _block(shape)
    times = [load.forward_ns(rows, chosen) for load in arrangement.stages]
    result = np.arange(len(chosen), dtype=np.int64)
    if arrangement.balance:
        result = balanced(block, times, [load.space for load in arrangement.stages])
    if arrangement.order and block.blocks > 1:
        result = result[_reordered(arrangement, block, [time[result] for time in times])]
    return result


def block_times_ns(arrangement: Arrangement, shape: BatchShape, rows: SampleRows, chosen: Ints) -> tuple[Ints, Ints]:
    """(forward, backward), each (stages, blocks): what the rows, as they stand at the positions of the batch, take on
    the slowest replica of every stage. A block is a microbatch, unless stages take several together."""
    block = _block(shape)
    times = [load.forward_ns(rows, chosen) for load in arrangement.stages]
    forward = np.stack([stage_times_ns(block, stage, time) for stage, time in enumerate(times)])
    return forward, _backward(arrangement, forward)


def _reordered(arrangement: Arrangement, block: Block, times: list[Ints]) -> Ints:
    """Blocks change places within every component by itself."""
    schedule = arrangement.schedule
    if schedule is not None and schedule.microbatches != block.blocks:
        schedule = None  # stages that take several microbatches: the chain of blocks stands for them
    pipeline = _pipeline(len(times), block.blocks, schedule)
    positions = np.arange(block.rows * block.blocks, dtype=np.int64).reshape(block.blocks, block.rows)
    result = positions.copy()
    for component in range(int(block.component.max()) + 1):
        where = block.component == component
        forward = np.stack([stage_times_ns(block, stage, time, where) for stage, time in enumerate(times)])
        order = ordered(pipeline, forward, _backward(arrangement, forward), arrangement.swaps)
        result[:, where] = positions[order][:, where]
    return result.reshape(-1)


def _backward(arrangement: Arrangement, forward: Ints) -> Ints:
    factors = np.array([load.backward for load in arrangement.stages])
    times: Ints = np.rint(forward * factors[:, None]).astype(np.int64)
    return times


_recent: OrderedDict[Any, Any] = OrderedDict()
"""The last few blocks and pipelines: they are the same for all steps of a run."""


def _block(shape: BatchShape) -> Block:
    found: Block = _kept(shape, lambda: block_of(shape))
    return found


def _pipeline(stages: int, microbatches: int, schedule: Schedule | None) -> Pipeline:
    key = (stages, microbatches, id(schedule))
    made: tuple[Schedule | None, Pipeline] = _kept(key, lambda: (schedule, Pipeline(stages, microbatches, schedule)))
    return made[1]


def _kept(key: Any, make: Any) -> Any:
    if key not in _recent:
        _recent[key] = make()
        if len(_recent) > 8:
            _recent.popitem(last=False)
    return _recent[key]
