"""A corpus: the token ids of all documents, concatenated in a memory-mapped file and read row by row.

`prepare_corpus` tokenises once. It writes the token file under a temporary name and renames it to a hash of the
content, so several processes may prepare the same corpus at once. `open_prepared` only reads. A single process calls
`open_corpus`, which does both. With many processes, rank 0 of every host calls `prepare_corpus`, all ranks meet at a
barrier, and all call `open_prepared`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipefit.data.chat.corpus import open_chat, prepare_chat
from pipefit.data.chat.messages import find_chat_field
from pipefit.data.prepared import (
    FORMAT,
    Corpus,
    CorpusRequest,
    PreparedCorpus,
    cache_folder,
    find_prepared,
    map_tokens,
    renamed_file,
    require_documents,
    store_corpus,
    token_dtype,
)
from pipefit.data.rows import cut_rows
from pipefit.data.sources import read_documents
from pipefit.data.tokenizer import Tokenizer, load_tokenizer

_WRITE_TOKENS = 1 << 20


def open_corpus(
    sources: Sequence[str], *, sequence: int, held_out: float = 0.01, cache: Path | None = None, **options: Any
) -> Corpus:
    """Prepare and open a corpus in one process. `options` are further fields of CorpusRequest.

    See CorpusRequest, `prepare_corpus` and `open_prepared` for arguments and errors.
    """
    request = CorpusRequest(sources=tuple(sources), **options)
    prepare_corpus(request, cache)
    return open_prepared(request, sequence=sequence, held_out=held_out, cache=cache)


def prepare_corpus(request: CorpusRequest, cache: Path | None = None) -> PreparedCorpus:
    """Write the token file into `cache` (default: a folder for temporary files), unless the same content exists there.

    Raises DataError if the sources contain no text or cannot be read, or if `cache` cannot be written.
    """
    folder = cache_folder(cache)
    tokenizer = load_tokenizer(request.tokenizer, request.vocabulary)
    chat_field = find_chat_field(request.sources, request.field)
    if chat_field is not None:
        return prepare_chat(request, chat_field, tokenizer, folder)
    content, documents, text_bytes = _hash_content(request, tokenizer)
    require_documents(documents, request.sources)

    def write_corpus(path: Path) -> PreparedCorpus:
        dtype = token_dtype(tokenizer)
        tokens = _write_tokens(request, tokenizer, path, dtype)
        return PreparedCorpus(
            format=FORMAT, file=path.name, dtype=dtype, tokens=tokens, documents=documents, text_bytes=text_bytes,
            vocabulary=tokenizer.vocabulary, digest=content,
        )  # fmt: skip

    return store_corpus(request, folder, content, write_corpus)


def open_prepared(
    request: CorpusRequest, *, sequence: int, held_out: float = 0.01, cache: Path | None = None
) -> Corpus:
    """Open the corpus that `prepare_corpus` wrote for the same request, memory-mapped. `held_out`: see `cut_rows`.

    Raises DataError if it was not prepared in `cache`, or is too small for one row.
    """
    folder = cache_folder(cache)
    prepared = find_prepared(request, folder)
    if prepared.chat:
        return open_chat(request, prepared, folder, sequence, held_out)
    rows = cut_rows(prepared.tokens, sequence, held_out, ", ".join(request.sources))
    return Corpus(map_tokens(prepared, folder), rows, prepared, request.tokenizer)


def _hash_content(request: CorpusRequest, tokenizer: Tokenizer) -> tuple[str, int, int]:
    """Return (hash of text and tokenizer, number of documents, bytes of text)."""
    state = hashlib.sha256(f"{FORMAT} {tokenizer.digest}".encode())
    documents = size = 0
    for document in read_documents(request.sources, field=request.field, limit_bytes=request.limit_bytes):
        state.update(len(document.text).to_bytes(8, "little"))
        state.update(document.text)
        documents, size = documents + 1, size + len(document.text)
    return state.hexdigest()[:24], documents, size


def _write_tokens(request: CorpusRequest, tokenizer: Tokenizer, path: Path, dtype: str) -> int:
    """Write all tokens and return their number."""
    count = 0
    with renamed_file(path) as file:
        for document in read_documents(request.sources, field=request.field, limit_bytes=request.limit_bytes):
            ids = tokenizer.encode(document.text)
            for start in range(0, len(ids), _WRITE_TOKENS):
                file.write(ids[start : start + _WRITE_TOKENS].astype(dtype).tobytes())
            count += len(ids)
    return count
