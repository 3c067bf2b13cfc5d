"""The file operations of a checkpoint, in one place so that tests can make the N-th of them fail."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents."""
    path.mkdir(parents=True, exist_ok=True)


def create(path: Path) -> BinaryIO:
    """Open a new file to write."""
    return path.open("xb")


def write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Append to an open file."""
    file.write(data)


def sync(file: BinaryIO) -> None:
    """Return when the file's content is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Return when the folder's entries are on the disk (does nothing if folders cannot be opened)."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename a folder; `target` must not exist."""
    source.rename(target)


def remove(path: Path) -> None:
    """Delete a folder and its content; does nothing if it does not exist."""
    if path.exists():
        shutil.rmtree(path)
