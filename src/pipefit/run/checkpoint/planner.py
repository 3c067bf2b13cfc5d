"""Planners for torch.distributed.checkpoint over pieces: the rank that writes each box, and the boxes that fill each
piece.

The state dictionary is {global name: list of chunks}. Only the public base classes of DCP are used (torch 2.11 and
later), so its own metadata file, which is a pickle, is never written.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from pipefit.layout import Box, box_size, intersect_boxes
from pipefit.run.checkpoint.pieces import CheckpointPiece, TensorChunk


def chunks_by_name(pieces: Sequence[CheckpointPiece]) -> dict[str, list[TensorChunk]]:
    """Return the chunks of all pieces, by global name. Pieces without elements give an empty list."""
    result: dict[str, list[TensorChunk]] = {}
    for piece in pieces:
        result.setdefault(piece.name, []).extend(piece.tensor_chunks())
    return result


class PieceSavePlanner(SavePlanner):
    """Save planner: every box is written once, by the holding rank with the least to write so far."""

    def __init__(self, pieces: Sequence[CheckpointPiece]) -> None:
        self._pieces = list(pieces)
        self._views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for piece in self._pieces:
            for chunk in piece.tensor_chunks():
                key = (piece.name, chunk.offsets)
                if key in self._views:
                    assert self._views[key].shape == chunk.data.shape, f"{piece.name}: two boxes start at {key[1]}"
                    continue
                self._views[key] = chunk.data
                items.append(_write_item(piece, chunk))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Deduplicate, and check that every tensor is covered exactly once. Asserts, since a hole is a bug of the
        caller."""
        holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
        tensors: dict[str, TensorStorageMetadata] = {}
        chosen: list[list[WriteItem]] = [[] for _ in all_plans]
        items: dict[tuple[str, tuple[int, ...], tuple[int, ...]], WriteItem] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                data = item.tensor_data
                assert data is not None
                key = (item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes))
                holders.setdefault(key, []).append(rank)
                items.setdefault(key, item)
                known = tensors.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
                same = known.size == data.size and known.properties.dtype == data.properties.dtype
                assert same, f"ranks disagree on the shape or dtype of {item.index.fqn}"
        load = [0] * len(all_plans)
        for key, ranks in holders.items():
            rank = min(ranks, key=lambda r: load[r])
            tensor = tensors[key[0]]
            load[rank] += math.prod(key[2]) * tensor.properties.dtype.itemsize
            chosen[rank].append(items[key])
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(key[1]), torch.Size(key[2])))
        for name, tensor in tensors.items():
            _assert_covered(name, tensor)
        plans = [dataclasses.replace(plan, items=mine) for plan, mine in zip(all_plans, chosen, strict=True)]
        return plans, Metadata(dict(tensors))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        assert write_item.index.offset is not None
        return self._views[(write_item.index.fqn, tuple(write_item.index.offset))]


class PieceLoadPlanner(LoadPlanner):
    """Load planner: every chunk of every piece is filled from the stored boxes that overlap it."""

    def __init__(self, pieces: Sequence[CheckpointPiece]) -> None:
        self._chunks = chunks_by_name(pieces)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._stored: Mapping[str, Any] = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, chunks in self._chunks.items():
            if chunks:
                stored = [_metadata_box(part) for part in self._stored[name].chunks]
                for index, chunk in enumerate(chunks):
                    items += _read_items(name, index, chunk.box, stored)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("a checkpoint of pipefit holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index.index
        assert index is not None
        data = self._chunks[read_item.dest_index.fqn][index].data
        runs = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return data[tuple(slice(start, start + length) for start, length in runs)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def _write_item(piece: CheckpointPiece, chunk: TensorChunk) -> WriteItem:
    properties = TensorProperties(dtype=chunk.data.dtype)
    where = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
    return WriteItem(
        index=MetadataIndex(piece.name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=where, properties=properties, size=torch.Size(piece.shape)),
    )


def _read_items(name: str, place: int, want: Box, stored: Sequence[Box]) -> list[ReadItem]:
    result, filled = [], 0
    for index, box in enumerate(stored):
        part = intersect_boxes(want, box)
        if part is None:
            continue
        filled += box_size(part)
        result.append(
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(name, [start for start, _ in want], place),
                dest_offsets=torch.Size(a - b for (a, _), (b, _) in zip(part, want, strict=True)),
                storage_index=MetadataIndex(name, [start for start, _ in box], index),
                storage_offsets=torch.Size(a - b for (a, _), (b, _) in zip(part, box, strict=True)),
                lengths=torch.Size(stop - start for start, stop in part),
            )
        )
    assert filled == box_size(want), f"{name}: {filled} of {box_size(want)} elements are stored"
    return result


def _metadata_box(chunk: ChunkStorageMetadata) -> Box:
    return tuple((start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True))


def _assert_covered(name: str, tensor: TensorStorageMetadata) -> None:
    boxes = [_metadata_box(chunk) for chunk in tensor.chunks]
    held, elements = sum(map(box_size, boxes)), math.prod(tensor.size)
    assert held >= elements, f"{name}: no rank holds all of it ({held} of {elements} elements)"
    assert held == elements and not _have_overlap(boxes), f"{name}: ranks hold boxes that overlap without being equal"


def _have_overlap(boxes: Sequence[Box]) -> bool:
    if len(boxes) < 2 or not boxes[0]:
        return len(boxes) > 1
    starts = np.array([[run[0] for run in box] for box in boxes])
    stops = np.array([[run[1] for run in box] for box in boxes])
    common = np.minimum(stops[:, None], stops[None]) > np.maximum(starts[:, None], starts[None])
    return bool(common.all(axis=-1).sum() > len(boxes))
