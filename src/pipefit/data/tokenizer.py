"""Convert text to token ids: raw bytes, or any local `tokenizer.json` of the Hugging Face tokenizers library.

Documents are separated by a separator token. For bytes it is the byte 0, which does not occur in text. For a tokenizer
it is the first of its known end-of-text tokens; a tokenizer without one has no separator.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import DataError
from pipefit.extras import install_command

BYTES = "bytes"
BYTE_VOCABULARY = 256
BYTE_SEPARATOR = 0

END_OF_TEXT = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>", "[SEP]", "[EOS]",
)  # fmt: skip
"""End-of-document tokens of published tokenizers, in search order."""


class Tokenizer(Protocol):
    """Converts documents to token ids."""

    @property
    def vocabulary(self) -> int:
        """Upper bound of the ids (exclusive)."""
        ...

    @property
    def digest(self) -> str:
        """A hash that changes if the resulting ids may change."""
        ...

    @property
    def separator(self) -> int | None:
        """The id that ends every document; None if documents are not separated."""
        ...

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts of special tokens, such as ends of turns."""
        ...

    def encode(self, text: bytes) -> NDArray[np.int64]:
        """Return the ids of one document, followed by the separator if there is one."""
        ...

    def encode_offsets(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of a text without a separator, and (tokens, 2) offsets: first character and end of each."""
        ...


class ByteTokenizer:
    """Every byte is a token: 256 tokens, byte 0 separates documents."""

    vocabulary = BYTE_VOCABULARY
    digest = "bytes-0"
    separator = BYTE_SEPARATOR
    special_tokens = ()

    def encode(self, text: bytes) -> NDArray[np.int64]:
        return np.frombuffer(text + bytes([BYTE_SEPARATOR]), dtype=np.uint8).astype(np.int64)

    def encode_offsets(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        starts = np.repeat(np.arange(len(text), dtype=np.int64), [len(character.encode()) for character in text])
        return ids, np.stack([starts, starts + 1], axis=1)


class FileTokenizer:
    """A `tokenizer.json`. Ids are unchanged; only the separator is added."""

    def __init__(self, path: Path) -> None:
        """Raises DataError if the tokenizers library is missing or the file is not a tokenizer."""
        try:
            import tokenizers
        except ImportError:
            raise DataError(
                "Reading a tokenizer needs the tokenizers library, which is not installed.",
                where=str(path),
                next_step=f"{install_command('tokenizers')}, or use the bytes of the text as tokens",
            ) from None
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _unreadable_error(path, error) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise _unreadable_error(path, error) from None
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values(), default=-1) + 1
        self.digest = hashlib.sha256(content).hexdigest()[:16]
        self.separator: int | None = next((ids[name] for name in END_OF_TEXT if name in ids), None)
        self.special_tokens = tuple(
            token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special
        )

    def encode(self, text: bytes) -> NDArray[np.int64]:
        ids = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids
        return np.asarray([*ids, *([] if self.separator is None else [self.separator])], dtype=np.int64)

    def encode_offsets(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int64), np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)


def load_tokenizer(name: str, vocabulary: int | None = None) -> Tokenizer:
    """Load the byte tokenizer (`bytes`), a `tokenizer.json`, or the one in a folder.

    Raises DataError if it cannot be read, or if it has more tokens than `vocabulary`, the model's vocabulary size.
    """
    tokenizer: Tokenizer
    if name == BYTES:
        tokenizer = ByteTokenizer()
    else:
        path = Path(name).expanduser()
        tokenizer = FileTokenizer(path / "tokenizer.json" if path.is_dir() else path)
    if vocabulary is not None and tokenizer.vocabulary > vocabulary:
        raise DataError(
            "The tokenizer has more tokens than the model's vocabulary.",
            where=name,
            seen=f"{tokenizer.vocabulary} tokens for a vocabulary of {vocabulary}",
            next_step="use the model's own tokenizer, or a model with a larger vocabulary",
        )
    return tokenizer


def _unreadable_error(path: Path, error: Exception) -> DataError:
    return DataError(
        "The tokenizer cannot be read.",
        where=str(path),
        seen=error,
        allowed=f"{BYTES!r}, a tokenizer.json, or a folder that holds one",
    )
