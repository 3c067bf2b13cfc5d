"""The cost of rows on every stage, and the rows that a replica of a stage processes together.

Times are integer nanoseconds, computed from metadata by elementwise products. Every rank gets the same numbers on any
processor, so all choose the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Ints
from pipefit.data.multimodal.sample_rows import SampleRows
from pipefit.data.stepplan import BatchShape
from pipefit.plan.types import SampleLoad

NO_OWNER = -1
"""The owner of a row that a stage does not work on."""


def forward_ns(load: SampleLoad, rows: SampleRows, chosen: Ints) -> Ints:
    """Return (len(chosen),) forward nanoseconds of each of these rows on a stage with this load."""
    tokens = rows.values_of(rows.counts[load.space], chosen).astype(np.float64)
    squares = rows.values_of(rows.squares[load.space], chosen).astype(np.float64)
    time_s = load.row_s + load.token_s * tokens + load.square_s * squares
    return np.rint(time_s * 1e9).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchBlock:
    """The repeating unit of batch positions: the smallest run of microbatches that every stage processes in whole
    calls."""

    blocks: int
    rows: int
    "Positions of one block."
    owner: tuple[Ints, ...]
    "Per stage (rows,): microbatch within the block x replicas + replica, or NO_OWNER."
    replicas: tuple[int, ...]
    weight: tuple[NDArray[np.float64], ...]
    "Per stage, by owner: average rows / own rows; a replica of twice the share processes a row in half the time."
    cell: Ints
    "(rows,): rows of one cell have the same owners, so they may change places."
    component: Ints
    "(rows,): rows of different components never share a replica; each component is a pipeline of its own."


def block_of(shape: BatchShape) -> MicrobatchBlock:
    """Return the block of a plan's batch shape."""
    length = math.lcm(*shape.multiples)
    rows = shape.batch // shape.microbatches * length
    owners, weights = [], []
    # Replicas that divide images have equal work: they count as one replica, which does its share of every row.
    owning = [(1,) if shape.divides_images(stage) else shares for stage, shares in enumerate(shape.shares)]
    for stage, shares in enumerate(owning):
        owner = np.full(rows, NO_OWNER, dtype=np.int64)
        counts = np.zeros(length // shape.multiples[stage] * len(shares), dtype=np.int64)
        for microbatch in range(length // shape.multiples[stage]):
            for replica in range(len(shares)):
                start, stop = shape.batch_run(stage, microbatch, replica)
                owner[start:stop] = microbatch * len(shares) + replica
                counts[microbatch * len(shares) + replica] = stop - start
        owners.append(owner)
        weights.append(counts[counts > 0].mean() / np.maximum(counts, 1) * len(shares) / len(shape.shares[stage]))
    _, cell = np.unique(np.stack(owners), axis=1, return_inverse=True)
    return MicrobatchBlock(
        blocks=shape.batch // rows,
        rows=rows,
        owner=tuple(owners),
        replicas=tuple(map(len, owning)),
        weight=tuple(weights),
        cell=np.asarray(cell, dtype=np.int64).reshape(-1),
        component=_connected_components(owners, [len(shares) for shares in owning]),
    )


def stage_times_ns(block: MicrobatchBlock, stage: int, times_ns: Ints, where: NDArray[np.bool_] | None = None) -> Ints:
    """Return (blocks,): the time of each block on the slowest replica of a stage, summed over the block's microbatches.

    `times_ns`: (batch,) of the rows, by position. `where`: (rows,) mask of the positions of a block that count.
    """
    owner, replicas = block.owner[stage], block.replicas[stage]
    here = owner != NO_OWNER if where is None else (owner != NO_OWNER) & where
    totals = np.zeros((len(block.weight[stage]), block.blocks), dtype=np.int64)
    np.add.at(totals, owner[here], times_ns.reshape(block.blocks, block.rows)[:, here].T)
    times = np.rint(totals.T * block.weight[stage]).astype(np.int64)
    slowest: Ints = times.reshape(block.blocks, -1, replicas).max(axis=2).sum(axis=1)
    return slowest


def microbatch_sums(
    shape: BatchShape, rows: SampleRows, chosen: Ints, space: str, stage: int
) -> Mapping[str, NDArray[np.int64]]:
    """Return the sums that a cost model needs of the rows of a batch, by (microbatch of the stage, replica).

    The keys are `rows`, `tokens`, `squares` and `images`; each array has that shape.
    """
    microbatches, replicas = shape.stage_microbatches(stage), len(shape.shares[stage])
    runs = [
        shape.batch_run(stage, microbatch, replica) for microbatch in range(microbatches) for replica in range(replicas)
    ]
    columns = {
        "rows": np.ones_like(chosen),
        "tokens": rows.values_of(rows.counts[space], chosen),
        "squares": rows.values_of(rows.squares[space], chosen),
        "images": rows.values_of(rows.images, chosen),
    }
    return {name: _run_sums(values, runs).reshape(microbatches, replicas) for name, values in columns.items()}


def _run_sums(values: Ints, runs: Sequence[tuple[int, int]]) -> Ints:
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])
    start, stop = np.array(runs, dtype=np.int64).T
    sums: Ints = total[stop] - total[start]
    return sums


def _connected_components(owners: Sequence[Ints], replicas: Sequence[int]) -> Ints:
    """Return (rows,) component numbers, counted from 0 in order of their first row.

    Two rows are connected if one replica of some stage works on both, in the same or in different microbatches.
    """
    label = np.arange(len(owners[0]), dtype=np.int64)
    while True:
        before = label.copy()
        for owner, count in zip(owners, replicas, strict=True):
            here = owner != NO_OWNER
            lowest = np.full(count, len(label), dtype=np.int64)
            np.minimum.at(lowest, owner[here] % count, label[here])
            label[here] = lowest[owner[here] % count]
        if np.array_equal(before, label):
            return np.unique(label, return_inverse=True)[1].reshape(-1).astype(np.int64)
