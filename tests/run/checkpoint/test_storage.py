"""The N-th file operation of a save fails, for N = 1, 2, 3, ... until the save succeeds (as SQLite tests itself).

After each the newest complete checkpoint loads and holds what was saved into it, and the next save works over
whatever the failed one left.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoint_toys import save_by_ranks

from pipefit.errors import CheckpointError
from pipefit.run.checkpoint.checkpoint import (
    CheckpointPiece,
    latest_checkpoint,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)
from pipefit.run.checkpoint.checkpoint import files as checkpoint_files

OPERATIONS = ("make_folder", "create", "write", "sync", "sync_folder", "rename", "remove")


class Death(BaseException):
    """The process is gone: nothing that would tidy up may run."""


def pieces(value: float) -> list[CheckpointPiece]:
    tensors = {"a": torch.full((4, 3), value), "b": torch.full((7,), value, dtype=torch.float64)}
    return [CheckpointPiece(name=name, shape=tuple(tensor.shape), tensor=tensor) for name, tensor in tensors.items()]


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, fault: Callable[..., None]) -> list[str]:
    """Make the `number`-th file operation (from 1) run `fault`; the list grows with every operation."""
    seen: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(checkpoint_files, name)

        def operation(*args: Any) -> Any:
            seen.append(name)
            if len(seen) == number:
                fault(name, *args)
            return real(*args)

        return operation

    for name in OPERATIONS:
        monkeypatch.setattr(checkpoint_files, name, watched(name))
    return seen


def full_disk(name: str, *args: Any) -> None:
    raise OSError(28, "No space left on device")


def torn(name: str, *args: Any) -> None:
    """Half of a write reaches the disk."""
    if name == "write":
        file, data = args
        file.write(data[: len(data) // 2])
        file.flush()
    raise OSError(5, "Input/output error")


def death(name: str, *args: Any) -> None:
    raise Death


def stored_value(folder: Path) -> float:
    """Every element of a checkpoint is its own step number, if nothing is mixed up."""
    found = pieces(-1.0)
    assert load_checkpoint(folder, found) == {"value": float(read_manifest(folder).step)}
    values = {float(x) for piece in found for x in piece.tensor.reshape(-1)}
    assert values == {float(read_manifest(folder).step)}
    return values.pop()


@pytest.mark.parametrize("fault", [full_disk, torn, death])
@pytest.mark.parametrize("keep", [None, 1])
def test_a_save_that_fails_at_any_operation_leaves_a_good_checkpoint(
    tmp_path: Path, fault: Callable[..., None], keep: int | None
) -> None:
    outcomes, number = [], 0
    while not outcomes or outcomes[-1] != "clean":
        number += 1
        directory = tmp_path / str(number)
        save_checkpoint(directory, 1, pieces(1.0), {"value": 1.0})
        with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            seen = fail_at(monkeypatch, number, fault)
            try:
                save_checkpoint(directory, 2, pieces(2.0), {"value": 2.0}, keep=keep)
                outcomes.append("clean" if len(seen) < number else "warned")
            except CheckpointError as error:
                assert "could not be written" in error.full_text() and "Error" not in error.what
                outcomes.append("failed")
            except Death:
                outcomes.append("died")
        said = [str(entry.message) for entry in warned if "could not be deleted" in str(entry.message)]
        assert bool(said) == (outcomes[-1] == "warned")
        newest = latest_checkpoint(directory)
        assert newest is not None
        value = stored_value(newest)
        renamed = "rename" in seen[: number - 1]
        assert value == (2.0 if renamed else 1.0)  # complete from the rename on, and not before
        assert (
            stored_value(save_checkpoint(directory, 2, pieces(2.0), {"value": 2.0})) == 2.0
        )  # the same step once more
        assert stored_value(save_checkpoint(directory, 3, pieces(3.0), {"value": 3.0}, keep=1)) == 3.0
        assert [path.name for path in directory.iterdir()] == ["step-00000003"]
    assert number > 8 and {"failed", "died"} & set(outcomes[:-1])
    assert ("warned" in outcomes) == (keep == 1 and fault is not death)


def test_every_operation_was_made_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam is complete: a save and its pruning go through each of its operations, and syncs before it renames."""
    save_checkpoint(tmp_path, 1, pieces(1.0), {})
    seen = fail_at(monkeypatch, 0, full_disk)
    save_checkpoint(tmp_path, 2, pieces(2.0), {}, keep=1)
    assert set(seen) == set(OPERATIONS)
    rename = seen.index("rename")
    assert seen[:rename].count("sync") == seen[:rename].count("create") == 2  # tensors and manifest
    assert seen[rename - 1] == "sync_folder" and seen[rename + 1] == "sync_folder"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_killed_at_any_operation_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    """The same with real processes that end without a word."""
    number, code = 0, 1
    while code:
        number += 1
        directory = tmp_path / str(number)
        save_checkpoint(directory, 1, pieces(1.0), {"value": 1.0})
        child = os.fork()
        if child == 0:
            patch = pytest.MonkeyPatch()
            fail_at(patch, number, lambda *args: os._exit(1))
            try:
                save_checkpoint(directory, 2, pieces(2.0), {"value": 2.0})
            except BaseException:
                os._exit(2)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 1)
        newest = latest_checkpoint(directory)
        assert newest is not None and stored_value(newest) in (1.0, 2.0)
        assert stored_value(save_checkpoint(directory, 3, pieces(3.0), {"value": 3.0}, keep=1)) == 3.0
    assert number > 8 and stored_value(latest_checkpoint(tmp_path / str(number)) or tmp_path) == 3.0


def test_a_rank_whose_files_rank_0_cannot_see_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that do not share the folder: rank 1's file is nowhere when rank 0 looks."""
    real = checkpoint_files.create

    def elsewhere(path: Path):  # type: ignore[no-untyped-def]
        if path.name == "tensors-00001.safetensors":
            (tmp_path / "other host").mkdir()
            return real(tmp_path / "other host" / path.name)
        return real(path)

    monkeypatch.setattr(checkpoint_files, "create", elsewhere)
    halves = [
        [CheckpointPiece(name="w", shape=(4,), tensor=torch.ones(2), box=((start, start + 2),))] for start in (0, 2)
    ]
    with pytest.raises(CheckpointError, match="cannot see the files that other ranks wrote") as caught:
        save_by_ranks(tmp_path / "run", 1, halves, {})
    assert "a folder that all hosts share" in caught.value.full_text() and "tensors-00001" in caught.value.full_text()
    assert latest_checkpoint(tmp_path / "run") is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "file" / "run", 1, pieces(1.0), {})
    assert str(tmp_path / "file") in caught.value.full_text()
