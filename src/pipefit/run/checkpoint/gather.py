"""Full tensors on rank 0, one at a time, from the pieces of all ranks: for exporting final weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipefit.layout import Box, box_size
from pipefit.run.checkpoint.pieces import CheckpointPiece, TensorChunk, as_bytes


def gather_full(
    pieces: Sequence[CheckpointPiece], *, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name, tensor) for every global name in sorted order: on rank 0 the full tensor on the CPU, elsewhere None.

    Every rank of `group` (gloo, or None for the default group) must run the iterator to its end, in step. A box held by
    several ranks is sent by the first of them. Asserts that the boxes cover each tensor exactly once.
    """
    local_chunks: dict[str, dict[Box, TensorChunk]] = {}
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for piece in pieces:
        shapes[piece.name] = (piece.shape, piece.tensor.dtype)
        local_chunks.setdefault(piece.name, {}).update({chunk.box: chunk for chunk in piece.tensor_chunks()})
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1
    rank = 0 if alone else dist.get_rank(group)
    tables: list[Any] = [(shapes, {name: list(chunks) for name, chunks in local_chunks.items()})]
    if not alone:
        tables = [None] * dist.get_world_size(group)
        dist.all_gather_object(tables, (shapes, {name: list(c) for name, c in local_chunks.items()}), group=group)
    everything = {name: entry for known, _ in tables for name, entry in known.items()}
    for name in sorted(everything):
        owners: dict[Box, int] = {}
        for holder, (_, boxes) in enumerate(tables):
            for box in boxes.get(name, ()):
                owners.setdefault(box, holder)
        shape, dtype = everything[name]
        held = sum(map(box_size, owners))
        assert held == math.prod(shape), f"{name}: ranks hold {held} of {math.prod(shape)} elements"
        yield name, _gather_tensor(local_chunks.get(name, {}), owners, shape, dtype, rank, group)


def _gather_tensor(
    own: dict[Box, TensorChunk],
    owners: dict[Box, int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rank: int,
    group: dist.ProcessGroup | None,
) -> torch.Tensor | None:
    if rank != 0:
        for box, holder in owners.items():
            if holder == rank:
                dist.send(as_bytes(own[box].data), dst=_global_rank(group, 0), group=group)
        return None
    full = torch.empty(shape, dtype=dtype)
    for box, holder in owners.items():
        target = full[tuple(slice(start, stop) for start, stop in box)]
        if holder == 0:
            target.copy_(own[box].data)
            continue
        buffer = torch.empty(target.shape, dtype=dtype)
        dist.recv(as_bytes(buffer), src=_global_rank(group, holder), group=group)
        target.copy_(buffer)
    return full


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
