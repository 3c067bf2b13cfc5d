"""The manifest: the parts of every sample, one row per sample, read from jsonl or parquet and checked.

A row is `{"id": ..., "parts": [...]}`. A part is a text (`{"text": ...}`, with `"learn": false` if it has no labels,
such as a prompt), an input image (`{"image": PATH}`) or an image to generate (`{"generate": PATH}`). Paths are relative
to the manifest. In parquet, `parts` is a list of structs with the same fields, null if absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipefit.data.sources import column_values, json_lines
from pipefit.errors import DataError

PartKind = Literal["text", "image", "generate"]

_KINDS: tuple[PartKind, ...] = ("text", "image", "generate")
_LINE = 'one sample a line, as {"id": "1", "parts": [{"image": "a.jpg"}, {"text": "a dog"}]}'
_JSONL, _PARQUET = (".jsonl", ".ndjson"), (".parquet", ".pq")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePart:
    """A part of a sample, in sequence order."""

    kind: PartKind
    value: str
    "The text, or the path of the image."
    learn: bool = True
    "For a text: whether its tokens are labels."


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSample:
    """One row of a manifest."""

    name: str
    parts: tuple[SamplePart, ...]
    where: str
    "File and line or row, for messages."


def printable_name(text: str) -> str:
    """Return a name that can be printed and written as UTF-8; file names may contain bytes that are not valid UTF-8."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def is_manifest(path: Path) -> bool:
    """Return whether the file's suffix is that of a manifest."""
    return path.suffix in _JSONL + _PARQUET


def read_manifest(path: Path) -> Iterator[ManifestSample]:
    """Yield the samples in order. Raises DataError for an invalid row."""
    if path.suffix in _PARQUET:
        columns = column_values(path, ("id", "parts"), optional=("id",))
        for number, row in enumerate(columns):
            yield _parse_sample(row, f"{path}, row {number}", str(number))
        return
    if path.suffix not in _JSONL:
        raise DataError("This is no manifest.", where=str(path), allowed=", ".join(_JSONL + _PARQUET))
    for number, row in json_lines(path, allowed=_LINE):
        yield _parse_sample(row, f"{path}, line {number}", str(number))


def _parse_sample(row: Any, where: str, number: str) -> ManifestSample:
    if not isinstance(row, Mapping) or not isinstance(row.get("parts"), (list, tuple)) or not len(row["parts"]):
        raise DataError(
            "The row of the manifest has no parts.",
            where=where,
            seen=", ".join(map(repr, row)) if isinstance(row, Mapping) else type(row).__name__,
            allowed='a field "parts" with a list of texts and images that is not empty',
        )
    parts = tuple(_parse_part(part, f"{where}, part {index}") for index, part in enumerate(row["parts"]))
    name = row.get("id")
    return ManifestSample(name=number if name is None else str(name), parts=parts, where=where)


def _parse_part(part: Any, where: str) -> SamplePart:
    """Parse one part. Absent fields may be null, as in parquet."""
    known = {str(key): value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    kinds = [kind for kind in _KINDS if kind in known]
    learn = known.get("learn", True)
    odd = set(known) - {*_KINDS, "learn"}
    if len(kinds) != 1 or odd or not isinstance(learn, bool) or not isinstance(known[kinds[0]], str):
        raise DataError(
            "A part of the sample is neither a text nor an image.",
            where=where,
            seen=repr(part)[:80],
            allowed='{"text": ...} (with "learn": false where it is no label), {"image": PATH} or {"generate": PATH}',
        )
    return SamplePart(kind=kinds[0], value=known[kinds[0]], learn=learn)
