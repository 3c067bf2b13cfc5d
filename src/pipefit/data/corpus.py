"""A corpus: the token ids of all documents, concatenated in a memory-mapped file and read row by row.

`prepare_corpus` tokenises once. It writes the token file under a temporary name and renames it to a hash of the
content, so several processes may prepare the same corpus at once. `open_prepared` only reads. A single process calls
`open_corpus`, which does both. With many processes, rank 0 of every host calls `prepare_corpus`, all ranks meet at a
barrier, and all call `open_prepared`.
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
    """The text sources of a corpus and the tokenizer. The order of `sources` is the order of the text."""

    sources: tuple[str, ...]
    "Files, folders, glob patterns, or `stdlib`."
    tokenizer: str = BYTES
    "`bytes`, a tokenizer.json, or a folder that contains one."
    vocabulary: int | None = None
    "The model's vocabulary size; a tokenizer with more tokens is refused."
    field: str = "text"
    "The jsonl field or parquet column with the text."
    limit_bytes: int | None = None
    "Stop after this many bytes of text."


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCorpus:
    """A token file, as described by its JSON side file."""

    format: int
    file: str
    "Name of the token file, in the folder of the JSON file."
    dtype: str
    tokens: int
    documents: int
    text_bytes: int
    vocabulary: int
    digest: str
    "Hash of the text and the tokenizer: equal corpora have equal digests."


class Corpus:
    """The rows of a prepared corpus; `pipefit.data.rows` defines how a corpus is cut into rows."""

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
        """The number of tokens, separators included."""
        return len(self._tokens)

    @cached_property
    def separator(self) -> int | None:
        """The token that ends every document, from the tokenizer; None if documents are not separated.

        Raises DataError if the tokenizer cannot be read.
        """
        return load_tokenizer(self._tokenizer).separator

    def require_separator(self) -> None:
        """Raise DataError if the corpus has no separator, so that document boundaries are unknown."""
        if self.separator is None:
            raise DataError(
                "The documents cannot be kept apart: the tokens do not mark where one ends.",
                where=self._tokenizer,
                seen="a tokenizer without an end-of-text token",
                allowed=", ".join(END_OF_TEXT),
                next_step="use a tokenizer with one of these tokens, or plan with --documents joined",
            )

    def row(self, index: int) -> NDArray[np.int64]:
        """Return (sequence + 1,) token ids, filled with IGNORE (-100) beyond the end of the corpus."""
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
    """Prepare and open a corpus in one process.

    See CorpusRequest, `prepare_corpus` and `open_prepared` for arguments and errors.
    """
    request = CorpusRequest(
        sources=tuple(sources), tokenizer=tokenizer, vocabulary=vocabulary, field=field, limit_bytes=limit_bytes
    )
    prepare_corpus(request, cache)
    return open_prepared(request, sequence=sequence, held_out=held_out, cache=cache)


def prepare_corpus(request: CorpusRequest, cache: Path | None = None) -> PreparedCorpus:
    """Write the token file into `cache` (default: a folder for temporary files), unless the same content exists there.

    Raises DataError if the sources contain no text or cannot be read, or if `cache` cannot be written.
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
    """Open the corpus that `prepare_corpus` wrote for the same request, memory-mapped. `held_out`: see `cut_rows`.

    Raises DataError if it was not prepared in `cache`, or is too small for one row.
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
    """Return (hash of text and tokenizer, number of documents, bytes of text)."""
    state = hashlib.sha256(f"{_FORMAT} {tokenizer.digest}".encode())
    documents = size = 0
    for document in read_documents(request.sources, field=request.field, limit_bytes=request.limit_bytes):
        state.update(len(document.text).to_bytes(8, "little"))
        state.update(document.text)
        documents, size = documents + 1, size + len(document.text)
    return state.hexdigest()[:24], documents, size


def _write_tokens(request: CorpusRequest, tokenizer: Tokenizer, path: Path, dtype: str) -> int:
    """Write all tokens to a temporary file, rename it, and return the number of tokens."""
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
    """Read a side file. Returns None if it is absent, broken, or of another version; the caller then writes it anew."""
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
