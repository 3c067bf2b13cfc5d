"""Storage for torch.distributed.checkpoint: one safetensors file per rank, a JSON manifest, no pickle anywhere.

The writer fills a hidden folder beside the final one. When every rank's file is on the disk, rank 0 writes the manifest
and renames the folder: a folder with the final name is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from pipefit.errors import CheckpointError
from pipefit.run.checkpoint import files
from pipefit.run.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    STORED_DTYPES,
    VERSION,
    CheckpointManifest,
    StoredChunk,
    StoredFile,
    StoredTensor,
    check_sizes,
    manifest_bytes,
    read_manifest,
)
from pipefit.run.checkpoint.pieces import as_bytes

_SAFE_NAMES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
_SAFE_DTYPES = {getattr(torch, name): safe for name, safe in zip(STORED_DTYPES, _SAFE_NAMES, strict=True)}
_BLOCK = 1 << 24


@dataclass(frozen=True, slots=True)
class _WrittenChunk:
    """A rank's report of one written chunk to rank 0."""

    chunk: StoredChunk
    file: StoredFile


class ManifestWriter(StorageWriter):
    """Writes one checkpoint into `hidden` and renames it to `final`."""

    def __init__(self, hidden: Path, final: Path, *, step: int, serial: int, extra: Mapping[str, Any]) -> None:
        self._hidden, self._final = hidden, final
        self._step, self._serial, self._extra = step, serial, extra

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool) -> None:  # type: ignore[override,unused-ignore]
        if is_coordinator:
            files.remove(self._hidden)
            files.make_folder(self._hidden)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; it is on the disk when the future is done. A rank with nothing to write makes no
        file."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write_file(plan, planner) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint on rank 0 after all files are written: manifest, sync, rename, sync."""
        manifest = self._build_manifest(metadata, results)
        try:
            check_sizes(self._hidden, manifest)
        except CheckpointError as error:
            raise CheckpointError(
                "Rank 0 cannot see the files that other ranks wrote.",
                where=error.where,
                next_step="save to a folder that all hosts share",
            ) from None
        with files.create(self._hidden / MANIFEST) as file:
            files.write(file, manifest_bytes(manifest))
            files.sync(file)
        files.sync_folder(self._hidden)
        files.rename(self._hidden, self._final)
        files.sync_folder(self._final.parent)

    def _write_file(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        assert sys.byteorder == "little", "safetensors files are little-endian"
        name = f"tensors-{plan.storage_data:05d}.safetensors"
        header, keys, size = _file_header(plan.items)
        digest, total = hashlib.sha256(header), len(header) + size
        with files.create(self._hidden / name) as file:
            files.write(file, header)
            for item in plan.items:
                data = planner.resolve_data(item)
                assert isinstance(data, torch.Tensor)
                content = memoryview(as_bytes(data).numpy())
                for start in range(0, len(content), _BLOCK):
                    files.write(file, content[start : start + _BLOCK])
                    digest.update(content[start : start + _BLOCK])
            files.sync(file)
        stored = StoredFile(bytes=total, sha256=digest.hexdigest())
        return [
            WriteResult(item.index, _item_bytes(item), _WrittenChunk(_stored_chunk(item, name, key), stored))
            for item, key in zip(plan.items, keys, strict=True)
        ]

    def _build_manifest(self, metadata: Metadata, results: list[list[WriteResult]]) -> CheckpointManifest:
        written = [result for rank in results for result in rank]
        chunks: dict[str, list[StoredChunk]] = {}
        for result in written:
            chunks.setdefault(result.index.fqn, []).append(result.storage_data.chunk)
        tensors = {
            name: StoredTensor(
                shape=tuple(entry.size),
                dtype=str(entry.properties.dtype).removeprefix("torch."),
                chunks=tuple(sorted(chunks[name], key=lambda chunk: chunk.offsets)),
            )
            for name, entry in sorted(metadata.state_dict_metadata.items())
            if isinstance(entry, TensorStorageMetadata)
        }
        stored = {result.storage_data.chunk.file: result.storage_data.file for result in written}
        return CheckpointManifest(
            format=FORMAT, version=VERSION, serial=self._serial, step=self._step, extra=self._extra,
            tensors=tensors, files=dict(sorted(stored.items())),
        )  # fmt: skip


class ManifestReader(StorageReader):
    """Reads a checkpoint folder. Opens its manifest and the safetensors files that the manifest names."""

    def __init__(self, folder: Path, manifest: CheckpointManifest | None = None) -> None:
        self._folder = folder
        self._known = manifest
        self._places: dict[tuple[str, tuple[int, ...]], StoredChunk] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_metadata(self) -> Metadata:  # type: ignore[override,unused-ignore]
        """Return DCP's description of the tensors, made from the manifest."""
        manifest = self._known or read_manifest(self._folder)
        entries: dict[str, Any] = {}
        for name, tensor in manifest.tensors.items():
            entries[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
                size=torch.Size(tensor.shape),
                chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks],
            )
            self._places.update({(name, chunk.offsets): chunk for chunk in tensor.chunks})
        return Metadata(entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # type: ignore[override,unused-ignore]
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every item's box from its file (memory-mapped) into the tensor that the planner names."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            chunk = self._find_chunk(item.storage_index)
            by_file.setdefault(chunk.file, []).append((item, chunk))
        for name, items in sorted(by_file.items()):
            self._read_file(self._folder / name, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, path: Path, items: list[Any], planner: LoadPlanner) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                for item, chunk in items:
                    runs = zip(item.storage_offsets, item.lengths, strict=True)
                    box = tuple(slice(start, start + length) for start, length in runs)
                    stored = file.get_slice(chunk.key)
                    if tuple(stored.get_shape()) != chunk.sizes:
                        raise SafetensorError(f"{chunk.key} is {stored.get_shape()}, not {list(chunk.sizes)}")
                    source = stored[box] if box else file.get_tensor(chunk.key)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(source)
                    planner.commit_tensor(item, target)
        except SafetensorError as error:
            raise CheckpointError(
                "A file of the checkpoint does not hold the tensors that the manifest says.",
                where=str(path),
                seen=error,
                next_step="restore the file, or resume from an earlier checkpoint",
            ) from None

    def _find_chunk(self, index: MetadataIndex) -> StoredChunk:
        assert index.offset is not None
        return self._places[(index.fqn, tuple(index.offset))]


def _file_header(items: list[WriteItem]) -> tuple[bytes, list[str], int]:
    """Return (safetensors header of a file with these items, their keys, bytes of data)."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    keys, offset = [], 0
    for item in items:
        assert item.type != WriteItemType.BYTE_IO, f"{item.index.fqn}: only tensors are stored"
        data = item.tensor_data
        assert data is not None
        sizes = list(data.chunk.sizes)
        key = item.index.fqn
        if sizes != list(data.size):
            runs = (f"{start}:{start + length}" for start, length in zip(data.chunk.offsets, sizes, strict=True))
            key = f"{key}[{','.join(runs)}]"
        stop = offset + _item_bytes(item)
        entries[key] = {
            "dtype": _SAFE_DTYPES[data.properties.dtype],
            "shape": sizes,
            "data_offsets": [offset, stop],
        }
        keys.append(key)
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, keys, offset


def _item_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None
    return int(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize)


def _stored_chunk(item: WriteItem, file: str, key: str) -> StoredChunk:
    data = item.tensor_data
    assert data is not None
    return StoredChunk(offsets=tuple(data.chunk.offsets), sizes=tuple(data.chunk.sizes), file=file, key=key)
