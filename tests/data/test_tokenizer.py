"""Bytes and tokenizer.json files as tokens; a tokenizer that does not fit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipefit.data.tokenizer import load_tokenizer
from pipefit.errors import DataError


def make_tokenizer(path: Path, special: list[str], vocabulary: int = 400) -> None:
    """A byte-level BPE trained on this file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train([__file__], trainer)
    tokenizer.save(str(path))


def test_bytes_are_tokens_and_byte_0_ends_a_document() -> None:
    tokenizer = load_tokenizer("bytes", vocabulary=256)
    assert tokenizer.vocabulary == 256
    assert tokenizer.encode("aü".encode()).tolist() == [97, 0xC3, 0xBC, 0]


@pytest.mark.parametrize("special", [["<|endoftext|>"], ["</s>"], []])
def test_a_tokenizer_file_gives_its_own_ids_and_its_end_of_text(tmp_path: Path, special: list[str]) -> None:
    from tokenizers import Tokenizer

    make_tokenizer(tmp_path / "tokenizer.json", special)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    text = "def test_of('ünïcode'): <|endoftext|>"
    ids = tokenizer.encode(text.encode()).tolist()
    if special:
        assert ids.pop() == library.token_to_id(special[0])
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert library.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.vocabulary == library.get_vocab_size() > max(ids)
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).digest == tokenizer.digest


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer.json", [])
    size = load_tokenizer(str(tmp_path)).vocabulary
    assert load_tokenizer(str(tmp_path), vocabulary=size).vocabulary == size
    with pytest.raises(DataError, match="more tokens than the model's vocabulary") as caught:
        load_tokenizer(str(tmp_path), vocabulary=size - 1)
    assert f"{size} tokens for a vocabulary of {size - 1}" in caught.value.full_text()
    with pytest.raises(DataError, match="256 tokens for a vocabulary of 128"):
        load_tokenizer("bytes", vocabulary=128)


@pytest.mark.parametrize("content", [None, b"{}", b"not json", b"\xff\xfe"])
def test_an_unreadable_tokenizer_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="The tokenizer cannot be read") as caught:
        load_tokenizer(str(path))
    assert str(path) in caught.value.full_text() and "a tokenizer.json" in caught.value.full_text()


def test_without_the_library_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="needs the tokenizers library"):
        load_tokenizer(str(tmp_path))
