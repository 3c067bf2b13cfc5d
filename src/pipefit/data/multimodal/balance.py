"""Balance a batch: assign rows to replicas, and to the microbatches of each replica, so that all loads are similar.

Every slot takes one row, so bins keep their number of rows. Rows are placed from the largest down (longest processing
time first, Graham 1969). Each goes to the bin whose load vector, with the row added, has the smallest dot product with
the row's vector. With one kind of cost that is the bin that ends first; with several it is the dot-product rule of
vector packing (Panigrahy et al., 2011). Replicas are balanced first, by their sums over the step, then the microbatches
of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipefit.cost.types import Array, Ints
from pipefit.data.multimodal.loads import NO_OWNER, MicrobatchBlock
from pipefit.data.permutation import make_key, permute_indices

_SPREAD = 0xBA1A
"""Part of the key of the permutation that spreads blocks: rows are placed by size, and a pipeline that takes the
largest first is slower than one in random order."""


class _LoadKind(NamedTuple):
    """One kind of load: the excess of each row over the smallest row, and the replicas that work on it."""

    cost: Array
    "(batch,) by row: the part that depends on the assignment, relative to the mean of the most loaded kind."
    owner: Ints
    "(cells,): microbatch within the block and replica."
    replica: Ints
    "(cells,)."
    weight: Array
    "(cells,); 0 if none of the stage's replicas works on the row."
    bins: int
    replicas: int


def balance_rows(block: MicrobatchBlock, forward_ns: Sequence[Ints], spaces: Sequence[str]) -> Ints:
    """Return (batch,): for each position, the old position of the row to put there.

    `forward_ns`: for every stage the (batch,) times of the rows by position. `spaces`: the space of each stage.
    """
    batch = block.blocks * block.rows
    _, first, room = np.unique(block.cell, return_index=True, return_counts=True)
    kinds = _load_kinds(block, forward_ns, spaces, first)
    if not kinds:
        return np.arange(batch, dtype=np.int64)
    size = np.sqrt(sum((kind.cost**2 for kind in kinds), np.zeros(batch)))
    largest_first = np.lexsort((np.arange(batch), -size)).tolist()
    cell = _assign_replicas(kinds, room * block.blocks, largest_first)
    row_block = _assign_microbatches(kinds, cell, np.tile(room, (block.blocks, 1)), largest_first)
    key = make_key(_SPREAD, *(int(times.sum()) for times in forward_ns))
    return _row_positions(block, permute_indices(row_block, block.blocks, key), cell)


def _assign_replicas(kinds: Sequence[_LoadKind], room: Ints, rows: Sequence[int]) -> Ints:
    """Return (batch,) the cell of every row, with balanced sums over all microbatches. `room`: rows of each cell."""
    free, cell = room.copy(), np.empty(len(rows), dtype=np.int64)
    loads = [np.zeros(kind.replicas) for kind in kinds]
    for row in rows:
        score = np.zeros(len(free))
        for kind, load in zip(kinds, loads, strict=True):
            score += (load[kind.replica] + kind.weight * kind.cost[row]) * kind.cost[row]
        cell[row] = np.where(free > 0, score, np.inf).argmin()
        free[cell[row]] -= 1
        for kind, load in zip(kinds, loads, strict=True):
            load[kind.replica[cell[row]]] += kind.weight[cell[row]] * kind.cost[row]
    return cell


def _assign_microbatches(kinds: Sequence[_LoadKind], cell: Ints, room: Ints, rows: Sequence[int]) -> Ints:
    """Return (batch,) the block of every row, with balanced bins within each replica. `room`: (blocks, cells)."""
    free, row_block = room.copy(), np.empty(len(cell), dtype=np.int64)
    loads = [np.zeros((len(room), kind.bins)) for kind in kinds]
    for row in rows:
        here, score = cell[row], np.zeros(len(room))
        for kind, load in zip(kinds, loads, strict=True):
            score += load[:, kind.owner[here]] * kind.cost[row]
        row_block[row] = np.where(free[:, here] > 0, score, np.inf).argmin()
        free[row_block[row], here] -= 1
        for kind, load in zip(kinds, loads, strict=True):
            load[row_block[row], kind.owner[here]] += kind.weight[here] * kind.cost[row]
    return row_block


def _load_kinds(
    block: MicrobatchBlock, forward_ns: Sequence[Ints], spaces: Sequence[str], first: Ints
) -> list[_LoadKind]:
    """Build one load kind for every set of stages with the same space and owners, from the slowest of them.

    Kinds whose rows all have equal times are omitted. `first`: a row of each cell.
    """
    groups: dict[tuple[str, bytes], int] = {}
    for stage, times in enumerate(forward_ns):
        key = (spaces[stage], block.owner[stage].tobytes())
        if key not in groups or times.max() > forward_ns[groups[key]].max():
            groups[key] = stage
    kinds = []
    scale = float(max([1, *(int(forward_ns[stage].max()) for stage in groups.values())]))
    for stage in groups.values():
        excess = forward_ns[stage] - forward_ns[stage].min()
        if excess.any():
            owner = block.owner[stage][first]
            kinds.append(
                _LoadKind(
                    cost=excess / scale,
                    owner=owner,
                    replica=np.maximum(owner, 0) % block.replicas[stage],
                    weight=np.where(owner == NO_OWNER, 0.0, block.weight[stage][np.maximum(owner, 0)]),
                    bins=len(block.weight[stage]),
                    replicas=block.replicas[stage],
                )
            )
    return kinds


def _row_positions(block: MicrobatchBlock, at: Ints, cell: Ints) -> Ints:
    """Convert the block and the cell of every row to the row of every position.

    Rows that could change places keep their previous relative order.
    """
    slot = np.repeat(np.arange(block.blocks, dtype=np.int64), block.rows) * block.rows + np.tile(
        block.cell, block.blocks
    )
    result = np.empty(len(at), dtype=np.int64)
    result[np.argsort(slot, kind="stable")] = np.argsort(at * block.rows + cell, kind="stable")
    return result
