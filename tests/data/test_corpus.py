"""The corpus: what was read comes back, the cache is used, renewed and safe with several processes."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from tests.data.test_tokenizer import make_tokenizer

from pipefit.data.corpus import open_corpus, open_prepared, prepare_corpus
from pipefit.data.feed_arrays import IGNORE
from pipefit.data.prepared import CorpusRequest
from pipefit.errors import DataError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(5):
        (folder / f"{index}.txt").write_text(f"document {index}: " + "wörter " * (index * 7))
    return folder


def all_tokens(corpus) -> list[int]:  # type: ignore[no-untyped-def]
    rows = np.concatenate([corpus.row(i) for i in range(corpus.rows.count)])
    return rows[rows != IGNORE].tolist()


def test_the_bytes_of_all_documents_come_back_row_by_row(texts: Path, tmp_path: Path) -> None:
    corpus = open_corpus([str(texts)], sequence=10, cache=tmp_path / "cache")
    whole = b"".join(path.read_bytes() + b"\0" for path in sorted(texts.iterdir()))
    assert bytes(all_tokens(corpus)) == whole[: len(whole) - (len(whole) % 11 == 1)]
    assert (corpus.tokens, corpus.documents, corpus.vocabulary) == (len(whole), 5, 256)
    assert corpus.text_bytes == len(whole) - 5
    row = corpus.row(1)
    assert row.dtype == np.int64 and row.shape == (11,) and bytes(row.tolist()) == whole[11:22]
    assert isinstance(corpus._tokens, np.memmap) and not corpus._tokens.flags.writeable


@pytest.mark.parametrize(("vocabulary", "dtype"), [(400, "uint16"), (70_000, "uint32")])
def test_the_ids_of_a_tokenizer_come_back(texts: Path, tmp_path: Path, vocabulary: int, dtype: str) -> None:
    from tokenizers import Tokenizer

    make_tokenizer(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if vocabulary > library.get_vocab_size():
        library.add_tokens([f"<{i}>" for i in range(vocabulary - library.get_vocab_size())])
        library.save(str(tmp_path / "tokenizer.json"))
    corpus = open_corpus([str(texts)], sequence=8, tokenizer=str(tmp_path), cache=tmp_path / "cache")
    expected: list[int] = []
    for path in sorted(texts.iterdir()):
        expected += [*library.encode(path.read_text()).ids, library.token_to_id("<|endoftext|>")]
    assert all_tokens(corpus) == expected[: len(expected) - (len(expected) % 9 == 1)]
    assert corpus._tokens.dtype == dtype


def test_the_same_content_is_not_tokenised_again_and_other_content_is(texts: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    request = CorpusRequest(sources=(str(texts),))
    first = prepare_corpus(request, cache)
    stamp = (cache / first.file).stat().st_mtime_ns
    assert prepare_corpus(request, cache) == first
    assert (
        prepare_corpus(CorpusRequest(sources=(f"{texts}/*.txt",)), cache) == first
    )  # the same content by another name
    assert (cache / first.file).stat().st_mtime_ns == stamp
    before = open_prepared(request, sequence=8, cache=cache)
    (texts / "0.txt").write_text("something else")
    second = prepare_corpus(request, cache)
    assert second.digest != first.digest
    after = open_prepared(request, sequence=8, cache=cache)
    assert bytes(after.row(0).tolist()) == b"something"
    assert bytes(before.row(0).tolist()) == b"document "  # an open corpus keeps its content
    assert after.digest == second.digest != before.digest


def test_documents_that_join_differently_are_another_corpus(tmp_path: Path) -> None:
    digests = set()
    for name, contents in {"x": ["ab", "c"], "y": ["a", "bc"], "z": ["abc"]}.items():
        (tmp_path / name).mkdir()
        for index, content in enumerate(contents):
            (tmp_path / name / str(index)).write_text(content)
        digests.add(prepare_corpus(CorpusRequest(sources=(str(tmp_path / name),)), tmp_path / "cache").digest)
    assert len(digests) == 3


@pytest.mark.parametrize("damage", ["cut", "removed", "side file cut", "side file of another version"])
def test_a_damaged_cache_is_made_again(texts: Path, tmp_path: Path, damage: str) -> None:
    cache, request = tmp_path / "cache", CorpusRequest(sources=(str(texts),))
    path = cache / prepare_corpus(request, cache).file
    content, side = path.read_bytes(), path.with_name(path.name + ".json")
    pointer = next(cache.glob("request-*.json"))
    if damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "removed":
        path.unlink()
    else:
        for file in (side, pointer):
            text = file.read_text()
            file.write_text(text[:40] if damage == "side file cut" else text.replace('"format": 1', '"format": 99'))
    with pytest.raises(DataError, match="has not been prepared"):
        open_prepared(request, sequence=8, cache=cache)
    prepare_corpus(request, cache)
    assert path.read_bytes() == content
    assert open_prepared(request, sequence=8, cache=cache).tokens == len(content)
    assert not [name for name in os.listdir(cache) if name.startswith(".")]


def _prepare_and_read(folder: str, cache: str) -> tuple[str, bytes]:
    request = CorpusRequest(sources=(folder,))
    prepare_corpus(request, Path(cache))
    corpus = open_prepared(request, sequence=8, cache=Path(cache))
    return corpus.digest, bytes(all_tokens(corpus))


def test_several_processes_may_prepare_at_once(texts: Path, tmp_path: Path) -> None:
    (texts / "large.txt").write_text("x" * 3_000_000)
    cache = tmp_path / "cache"
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        results = pool.starmap_async(_prepare_and_read, [(str(texts), str(cache))] * 3).get(timeout=60)
    assert len(set(results)) == 1
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".json", ".tokens"]


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    for source in (tmp_path, tmp_path / "empty.txt"):
        with pytest.raises(DataError, match="The corpus is empty: no text was found") as caught:
            open_corpus([str(source)], sequence=8, cache=tmp_path / "cache")
        assert str(source) in caught.value.full_text()
    with pytest.raises(DataError, match="The corpus is empty"):
        open_corpus([], sequence=8, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_corpus_of_one_token_is_too_small(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a")
    corpus = open_corpus([str(tmp_path / "x.txt")], sequence=8, cache=tmp_path / "cache")
    assert corpus.rows.count == 1 and corpus.rows.last_labels == 1  # the byte and its separator
    with pytest.raises(DataError, match="none is left to train on"):
        open_corpus([str(tmp_path / "x.txt")], sequence=8, held_out=1, cache=tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="The token file cannot be written") as caught:
        prepare_corpus(CorpusRequest(sources=(str(texts),)), tmp_path / "file" / "cache")
    assert str(tmp_path / "file" / "cache") in caught.value.full_text()


def test_opening_what_was_not_prepared_says_who_must(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has not been prepared on this host") as caught:
        open_prepared(CorpusRequest(sources=(str(texts),)), sequence=8, cache=tmp_path / "cache")
    assert "rank 0 of every host must prepare it first" in caught.value.full_text()


def test_a_failed_preparation_leaves_nothing_behind(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DataError, match="No space left"):
        prepare_corpus(CorpusRequest(sources=(str(texts),)), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
