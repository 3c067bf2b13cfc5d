"""A corpus of conversations: whole in their rows, with labels on answers, kept apart, cached, and refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.chat_toys import (
    CHATML,
    CHATML_MARKED,
    CONVERSATIONS,
    turns,
    write_chat,
    write_rows,
    write_tokenizer,
)
from tests.support.data_toys import toy_plan

from pipefit.data.chat.corpus import ChatCorpus
from pipefit.data.corpus import open_corpus, open_prepared, prepare_corpus
from pipefit.data.feed_arrays import IGNORE, feed_arrays
from pipefit.data.prepared import Corpus, CorpusRequest
from pipefit.data.stepplan import evaluation_batches, evaluation_plan, step_plan
from pipefit.errors import DataError

SHORT = [turns(f"question {n}", "answer " * (1 + n % 5)) for n in range(23)]


def open_chat(tmp_path: Path, conversations: list[list[dict[str, Any]]], sequence: int, **options: Any) -> Corpus:
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML_MARKED)
    source = write_chat(tmp_path / "chat.jsonl", conversations)
    chosen: dict[str, Any] = {"held_out": 0, **options}
    return open_corpus([str(source)], sequence=sequence, tokenizer=folder, cache=tmp_path / "cache", **chosen)


def expected_tokens(tmp_path: Path, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """(ids, labels of the same positions) by transformers."""
    transformers = pytest.importorskip("transformers")
    library = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
    output = library.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = output["input_ids"], output["assistant_masks"]
    return ids, [token if label else IGNORE for token, label in zip(ids, mask, strict=True)]


def step_arrays(corpus: Corpus, sequence: int, documents: Any = "apart", slices: Any = None) -> tuple[Any, Any]:
    """(step plan, arrays by slice) of one step with all rows."""
    plan = toy_plan(batch=corpus.rows.count, sequence=sequence, microbatches=1, shares=((1,),), slices=slices)
    plan = replace(plan, job=replace(plan.job, documents=documents))
    step = step_plan(plan, corpus.rows, 0)
    return step, [feed_arrays(corpus, step, 0, 0, 0, index) for index in range(len(step.slice_runs))]


@pytest.mark.parametrize("slices", [None, (100, 30)])
def test_every_conversation_lies_whole_in_a_row_with_its_labels(tmp_path: Path, slices: Any) -> None:
    corpus = open_chat(tmp_path, SHORT, 130)
    step, parts = step_arrays(corpus, 130, slices=slices)
    tokens, labels, starts, positions = (
        np.concatenate([getattr(part, name) for part in parts], axis=1)
        for name in ("tokens_BT", "labels_BT", "documents_BT", "positions_BT")
    )
    rest = [expected_tokens(tmp_path, messages) for messages in SHORT]
    for row in range(len(tokens)):
        firsts = [*np.flatnonzero(starts[row] == np.arange(130)), 130]
        for first, stop in pairwise(firsts):
            ids, shifted = tokens[row, first:stop].tolist(), labels[row, first:stop].tolist()
            # The last token of a conversation is read only if further tokens follow in the row.
            match = next((pair for pair in rest if pair[0][: len(ids)] == ids and len(pair[0]) - len(ids) < 2), None)
            if match is None:
                assert stop == 130 and not any(ids) and set(shifted) == {IGNORE}, "the fill at the end"
                continue
            rest.remove(match)
            assert shifted[: len(match[0]) - 1] == match[1][1:] and shifted[len(match[0]) - 1 :] in ([], [IGNORE])
        assert positions[row].tolist() == list(range(130))
    assert not rest
    valid = sum(label != IGNORE for messages in SHORT for label in expected_tokens(tmp_path, messages)[1])
    assert step.divisor == (labels != IGNORE).sum() == valid > 0
    assert corpus.rows.count_labels(step.rows).tolist() == (labels != IGNORE).sum(axis=1).tolist()


def test_joined_documents_have_the_same_labels(tmp_path: Path) -> None:
    corpus = open_chat(tmp_path, SHORT, 130)
    apart, joined = (step_arrays(corpus, 130, documents)[1][0] for documents in ("apart", "joined"))
    assert joined.documents_BT is None and np.array_equal(joined.labels_BT, apart.labels_BT)
    assert [word in corpus.run_notes("joined")[-1] for word in ("--documents apart", "crosses")] == [True, True]
    assert len(corpus.run_notes("apart")) == 1 and "23 conversations" in corpus.run_notes("apart")[0]
    corpus.require_separator()
    assert corpus.separator is None and isinstance(corpus, ChatCorpus) and corpus.documents == 23


def test_a_long_conversation_is_cut_and_keeps_every_label(tmp_path: Path) -> None:
    messages = [*SHORT[:3], turns("long", "word " * 60, "again", "x" * 50), turns("no answer"), turns("q" * 90, "a")]
    corpus = open_chat(tmp_path, messages, 40)
    _, (arrays,) = step_arrays(corpus, 40)
    labels = [label for m in messages for label in expected_tokens(tmp_path, m)[1] if label != IGNORE]
    assert sorted(arrays.labels_BT[arrays.labels_BT != IGNORE].tolist()) == sorted(labels)
    notes = "\n".join(corpus.run_notes("apart"))
    too_long = sum(len(expected_tokens(tmp_path, m)[0]) > 41 for m in messages)
    assert f"conversations longer than 40 tokens, cut into parts: {too_long}" in notes and 2 <= too_long < 6
    assert "conversations without an answer, left out: 1" in notes
    assert (corpus.rows.count_labels(np.arange(corpus.rows.count)) > 0).all(), "no row without a label"


def test_all_tokens_but_the_first_of_each_conversation_may_be_labels(tmp_path: Path) -> None:
    corpus = open_chat(tmp_path, SHORT, 130, loss_on="all")
    step, (arrays,) = step_arrays(corpus, 130)
    lengths = [len(expected_tokens(tmp_path, messages)[0]) for messages in SHORT]
    assert step.divisor == sum(lengths) - len(SHORT) == (arrays.labels_BT != IGNORE).sum()


def test_an_evaluation_counts_the_labels_of_held_out_rows(tmp_path: Path) -> None:
    corpus = open_chat(tmp_path, SHORT, 130, held_out=3)
    plan = toy_plan(batch=2, sequence=130, microbatches=1, shares=((1,),))
    batches = [evaluation_plan(plan, corpus.rows, index) for index in range(evaluation_batches(plan, corpus.rows))]
    labels = [int((feed_arrays(corpus, batch, 0, 0, 0).labels_BT != IGNORE).sum()) for batch in batches]
    assert [batch.divisor for batch in batches] == labels and len(labels) == 2
    held_out, everything = corpus.rows.held_out_rows(0, 3), np.arange(corpus.rows.count)
    assert sum(labels) == corpus.rows.count_labels(held_out).sum() < corpus.rows.count_labels(everything).sum()


def test_completions_need_no_template(tmp_path: Path) -> None:
    source = write_rows(
        tmp_path / "x.jsonl", [{"prompt": "ab", "completion": "cd"}, {"prompt": "e", "completion": "f"}]
    )
    corpus = open_corpus([str(source)], sequence=7, held_out=0, cache=tmp_path / "cache")
    assert corpus.rows.count == 1 and bytes(corpus.row(0).tolist()) == b"abcd\0ef\0"
    _, (arrays,) = step_arrays(corpus, 7)
    assert arrays.labels_BT.tolist() == [[IGNORE, ord("c"), ord("d"), 0, IGNORE, ord("f"), 0]]
    assert arrays.documents_BT.tolist() == [[0, 0, 0, 0, 0, 5, 5]]


def test_the_cache_holds_a_corpus_by_rows_template_and_labels(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML)
    (tmp_path / "mine.jinja").write_text(CHATML_MARKED)
    source, cache = write_chat(tmp_path / "chat.jsonl"), tmp_path / "cache"
    request = CorpusRequest(sources=(str(source),), tokenizer=folder)
    first = prepare_corpus(request, cache)
    stamp = (cache / first.file).stat().st_mtime_ns
    assert prepare_corpus(replace(request, field="messages"), cache) == first
    assert (cache / first.file).stat().st_mtime_ns == stamp
    others = [replace(request, loss_on="all"), replace(request, chat_template=str(tmp_path / "mine.jinja"))]
    digests = {first.digest, *(prepare_corpus(other, cache).digest for other in others)}
    write_tokenizer(tmp_path / "tokenizer", CHATML, eos_token="<|eot|>")
    digests.add(prepare_corpus(request, cache).digest)
    write_chat(source, CONVERSATIONS[:-1])
    digests.add(prepare_corpus(request, cache).digest)
    assert len(digests) == 5
    assert not [path.name for path in cache.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("damage", ["mask", "ends"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: str) -> None:
    folder, source = write_tokenizer(tmp_path / "tokenizer"), write_chat(tmp_path / "chat.jsonl")
    request, cache = CorpusRequest(sources=(str(source),), tokenizer=folder), tmp_path / "cache"
    path = cache / f"{prepare_corpus(request, cache).file}.{damage}"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match="has not been prepared"):
        open_prepared(request, sequence=40, cache=cache)
    prepare_corpus(request, cache)
    assert path.read_bytes() == content and open_prepared(request, sequence=40, cache=cache).documents == 4


def test_plain_text_keeps_its_files(tmp_path: Path) -> None:
    """Names and contents of before there was chat data: resumed runs compare digests."""
    for name, text in (("a.txt", "eins zwei"), ("b.txt", "drei\n")):
        (tmp_path / name).write_text(text)
    prepared = prepare_corpus(CorpusRequest(sources=(f"{tmp_path}/*.txt",)), tmp_path / "cache")
    assert prepared.file == "corpus-aec38419098081fdd4dac2f8.tokens"
    side = json.loads((tmp_path / "cache" / f"{prepared.file}.json").read_text())
    assert list(side) == ["format", "file", "dtype", "tokens", "documents", "text_bytes", "vocabulary", "digest"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"messages": turns("a")}], ("No conversation has an answer", "1 rows without", "--loss-on all")),
        ([{"messages": turns("a", "b")}, {"text": "x"}], ("no field 'messages'", "line 2")),
        ([{"messages": turns("a", "b", "b", "raise")}], ("refuses this conversation", "line 1", "not this")),
        ([{"messages": [{"role": "assistant", "content": "b", "hidden": True}]}], ("answers without a token",)),
    ],
)
def test_a_corpus_that_cannot_be_made_leaves_nothing(tmp_path: Path, rows: list[Any], words: tuple[str, ...]) -> None:
    raises = "{% if messages[-1].content == 'raise' %}{{ raise_exception('not this') }}{% endif %}"
    shown = "{% generation %}{% if not m.hidden %}b{% endif %}{% endgeneration %}"
    hides = "{% for m in messages %}{{ m.role }}" + shown + "{% endfor %}"
    folder = write_tokenizer(tmp_path / "tokenizer", raises + hides)
    source = write_rows(tmp_path / "x.jsonl", rows)
    with pytest.raises(DataError) as caught:
        open_corpus([str(source)], sequence=8, tokenizer=folder, cache=tmp_path / "cache")
    assert all(word in caught.value.full_text() for word in (*words, str(source))), caught.value.full_text()
    assert not [*(tmp_path / "cache").glob("*")]


def test_an_empty_file_and_the_bytes_tokenizer_are_refused(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "x.jsonl", [])
    for field in ("text", "messages"):
        with pytest.raises(DataError, match="The corpus is empty"):
            open_corpus([str(source)], sequence=8, field=field, cache=tmp_path / "cache")
    write_chat(source)
    with pytest.raises(DataError, match="Chat data need a tokenizer"):
        open_corpus([str(source)], sequence=8, cache=tmp_path / "cache")
    with pytest.raises(DataError, match="All rows are held out"):
        folder = write_tokenizer(tmp_path / "tokenizer")
        open_corpus([str(source)], sequence=500, tokenizer=folder, held_out=1, cache=tmp_path / "cache")
