"""Random layouts of random tensors, and a save by many ranks played in one process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipefit.layout import Box, Run
from pipefit.run.checkpoint.manifest import complete_checkpoints
from pipefit.run.checkpoint.pieces import CheckpointPiece
from pipefit.run.checkpoint.planner import PieceSavePlanner
from pipefit.run.checkpoint.storage import ManifestWriter

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def random_tensors(source: random.Random, count: int = 4) -> dict[str, torch.Tensor]:
    """Tensors of 0 to 4 dimensions of any dtype; no two elements of a float or int64 tensor are equal."""
    tensors = {}
    for index in range(count):
        shape = [source.choice([1, 2, 3, 5, 8]) for _ in range(source.randint(0, 4))]
        values = torch.arange(torch.Size(shape).numel()).reshape(shape) + 1000 * index
        dtype = source.choice(DTYPES)
        tensors[f"layers.{index}.weight"] = (values % 2 == 0) if dtype == torch.bool else values.to(dtype)
    return tensors


def random_pieces(
    source: random.Random, tensors: dict[str, torch.Tensor], ranks: int, fill: bool
) -> list[list[CheckpointPiece]]:
    """Pieces per rank that cover every tensor exactly once, some of them held by several ranks, some empty.

    With `fill` the pieces hold the tensors' values, else they hold zeros to load into.
    """
    result: list[list[CheckpointPiece]] = [[] for _ in range(ranks)]
    for name, whole in tensors.items():
        for box in _cut(source, tuple((0, n) for n in whole.shape), source.randint(0, 4)):
            part = whole[tuple(slice(*run) for run in box)]
            parts: list[tuple[Run | None, torch.Tensor]] = [(None, part)]
            if source.random() < 0.5:
                stops = sorted(source.randint(0, part.numel()) for _ in range(source.randint(0, 4)))
                runs = list(zip([0, *stops], [*stops, part.numel()], strict=True))
                parts = [(run, part.reshape(-1)[run[0] : run[1]]) for run in runs]
            for flat, data in parts:
                holders = source.sample(range(ranks), source.choice([1, 1, min(2, ranks)]))
                for rank in holders:
                    copy = data.clone() if fill else torch.zeros_like(data)
                    result[rank].append(
                        CheckpointPiece(name=name, shape=tuple(whole.shape), tensor=copy, box=box, flat=flat)
                    )
    return result


def put_together(tensors: dict[str, torch.Tensor], pieces: Sequence[Sequence[CheckpointPiece]]) -> None:
    """Assert, without the code under test's own flat boxes, that loaded pieces hold the tensors' values."""
    for held in pieces:
        for piece in held:
            whole = tensors[piece.name]
            assert piece.box is not None
            expected = whole[tuple(slice(*run) for run in piece.box)]
            if piece.flat is not None:
                expected = expected.reshape(-1)[slice(*piece.flat)]
            assert torch.equal(piece.tensor, expected), (piece.name, piece.box, piece.flat)


def save_by_ranks(
    directory: Path, step: int, pieces: Sequence[Sequence[CheckpointPiece]], extra: dict[str, Any]
) -> Path:
    """What DCP does with many ranks, one after the other in this process."""
    final = directory / f"step-{step:08d}"
    serial = 1 + len(complete_checkpoints(directory))
    writers = [
        ManifestWriter(directory / f".step-{step:08d}.incomplete", final, step=step, serial=serial, extra=extra)
        for _ in pieces
    ]
    planners = [PieceSavePlanner(held) for held in pieces]
    for rank, writer in enumerate(writers):
        writer.set_up_storage_writer(rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    plans = writers[0].prepare_global_plan(plans)
    results = [w.write_data(p, s).wait() for w, p, s in zip(writers, plans, planners, strict=True)]
    writers[0].finish(metadata, results)
    return final


def _cut(source: random.Random, box: Box, cuts: int) -> list[Box]:
    if cuts == 0 or not box:
        return [box]
    dim = source.randrange(len(box))
    start, stop = box[dim]
    middle = source.randint(start, stop)  # may leave an empty box
    left, right = list(box), list(box)
    left[dim], right[dim] = (start, middle), (middle, stop)
    first = source.randint(0, cuts - 1)
    return _cut(source, tuple(left), first) + _cut(source, tuple(right), cuts - 1 - first)
