"""Read text from files, folders, glob patterns, jsonl, parquet, and the standard library of the running Python.

A source is a string. Its documents come in a fixed order: paths sorted as text, rows in file order. Every document is
checked to be UTF-8 text without NUL bytes.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipefit.errors import DataError
from pipefit.extras import install_command

STDLIB = "stdlib"
"""The source that is available everywhere: the source code of the Python standard library, without its tests."""

_JSON_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"})


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """One piece of text and its origin."""

    where: str
    text: bytes
    "UTF-8, without NUL bytes."


def read_documents(
    sources: Iterable[str], *, field: str = "text", limit_bytes: int | None = None
) -> Iterator[SourceDocument]:
    """Yield the non-empty documents of all sources in order, cut off after `limit_bytes` bytes of text.

    `field` is the jsonl field or parquet column with the text. Raises DataError for a source that is missing, not text,
    or broken.
    """
    left = limit_bytes
    for source in sources:
        for document in _read_source(source, field):
            if left is not None and len(document.text) >= left:
                cut = document.text[:left].decode("utf-8", errors="ignore").encode()
                if cut:
                    yield SourceDocument(document.where, cut)
                return
            if document.text:
                yield document
                left = left if left is None else left - len(document.text)


def _read_source(source: str, field: str) -> Iterator[SourceDocument]:
    if source == STDLIB:
        yield from _read_stdlib()
        return
    for path in list_paths(source):
        if has_records(path):
            for where, record in read_records(path, (field,)):
                yield SourceDocument(where, _check_text(_record_text(record, field, where), where))
        else:
            yield SourceDocument(str(path), _check_text(_read_bytes(path), str(path)))


def has_records(path: Path) -> bool:
    """Return whether a file holds rows with fields: jsonl or parquet."""
    return path.suffix in (*_JSON_LINES, *_PARQUET)


def read_records(path: Path, columns: Sequence[str], optional: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (file and line or row, value) of a jsonl or parquet file. For `columns` and `optional`, which limit what is
    read of parquet, see `column_values`; rows of jsonl are not checked."""
    if path.suffix in _JSON_LINES:
        for number, record in json_lines(path):
            yield f"{path}, line {number}", record
    else:
        for number, row in enumerate(column_values(path, columns, optional)):
            yield f"{path}, row {number}", row


def list_paths(source: str) -> list[Path]:
    """Return the files of a source in order: of a file, a folder or a pattern. Raises DataError if there is none."""
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return _walk_folder(path, _SKIPPED_FOLDERS)
    matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
    if matches:
        return matches
    raise DataError(
        "There is no such file or folder of text.",
        where="data source",
        seen=source,
        allowed=f"a file, a folder, a pattern such as 'texts/**/*.txt', or {STDLIB!r}",
    )


def _walk_folder(folder: Path, skipped: frozenset[str]) -> list[Path]:
    """Return the regular files below a folder, without hidden ones, sorted by their relative path."""
    paths = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        paths += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted((path for path in paths if path.is_file()), key=lambda path: path.relative_to(folder).as_posix())


def _read_stdlib() -> Iterator[SourceDocument]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in _walk_folder(folder, _SKIPPED_FOLDERS | _STDLIB_SKIPPED):
        if path.suffix == ".py":
            text = _read_bytes(path)
            if _fault_offset(text) is None:
                yield SourceDocument(f"{STDLIB}:{path.relative_to(folder).as_posix()}", text)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError("The file cannot be read.", where=str(path), seen=error) from None


def json_lines(path: Path, allowed: str = "one JSON object a line") -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, value) of every non-empty line.

    Raises DataError if the file cannot be read or a line is not valid JSON; its message quotes `allowed` as the
    expected content.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _parse_line(line.rstrip(b"\n"), f"{path}, line {number}", allowed)
    except OSError as error:
        raise DataError("The file cannot be read.", where=str(path), seen=error) from None


def _parse_line(line: bytes, where: str, allowed: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(
            "The line is not valid JSON.",
            where=where,
            seen=f"{error}: {line[:60]!r}",
            allowed=allowed,
            next_step="remove or mend the line; the file may have been cut short",
        ) from None


def _record_text(record: Any, field: str, where: str) -> bytes:
    if not isinstance(record, dict) or field not in record:
        raise DataError(
            f"There is no field {field!r}.",
            where=where,
            seen=", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__,
            next_step="name the field that holds the text with --field; for chat data name the field of the messages",
        )
    if not isinstance(record[field], str):
        raise DataError(f"The field {field!r} is not text.", where=where, seen=repr(record[field])[:60])
    return str(record[field]).encode("utf-8", errors="surrogatepass")


def column_values(path: Path, columns: Sequence[str], optional: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file as plain values of these columns; `optional` columns may be missing.

    Raises DataError if pyarrow or a column is missing, or if the file cannot be read.
    """
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise DataError(
            "Reading parquet needs pyarrow, which is not installed.",
            where=str(path),
            next_step=f"{install_command('pyarrow')}, or give the same rows as jsonl",
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            missing = next((name for name in columns if name not in names and name not in optional), None)
            if missing is not None:
                raise DataError(
                    f"There is no column {missing!r}.",
                    where=str(path),
                    seen=", ".join(map(repr, names)),
                    next_step="name the column that holds the text" if len(columns) == 1 else None,
                )
            for batch in file.iter_batches(columns=[name for name in columns if name in names]):
                yield from batch.to_pylist()
    except DataError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's own errors are subclasses of these
        raise DataError("The file cannot be read as parquet.", where=str(path), seen=error) from None


def _check_text(text: bytes, where: str) -> bytes:
    offset = _fault_offset(text)
    if offset is not None:
        raise DataError(
            "This is not text.",
            where=f"{where}, byte {offset}",
            seen=f"{text[offset : offset + 8]!r}",
            allowed="UTF-8 without NUL bytes",
            next_step="name only the text files, for example with a pattern such as 'texts/**/*.txt'",
        )
    return text


def _fault_offset(text: bytes) -> int | None:
    """Return the offset of the first byte that is not valid text; None if all of it is text."""
    nul = text.find(b"\0")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start if nul < 0 else min(nul, error.start)
    return nul if nul >= 0 else None
