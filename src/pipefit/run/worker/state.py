"""The state of a run under global names, as stored in checkpoints and final weights.

`model/NAME` is the parameter, and `master/NAME` its float32 copy under bfloat16. `STATE/NAME` is a state tensor of the
optimizer (of AdamW `first/NAME` and `second/NAME`). A piece is a rank's box of the tensor, or the flat run of that box
that it owns under ZeRO-1; under ZeRO-3 it owns such a run of the parameter, too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pipefit.layout import Run
from pipefit.optimizers import OptimizerState
from pipefit.run.checkpoint.pieces import CheckpointPiece
from pipefit.run.update.buckets import BucketEntry
from pipefit.run.worker.worker import Worker

MODEL, MASTER = "model/", "master/"


def model_pieces(worker: Worker, *, saving: bool) -> list[CheckpointPiece]:
    """Return this rank's pieces of every parameter, frozen parameters included.

    When `saving`, only the owner's lane returns a tied parameter; when loading, every lane that holds it does.
    """
    pieces = [
        CheckpointPiece(name=MODEL + entry.name, shape=entry.shape, box=entry.box, tensor=entry.tensor.detach())
        for bucket in worker.buckets
        for entry in (() if bucket.shards_parameters else bucket.entries)
        if entry.counted or not saving
    ]
    pieces += [
        CheckpointPiece(
            name=MODEL + entry.name, shape=entry.shape, box=entry.box, flat=local,
            tensor=bucket.owned_parameters[slice(*owned)],
        )
        for bucket in (*worker.buckets, *worker.frozen_buckets)
        for entry, local, owned in (bucket.owned_runs() if bucket.shards_parameters else ())
        if entry.counted or not saving
    ]  # fmt: skip
    for name, (shape, box, tensor, counted) in worker.frozen.items():
        if counted or not saving:
            pieces.append(CheckpointPiece(name=MODEL + name, shape=shape, box=box, tensor=tensor.detach()))
    return pieces


def optimizer_pieces(worker: Worker, *, saving: bool) -> list[CheckpointPiece]:
    """Return the pieces of the optimizer state that this rank owns."""
    pieces = []
    for bucket, optimizer in zip(worker.buckets, worker.optimizers, strict=True):
        for entry, local, owned in bucket.owned_runs():
            if entry.counted or not saving:
                pieces += _entry_pieces(entry, local, owned, optimizer)
        saved = {entry.name: entry.counted for entry in bucket.entries}
        pieces += [
            CheckpointPiece(name=f"{state}/{name}", shape=tuple(tensor.shape), tensor=tensor)
            for (state, name), tensor in optimizer.shared.items()
            if saved[name] or not saving
        ]
    return pieces


def all_pieces(worker: Worker, *, saving: bool) -> list[CheckpointPiece]:
    """Return all pieces of this rank for a checkpoint."""
    return model_pieces(worker, saving=saving) + optimizer_pieces(worker, saving=saving)


def stored_pieces(worker: Worker, stored: Collection[str]) -> list[CheckpointPiece]:
    """Return `all_pieces` to load from a checkpoint with tensors `stored`, whatever precision it was trained in.

    Float32 masters start from the parameters of a float32 run; float32 parameters continue a bfloat16 run's masters.
    """
    pieces = all_pieces(worker, saving=False)
    mastered = {piece.name for piece in pieces if piece.name.startswith(MASTER)}

    def source_name(name: str) -> str:
        kind, _, rest = name.partition("/")
        if f"{kind}/" == MASTER and name not in stored:
            return MODEL + rest
        if f"{kind}/" == MODEL and not mastered and MASTER + rest in stored:
            return MASTER + rest
        return name

    return [replace(piece, name=source_name(piece.name)) for piece in pieces]


def gradient_pieces(worker: Worker) -> list[CheckpointPiece]:
    """Return the reduced gradients of the last step that this rank owns (clipped, if clipping is on)."""
    return [
        CheckpointPiece(
            name=entry.name, shape=entry.shape, box=entry.box, flat=local,
            tensor=bucket.owned_gradients[owned[0] : owned[1]],
        )
        for bucket in worker.buckets
        for entry, local, owned in bucket.owned_runs()
        if entry.counted
    ]  # fmt: skip


def _entry_pieces(entry: BucketEntry, local: Run, owned: Run, optimizer: OptimizerState) -> list[CheckpointPiece]:
    parts = {f"{name}/": tensor for name, tensor in optimizer.moments.items()}
    if optimizer.has_master:
        parts[MASTER] = optimizer.master
    return [
        CheckpointPiece(
            name=prefix + entry.name, shape=entry.shape, box=entry.box, flat=local, tensor=tensor[slice(*owned)]
        )
        for prefix, tensor in parts.items()
    ]
