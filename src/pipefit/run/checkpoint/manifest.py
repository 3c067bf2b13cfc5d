"""The manifest of a checkpoint: `checkpoint.json`, which names every tensor, every file and its SHA-256.

A folder is a checkpoint if its manifest exists and matches its own checksum, and every file has the size in the
manifest. Reading it needs no pickle: the manifest is JSON and the tensors are safetensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipefit.codec import dump_text, from_data, to_data
from pipefit.errors import CheckpointError, FormatError

MANIFEST = "checkpoint.json"
FORMAT = "pipefit-checkpoint"
VERSION = 1

STORED_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""Allowed element types of a tensor, by torch's names."""

_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_FILE = re.compile(r"tensors-\d+\.safetensors")
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """One box of a tensor and its position in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str
    "Its name within the safetensors file."


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor by its global name: its chunks cover it exactly once."""

    shape: tuple[int, ...]
    dtype: str
    "A torch name: float32, bfloat16, int64, ..."
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of the checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """The content of `checkpoint.json`."""

    format: str
    version: int
    serial: int
    "Number of the checkpoint in its folder, in writing order."
    step: int
    extra: Mapping[str, Any]
    "Plain JSON of the caller: plan hash, data position, seed."
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]


def manifest_bytes(manifest: CheckpointManifest) -> bytes:
    """Return the content of `checkpoint.json`: the manifest with a checksum over itself."""
    data = to_data(manifest)
    return dump_text({**data, "checksum": _json_checksum(data)}).encode()


def read_manifest(folder: Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint folder. Raises CheckpointError if it is missing, truncated or changed."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            "This is not a checkpoint.",
            where=str(folder),
            seen=error,
            allowed=f"a folder with {MANIFEST}, as `pipefit train` writes it",
            next_step="name a folder step-... of a run; a checkpoint that was not completed cannot be used",
        ) from None
    try:
        data = json.loads(text)
        checksum = data.pop("checksum")
        good = checksum == _json_checksum(data)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise _damaged_error(path, f"{type(error).__name__}: {error}") from None
    if not good:
        raise _damaged_error(path, "its checksum does not agree with its content")
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise CheckpointError(
            "The checkpoint is of another format or version.",
            where=str(path),
            seen=f"{data.get('format')} {data.get('version')}",
            allowed=f"{FORMAT} {VERSION}",
        )
    try:
        manifest = from_data(CheckpointManifest, data, str(path))
    except FormatError as error:
        raise _damaged_error(path, error.what) from None
    fault = _find_fault(manifest)
    if fault is not None:
        raise _damaged_error(path, fault)
    return manifest


def check_sizes(folder: Path, manifest: CheckpointManifest) -> None:
    """Raise CheckpointError if a file is missing or was truncated. Reads no content."""
    for name, stored in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise CheckpointError(
                "A file of the checkpoint is missing.",
                where=str(folder / name),
                next_step="restore the file, or resume from an earlier checkpoint",
            ) from None
        if size != stored.bytes:
            raise CheckpointError(
                "A file of the checkpoint has the wrong size; it was probably cut short.",
                where=str(folder / name),
                seen=f"{size} bytes",
                allowed=f"{stored.bytes} bytes",
                next_step="restore the file, or resume from an earlier checkpoint",
            )


def check_content(folder: Path, manifest: CheckpointManifest, part: int = 0, parts: int = 1) -> None:
    """Raise CheckpointError if a file's SHA-256 is not the manifest's. Reads every `parts`-th file from `part`."""
    for name in sorted(manifest.files)[part::parts]:
        try:
            digest = file_sha256(folder / name)
        except OSError as error:
            raise CheckpointError("A file of the checkpoint cannot be read.", where=str(error)) from None
        if digest != manifest.files[name].sha256:
            raise CheckpointError(
                "A file of the checkpoint was changed after it was written.",
                where=str(folder / name),
                seen=f"SHA-256 {digest}",
                allowed=f"SHA-256 {manifest.files[name].sha256}",
                next_step="restore the file, or resume from an earlier checkpoint",
            )


def file_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            state.update(block)
    return state.hexdigest()


def folder_name(step: int, copy: int) -> str:
    """`step-00000100`, or `step-00000100-2` for the second checkpoint of that step in a folder."""
    return f"step-{step:08d}" if copy < 2 else f"step-{step:08d}-{copy}"


def is_folder_name(name: str) -> bool:
    """Return True for the name of a completed checkpoint's folder."""
    return _FOLDER.fullmatch(name) is not None


def complete_checkpoints(directory: Path) -> list[tuple[Path, CheckpointManifest]]:
    """Return the complete checkpoints below `directory` in writing order, without damaged ones."""
    return survey_checkpoints(directory)[0]


def survey_checkpoints(
    directory: Path,
) -> tuple[list[tuple[Path, CheckpointManifest]], list[tuple[Path, int | None, CheckpointError]]]:
    """Return (complete checkpoints in writing order, damaged ones) below `directory`.

    A damaged one is (folder, serial number or None if the manifest cannot be read, error).
    """
    complete, damaged = [], []
    for folder in sorted(directory.iterdir()) if directory.is_dir() else []:
        if is_folder_name(folder.name) and folder.is_dir():
            serial = None
            try:
                manifest = read_manifest(folder)
                serial = manifest.serial
                check_sizes(folder, manifest)
            except CheckpointError as error:
                damaged.append((folder, serial, error))
                continue
            complete.append((folder, manifest))
    return sorted(complete, key=lambda entry: (entry[1].serial, entry[0].name)), damaged


def _find_fault(manifest: CheckpointManifest) -> str | None:
    """Return the first contradiction in a manifest, or None; this also refuses a forged manifest."""
    for name in manifest.files:
        if not _FILE.fullmatch(name):
            return f"it names a file {name!r}, which is no part of a checkpoint"
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in STORED_DTYPES:
            return f"{name} has the unknown dtype {tensor.dtype!r}"
        for chunk in tensor.chunks:
            places = zip(chunk.offsets, chunk.sizes, tensor.shape, strict=False)
            if len(chunk.offsets) != len(tensor.shape) or len(chunk.sizes) != len(tensor.shape):
                return f"{name} has a chunk of another number of dimensions"
            if chunk.file not in manifest.files or not all(o >= 0 and n > 0 and o + n <= m for o, n, m in places):
                return f"{name} has a chunk that lies outside of it"
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.shape):
            return f"the chunks of {name} do not cover it"
    return None


def _json_checksum(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _damaged_error(path: Path, seen: str) -> CheckpointError:
    return CheckpointError(
        "The checkpoint's manifest was cut short or changed.",
        where=str(path),
        seen=seen,
        next_step="restore the file, or resume from an earlier checkpoint",
    )
