"""Checkpoints: saved under global names by any layout, loaded into any other; written to a hidden folder, then renamed.

Built on torch.distributed.checkpoint (its planning and its collectives) with planners and storage of our own. `pieces`
describes a rank's tensors, `planner` assigns reads and writes to ranks, `storage` handles the files, and `manifest` is
the JSON that makes a folder a checkpoint. Nothing is ever unpickled from a file.

torch.distributed.checkpoint is slow to import, so only the functions that use it import it.
"""

from __future__ import annotations

import difflib
import json
import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from pipefit.errors import CheckpointError, PipefitError
from pipefit.run.checkpoint import files
from pipefit.run.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    check_content,
    check_sizes,
    complete_checkpoints,
    folder_name,
    is_folder_name,
    read_manifest,
    survey_checkpoints,
)
from pipefit.run.checkpoint.pieces import CheckpointPiece

__all__ = [
    "CheckpointPiece",
    "PendingSave",
    "latest_checkpoint",
    "load_checkpoint",
    "locate_checkpoint",
    "read_manifest",
    "save_checkpoint",
    "save_in_thread",
]

T = TypeVar("T")


def save_checkpoint(
    directory: Path,
    step: int,
    pieces: Sequence[CheckpointPiece],
    extra: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    keep: int | None = None,
) -> Path:
    """Save a checkpoint of `step` below `directory` and return its folder. Every rank of `group` calls this.

    The pieces of all ranks must together cover every tensor; if several ranks hold the same box, one writes it. `extra`
    is plain JSON (rank 0's counts). `group` must be able to move CPU tensors (gloo); None is the default group, or a
    single process if there is none. `keep` deletes all but the newest `keep` checkpoints afterwards. Raises
    CheckpointError on every rank if a file cannot be written; earlier checkpoints are then untouched.
    """
    import torch.distributed.checkpoint as dcp

    from pipefit.run.checkpoint.planner import PieceSavePlanner
    from pipefit.run.checkpoint.storage import ManifestWriter

    directory = Path(directory)
    hidden, final, serial = _run_on_all(group, lambda: _next_folder(directory, step), from_rank_0=True)
    writer = ManifestWriter(hidden, final, step=step, serial=serial, extra=extra)
    planner = PieceSavePlanner(pieces)
    _run_dcp("written", directory, group, lambda alone: dcp.save(
        {}, storage_writer=writer, planner=planner, process_group=group, no_dist=alone
    ))  # fmt: skip
    if keep is not None and _group_rank(group) == 0:
        _prune_checkpoints(directory, keep)
    return final


def save_in_thread(
    directory: Path,
    step: int,
    pieces: Sequence[CheckpointPiece],
    extra: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    keep: int | None = None,
) -> PendingSave:
    """Copy the pieces to CPU memory, then save in a thread. The tensors may change as soon as this returns.

    Nothing else may use `group` during the save: give checkpoints a gloo group of their own.
    """
    copies = [
        CheckpointPiece(
            name=piece.name, shape=piece.shape, box=piece.box, flat=piece.flat,
            tensor=piece.tensor.detach().to("cpu", copy=True),
        )
        for piece in pieces
    ]  # fmt: skip
    frozen = json.loads(json.dumps(extra))
    return PendingSave(lambda: save_checkpoint(directory, step, copies, frozen, group=group, keep=keep))


class PendingSave:
    """A save running in a thread. The thread does not keep a process alive: wait for it before the process ends."""

    def __init__(self, work: Callable[[], Path]) -> None:
        self._result: Path | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run_save, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the save is complete and return the checkpoint's folder. Raises the save's error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _run_save(self, work: Callable[[], Path]) -> None:
        try:
            self._result = work()
        except BaseException as error:
            self._error = error


def load_checkpoint(
    checkpoint: Path,
    pieces: Sequence[CheckpointPiece],
    *,
    group: dist.ProcessGroup | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Fill the pieces' tensors in place from a checkpoint folder and return its `extra`. Every rank of `group` calls.

    The layout may differ from the saved one; dtypes are converted as `copy_` does. `verify` reads every file once and
    compares its SHA-256 (the ranks share the files). Raises CheckpointError on every rank, before any tensor is
    changed, if the folder is no checkpoint, is incomplete or damaged, or lacks a tensor or has it in another shape.
    """
    import torch.distributed.checkpoint as dcp

    from pipefit.run.checkpoint.planner import PieceLoadPlanner
    from pipefit.run.checkpoint.storage import ManifestReader

    checkpoint = Path(checkpoint)
    rank, size = _group_rank(group), _group_size(group)

    def check_checkpoint() -> CheckpointManifest:
        manifest = read_manifest(checkpoint)
        check_sizes(checkpoint, manifest)
        _check_pieces(checkpoint, manifest, pieces)
        if verify:
            check_content(checkpoint, manifest, rank, size)
        return manifest

    manifest = _run_on_all(group, check_checkpoint)
    reader, planner = ManifestReader(checkpoint, manifest), PieceLoadPlanner(pieces)
    _run_dcp("read", checkpoint, group, lambda alone: dcp.load(
        {}, storage_reader=reader, planner=planner, process_group=group, no_dist=alone
    ))  # fmt: skip
    return dict(manifest.extra)


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the folder of the last completed checkpoint; None if there is none. Incomplete ones are skipped."""
    complete = complete_checkpoints(Path(directory))
    return complete[-1][0] if complete else None


def locate_checkpoint(path: Path) -> Path:
    """Return the checkpoint for a user's path: the folder itself, or the newest in it or in its folder `checkpoints`.

    Raises CheckpointError if there is none, or if one that may be the newest is damaged: an older one is never used in
    its place. The remains of an interrupted save are no checkpoint, and are skipped.
    """
    path = Path(path)
    if (path / MANIFEST).exists() or (is_folder_name(path.name) and path.is_dir()):
        return path
    for directory in (path, path / "checkpoints"):
        complete, damaged = survey_checkpoints(directory)
        newest = complete[-1] if complete else None
        for folder, serial, error in damaged:
            if newest is None or serial is None or serial > newest[1].serial:
                raise _newest_is_damaged(folder, error, newest[0] if newest else None)
        if newest is not None:
            return newest[0]
    raise CheckpointError(
        "There is no checkpoint here.",
        where=str(path),
        seen="no complete folder step-..." if path.is_dir() else "no such folder",
        allowed="the folder of a run, or one of its folders step-...",
        next_step="start without --resume, or name the folder of a run that saved a checkpoint",
    )


def _newest_is_damaged(folder: Path, error: CheckpointError, older: Path | None) -> CheckpointError:
    return CheckpointError(
        "The newest checkpoint is damaged, and an older one is used only if it is named.",
        where=error.where or str(folder),
        seen=error.what + (f" {error.seen}" if error.seen is not None else ""),
        allowed=error.allowed,
        next_step="restore it, or start a new run"
        if older is None
        else f"restore it, or go back to an earlier one by name: --resume {older}",
    )


def _next_folder(directory: Path, step: int) -> tuple[Path, Path, int]:
    """Return (hidden folder to write, final folder, serial number) of the next checkpoint. No checkpoint is
    replaced."""
    complete, damaged = survey_checkpoints(directory)
    known = [manifest.serial for _, manifest in complete] + [serial or 0 for _, serial, _ in damaged]
    serial = 1 + max(known, default=0)
    copy = 1
    while (directory / folder_name(step, copy)).exists():
        copy += 1
    name = folder_name(step, copy)
    return directory / f".{name}.incomplete", directory / name, serial


def _prune_checkpoints(directory: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and the remains of interrupted saves and deletions."""
    assert keep >= 1, "at least one checkpoint is kept"
    try:
        for folder, _ in complete_checkpoints(directory)[:-keep]:
            doomed = directory / f".{folder.name}.deleted"
            files.remove(doomed)
            files.rename(folder, doomed)
        for left in [*directory.glob(".step-*.deleted"), *directory.glob(".step-*.incomplete")]:
            files.remove(left)
    except OSError as error:
        warnings.warn(f"an old checkpoint could not be deleted: {error}", stacklevel=3)


def _check_pieces(checkpoint: Path, manifest: CheckpointManifest, pieces: Sequence[CheckpointPiece]) -> None:
    for piece in pieces:
        if math.prod(piece.shape) == 0:
            continue
        stored = manifest.tensors.get(piece.name)
        if stored is None:
            near = difflib.get_close_matches(piece.name, manifest.tensors, n=2)
            raise CheckpointError(
                f"The checkpoint has no tensor {piece.name!r}: it is of another model or another optimizer.",
                where=str(checkpoint),
                seen=f"{len(manifest.tensors)} tensors" + (f", such as {', '.join(near)}" if near else ""),
                next_step="resume with the plan's own model, or start a new run",
            )
        if stored.shape != piece.shape:
            raise CheckpointError(
                f"The tensor {piece.name!r} has another shape in the checkpoint: it is of another model.",
                where=str(checkpoint),
                seen=f"{list(stored.shape)} in the checkpoint",
                allowed=f"{list(piece.shape)} in the model",
                next_step="resume with the plan's own model, or start a new run",
            )


def _run_on_all(group: dist.ProcessGroup | None, work: Callable[[], T], from_rank_0: bool = False) -> T:
    """Run `work()` on every rank; if it raises on one, every rank raises that error (an OSError as CheckpointError).

    `from_rank_0`: every rank returns rank 0's result.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except OSError as problem:
        error = CheckpointError("The checkpoint folder cannot be used.", where=str(problem))
    except Exception as problem:
        error = problem
    if _group_size(group) > 1:
        everyone: list[Any] = [None] * _group_size(group)
        dist.all_gather_object(everyone, (result if from_rank_0 else None, error), group=group)
        error = error or next((rank_error for _, rank_error in everyone if rank_error is not None), None)
        result = everyone[0][0] if from_rank_0 else result
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _run_dcp(what: str, where: Path, group: dist.ProcessGroup | None, work: Callable[[bool], Any]) -> None:
    """Run `work(alone)` and raise one of DCP's collected exceptions: ours unchanged, an OSError as CheckpointError."""
    from torch.distributed.checkpoint.api import CheckpointException

    alone = _group_size(group) == 1
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            work(alone)
    except CheckpointException as collected:
        rank, (error, _) = min(collected.failures.items(), key=lambda entry: entry[0])
        if isinstance(error, PipefitError):
            raise error from None
        if isinstance(error, OSError):
            raise CheckpointError(
                f"The checkpoint could not be {what}.",
                where=f"{where}, rank {rank}",
                seen=error,
                next_step="check the disk's room and permissions; earlier checkpoints are as they were",
            ) from None
        raise error from collected


def _group_rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def _group_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
