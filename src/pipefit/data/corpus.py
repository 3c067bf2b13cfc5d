"""A corpus: the token ids of all documents, one after the other, in a memory-mapped file, read row by row.

`prepare_corpus` tokenises once and writes the token file, named by a hash of the content, aside and then renamed; it
is safe when several processes do it at once. `open_prepared` only reads. On one process `open_corpus` does both; with
many, rank 0 of every host calls `prepare_corpus`, all meet at a barrier, and all call `open_prepared`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipefit.codec import content_digest, from_data
from pipefit.data.feed_arrays import IGNORE
from pipefit.data.rows import RowSplit, cut_rows
from pipefit.data.sources import read_documents
from pipefit.data.tokenizer import BYTES, END_OF_TEXT, Tokenizer, load_tokenizer
from pipefit.errors import DataError, FormatError

_FORMAT = 1
_WRITE_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRequest:
    """What is to be read and how it becomes tokens. The order of `sources` is the order of the text."""

    sources: tuple[str, ...]
    "Files, folders, patterns, or `stdlib`."
    tokenizer: str = BYTES
    "`bytes`, a tokenizer.json, or a folder that holds one."
    vocabulary: int | None = None
    "The model's vocabulary; a tokenizer with more tokens is refused."
    field: str = "text"
    "The field of jsonl and the column of parquet files that holds the text."
    limit_bytes: int | None = None
    "Stop after so many bytes of text."


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCorpus:
    """A token file, as its JSON side file describes it."""

    format: int
    file: str
    "Name of the token file, beside the JSON file."
    dtype: str
    tokens: int
    documents: int
    text_bytes: int
    vocabulary: int
    digest: str
    "Of the text and the tokenizer: equal corpora have equal digests."


class Corpus:
    """The rows of a prepared corpus; see `pipefit.data.rows` for how they are cut."""

    def __init__(self, tokens: NDArray[Any], rows: RowSplit, prepared: PreparedCorpus, tokenizer: str = BYTES) -> None:
        self._tokens = tokens
        self._tokenizer = tokenizer
        self.rows = rows
        self.digest = prepared.digest
        self.documents = prepared.documents
        self.text_bytes = prepared.text_bytes
        self.vocabulary = prepared.vocabulary

    @property
    def tokens(self) -> int:
        """All tokens, separators included."""
        return len(self._tokens)

    @cached_property
    def separator(self) -> int | None:
        """The token that ends every document, as the tokenizer says; None where nothing separates them.

        Raises DataError if the tokenizer cannot be read.
        """
        return load_tokenizer(self._tokenizer).separator

    def require_separator(self) -> None:
        """Raises DataError if nothing in the corpus says where documents end."""
        if self.separator is None:
            raise DataError(
                "The documents cannot be kept apart: nothing in the tokens says where one ends.",
                where=self._tokenizer,
                seen="a tokenizer without an end-of-text token",
                allowed=", ".join(END_OF_TEXT),
                next_step="use a tokenizer with one of these tokens, or plan with --documents joined",
            )

    def row(self, index: int) -> NDArray[np.int64]:
        """(sequence + 1,) token ids; beyond the end of the corpus IGNORE (-100)."""
        assert 0 <= index < self.rows.count, f"row {index} of {self.rows.count}"
        length = self.rows.sequence + 1
        part = self._tokens[index * length : (index + 1) * length].astype(np.int64)
        if len(part) == length:
            return part
        return np.concatenate([part, np.full(length - len(part), IGNORE, dtype=np.int64)])


def open_corpus(
    sources: Sequence[str],
    *,
    sequence: int,
    tokenizer: str = BYTES,
    vocabulary: int | None = None,
    field: str = "text",
    limit_bytes: int | None = None,
    held_out: float = 0.01,
    cache: Path | None = None,
) -> Corpus:
    """Prepare and open in one process. See CorpusRequest, `prepare_corpus` and `open_prepared` for arguments and
    errors."""
    request = CorpusRequest(
        sources=tuple(sources), tokenizer=tokenizer, vocabulary=vocabulary, field=field, limit_bytes=limit_bytes
    )
    prepare_corpus(request, cache)
    return open_prepared(request, sequence=sequence, held_out=held_out, cache=cache)


def prepare_corpus(request: CorpusRequest, cache: Path | None = None) -> PreparedCorpus:
    """Make the token file in `cache` (default: a folder for temporary files), unless the same content is there.

    Raises DataError if the sources hold no text or cannot be read, or if `cache` cannot be written.
    """
    folder = _cache_folder(cache)
    tokenizer = load_tokenizer(request.tokenizer, request.vocabulary)
    content, documents, text_bytes = _hash_content(request, tokenizer)
    if documents == 0:
        raise DataError(
            "The corpus is empty: no text was found.",
            where=", ".join(request.sources),
            seen="no documents, or only empty ones",
            next_step="name files or folders that hold text",
        )
    dtype = "uint8" if tokenizer.vocabulary <= 1 << 8 else "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32"
    name = f"corpus-{content}.tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = _read_side_file(folder / f"{name}.json")
        if known is None or not _is_complete(folder, known):
            tokens = _write_tokens(request, tokenizer, folder / name, dtype)
            known = PreparedCorpus(
                format=_FORMAT, file=name, dtype=dtype, tokens=tokens, documents=documents, text_bytes=text_bytes,
                vocabulary=tokenizer.vocabulary, digest=content,
            )  # fmt: skip
            _write_aside(folder / f"{name}.json", json.dumps(asdict(known), indent=1).encode())
        _write_aside(folder / _pointer_name(request), json.dumps(asdict(known), indent=1).encode())
    except OSError as error:
        raise DataError(
            "The token file cannot be written.",
            where=str(folder),
            seen=error,
            next_step="give a folder with room that can be written to",
        ) from None
    return known


def open_prepared(
    request: CorpusRequest, *, sequence: int, held_out: float = 0.01, cache: Path | None = None
) -> Corpus:
    """The corpus that `prepare_corpus` made for the same request, memory-mapped. `held_out`: see `cut_rows`.

    Raises DataError if it was not prepared in `cache`, or is too small to cut one row.
    """
    folder = _cache_folder(cache)
    prepared = _read_side_file(folder / _pointer_name(request))
    if prepared is None or not _is_complete(folder, prepared):
        raise DataError(
            "The corpus has not been prepared on this host.",
            where=str(folder),
            seen=", ".join(request.sources),
            next_step="rank 0 of every host must prepare it first, or the cache must be a folder that hosts share",
        )
    tokens = np.memmap(folder / prepared.file, dtype=prepared.dtype, mode="r", shape=(prepared.tokens,))
    rows = cut_rows(prepared.tokens, sequence, held_out, ", ".join(request.sources))
    return Corpus(tokens, rows, prepared, request.tokenizer)


def _cache_folder(cache: Path | None) -> Path:
    if cache is not None:
        return Path(cache)
    import tempfile

    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"pipefit-corpora-{user}"


def _pointer_name(request: CorpusRequest) -> str:
    return f"request-{content_digest(request)}.json"


def _hash_content(request: CorpusRequest, tokenizer: Tokenizer) -> tuple[str, int, int]:
    """(hash of text and tokenizer, number of documents, bytes of text)."""
    state = hashlib.sha256(f"{_FORMAT} {tokenizer.digest}".encode())
    documents = size = 0
    for document in read_documents(request.sources, field=request.field, limit_bytes=request.limit_bytes):
        state.update(len(document.text).to_bytes(8, "little"))
        state.update(document.text)
        documents, size = documents + 1, size + len(document.text)
    return state.hexdigest()[:24], documents, size


def _write_tokens(request: CorpusRequest, tokenizer: Tokenizer, path: Path, dtype: str) -> int:
    """Write all tokens aside, rename, and return their number."""
    aside = path.with_name(f".{path.name}.{os.urandom(16).hex()}")
    count = 0
    try:
        with aside.open("wb") as file:
            for document in read_documents(request.sources, field=request.field, limit_bytes=request.limit_bytes):
                ids = tokenizer.encode(document.text)
                for start in range(0, len(ids), _WRITE_TOKENS):
                    file.write(ids[start : start + _WRITE_TOKENS].astype(dtype).tobytes())
                count += len(ids)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return count


def _write_aside(path: Path, content: bytes) -> None:
    aside = path.with_name(f".{path.name}.{os.urandom(16).hex()}")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _read_side_file(path: Path) -> PreparedCorpus | None:
    """What the side file says; None if it is absent, broken, or of another version (it is then made again)."""
    try:
        prepared = from_data(PreparedCorpus, json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, FormatError):
        return None
    return prepared if prepared.format == _FORMAT and Path(prepared.file).name == prepared.file else None


def _is_complete(folder: Path, prepared: PreparedCorpus) -> bool:
    try:
        return (folder / prepared.file).stat().st_size == prepared.tokens * np.dtype(prepared.dtype).itemsize
    except OSError:
        return False
