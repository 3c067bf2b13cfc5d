"""Samples from a folder without a manifest: every image with its text file, and a manifest written from them.

`x.jpg` and `x.txt` in the same folder are one sample. With task `caption` the model reads the image and learns the
text; with `generate` it reads the text, without labels, and generates the image.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pipefit.data.multimodal.manifest import ManifestSample, SamplePart, is_manifest, printable_name, read_manifest
from pipefit.errors import DataError

Task = Literal["caption", "generate"]

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
"""File suffixes of images, compared without case."""


def read_samples(source: Path, task: Task = "caption") -> Iterator[ManifestSample]:
    """Yield the samples of a manifest or of a folder. Raises DataError for a source that is neither, or is broken."""
    if source.is_dir():
        return _read_folder(source, task)
    if source.is_file() and is_manifest(source):
        return read_manifest(source)
    raise DataError(
        "There is no such manifest or folder of images.",
        where=str(source),
        seen="a file of another kind" if source.is_file() else "nothing",
        allowed="a .jsonl or .parquet manifest, or a folder of images with texts beside them",
    )


def write_manifest(folder: Path, target: Path, task: Task = "caption") -> int:
    """Write the samples of a folder as a jsonl manifest with paths relative to it; return their number.

    Raises DataError if the folder has no image, if an image has no text, or if `target` cannot be written.
    """
    if not folder.is_dir():
        raise DataError("A manifest is made of a folder of images.", where=str(folder), seen="no folder")
    base = os.path.relpath(folder.absolute(), target.absolute().parent)
    lines = [_json_line(_manifest_row(sample, base)) for sample in _read_folder(folder, task)]
    try:
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError("The manifest cannot be written.", where=str(target), seen=error) from None
    return len(lines)


def _read_folder(folder: Path, task: Task) -> Iterator[ManifestSample]:
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise DataError("There is no image in the folder.", where=str(folder), allowed=", ".join(sorted(SUFFIXES)))
    for path in paths:
        beside = (folder / path).with_suffix(".txt")
        try:
            text = beside.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                "An image of the folder has no text beside it.",
                where=str(folder / path),
                seen=error,
                allowed=f"UTF-8 text in {beside.name}",
                next_step="add it, or write a manifest that lists the samples",
            ) from None
        caption = task == "caption"
        parts = [SamplePart(kind="image" if caption else "generate", value=path.as_posix())]
        parts.insert(1 if caption else 0, SamplePart(kind="text", value=text, learn=caption))
        yield ManifestSample(name=path.with_suffix("").as_posix(), parts=tuple(parts), where=str(folder / path))


def _json_line(row: dict[str, Any]) -> str:
    """Return a JSON line, readable if the file names are valid text, else with escapes."""
    line = json.dumps(row, ensure_ascii=False)
    return line if printable_name(line) == line else json.dumps(row)


def _manifest_row(sample: ManifestSample, base: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for part in sample.parts:
        if part.kind == "text":
            parts.append({"text": part.value} if part.learn else {"text": part.value, "learn": False})
        else:
            parts.append({part.kind: part.value if base == "." else f"{base}/{part.value}"})
    return {"id": sample.name, "parts": parts}
