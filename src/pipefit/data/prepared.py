"""A prepared corpus: its request, its files in the cache folder, and its rows.

The token file is described by a JSON side file of the same name. A second side file, named after the request, says
which token file belongs to a request. Every file is written under a temporary name and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from pipefit.codec import added_later, content_digest, from_data, to_data
from pipefit.data.feed_arrays import IGNORE
from pipefit.data.rows import RowSplit
from pipefit.data.tokenizer import BYTES, END_OF_TEXT, Tokenizer, load_tokenizer
from pipefit.errors import DataError, FormatError

FORMAT = 1
MASK, ENDS = "mask", "ends"
"""Suffixes of the files beside the tokens of chat data: a byte per token, and an entry per conversation."""
ENDS_ITEM_BYTES = 16

LossOn = Literal["answers", "all"]


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
    "The jsonl field or parquet column with the text, or with the messages of chat data."
    limit_bytes: int | None = None
    "Stop after this many bytes of text."
    chat_template: str = added_later("")
    "Chat data: a file with the chat template; empty: the tokenizer's."
    loss_on: LossOn = added_later("answers")  # noqa: RUF009
    "Chat data: the tokens with a label, of answers or all."


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
    chat: bool = added_later(False)
    "Chat data: the files with the suffixes `.mask` and `.ends` belong to it."


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

    def run_notes(self, documents: str) -> tuple[str, ...]:
        """Return lines for the log of a run with this corpus. `documents`: joined or apart, as in the plan."""
        return ()


def cache_folder(cache: Path | None) -> Path:
    """Return `cache`, or the user's folder for temporary files."""
    if cache is not None:
        return Path(cache)
    import tempfile

    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"pipefit-corpora-{user}"


def token_dtype(tokenizer: Tokenizer) -> str:
    """Return the smallest sufficient integer type of the tokenizer's ids."""
    return "uint8" if tokenizer.vocabulary <= 1 << 8 else "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32"


@contextmanager
def renamed_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing; rename it to `path` if the block succeeds, and remove it otherwise."""
    aside = path.with_name(f".{path.name}.{os.urandom(16).hex()}")
    try:
        with aside.open("wb") as file:
            yield file
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def store_corpus(
    request: CorpusRequest, folder: Path, digest: str, write: Callable[[Path], PreparedCorpus]
) -> PreparedCorpus:
    """Call `write` with the path of the token file unless a complete corpus with this digest exists, and write the side
    files.

    Raises DataError if the folder cannot be written.
    """
    name = f"corpus-{digest}.tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = read_side_file(folder / f"{name}.json")
        if known is None or not is_complete(folder, known):
            known = write(folder / name)
            _write_side_file(folder / f"{name}.json", known)
        _write_side_file(folder / _pointer_name(request), known)
    except OSError as error:
        raise DataError(
            "The token file cannot be written.",
            where=str(folder),
            seen=error,
            next_step="give a folder with room that can be written to",
        ) from None
    return known


def find_prepared(request: CorpusRequest, folder: Path) -> PreparedCorpus:
    """Return the corpus that was stored for this request. Raises DataError if it or a file is missing."""
    prepared = read_side_file(folder / _pointer_name(request))
    if prepared is None or not is_complete(folder, prepared):
        raise DataError(
            "The corpus has not been prepared on this host.",
            where=str(folder),
            seen=", ".join(request.sources),
            next_step="rank 0 of every host must prepare it first, or the cache must be a folder that hosts share",
        )
    return prepared


def map_tokens(prepared: PreparedCorpus, folder: Path) -> NDArray[Any]:
    """Return the memory-mapped token ids of a corpus."""
    return np.memmap(folder / prepared.file, dtype=prepared.dtype, mode="r", shape=(prepared.tokens,))


def require_documents(count: int, sources: tuple[str, ...]) -> None:
    """Raise DataError for a corpus without documents."""
    if count == 0:
        raise DataError(
            "The corpus is empty: no text was found.",
            where=", ".join(sources),
            seen="no documents, or only empty ones",
            next_step="name files or folders that hold text",
        )


def _pointer_name(request: CorpusRequest) -> str:
    return f"request-{content_digest(request)}.json"


def _write_side_file(path: Path, prepared: PreparedCorpus) -> None:
    with renamed_file(path) as file:
        file.write(json.dumps(to_data(prepared), indent=1).encode())


def read_side_file(path: Path) -> PreparedCorpus | None:
    """Read a side file. Returns None if it is absent, broken, or of another version; the caller then writes it anew."""
    try:
        prepared = from_data(PreparedCorpus, json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, FormatError):
        return None
    return prepared if prepared.format == FORMAT and Path(prepared.file).name == prepared.file else None


def is_complete(folder: Path, prepared: PreparedCorpus) -> bool:
    """Return whether all files of a corpus exist with their full sizes."""
    sizes = {prepared.file: prepared.tokens * np.dtype(prepared.dtype).itemsize}
    if prepared.chat:
        sizes |= {
            f"{prepared.file}.{MASK}": prepared.tokens,
            f"{prepared.file}.{ENDS}": prepared.documents * ENDS_ITEM_BYTES,
        }
    try:
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return False
