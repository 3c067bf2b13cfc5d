"""Which document a token belongs to: found in the row itself, by every rank alone, cut with the slices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.test_tokenizer import make_tokenizer
from tests.support.data_toys import toy_plan

from pipefit.data.corpus import open_corpus
from pipefit.data.feed_arrays import document_starts, feed_arrays
from pipefit.data.stepplan import step_plan
from pipefit.errors import DataError


@given(st.lists(st.sampled_from([0, 1, 2, -100]), min_size=1, max_size=12))
def test_a_document_ends_with_its_separator(tokens: list[int]) -> None:
    wanted, start = [], 0
    for place, token in enumerate(tokens):
        wanted.append(start)
        if token == 0:
            start = place + 1
    assert document_starts(np.array([tokens]), 0).tolist() == [wanted]
    assert document_starts(np.array([tokens]), None).tolist() == [[0] * len(tokens)]


def texts(folder: Path) -> str:
    for name, text in (("a", "abc"), ("b", "de"), ("c", "fghijklmnop"), ("d", "q")):
        (folder / name).write_text(text)
    return str(folder)


def test_the_feeds_of_a_corpus_hold_them(tmp_path: Path) -> None:
    """`abc0de0fghijklmnop0q0`: rows of 8 tokens (and a label), in slices of 5 and 3."""
    (tmp_path / "texts").mkdir()
    corpus = open_corpus([texts(tmp_path / "texts")], sequence=8, held_out=0, cache=tmp_path / "cache")
    assert corpus.separator == 0
    plan = toy_plan(batch=2, sequence=8, microbatches=1, shares=((1,),), slices=(5, 3))
    plan = replace(plan, job=replace(plan.job, documents="apart"))
    of_step = step_plan(plan, corpus.rows, 0)
    parts = [feed_arrays(corpus, of_step, 0, 0, 0, index) for index in range(2)]
    documents = np.concatenate([part.documents_BT for part in parts], 1).tolist()  # type: ignore[misc]
    by_row = dict(zip(of_step.rows.tolist(), documents, strict=True))
    known = {0: [0, 0, 0, 0, 4, 4, 4, 7], 1: [0] * 8, 2: [0, 1, 1, 3, 3, 3, 3, 3]}
    assert len(by_row) == 2 and all(found == known[row] for row, found in by_row.items())
    assert parts[0].positions_BT[0].tolist() == [0, 1, 2, 3, 4]


def test_joined_documents_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    corpus = open_corpus([texts(tmp_path / "texts")], sequence=8, held_out=0, cache=tmp_path / "cache")
    plan = toy_plan(batch=2, sequence=8, microbatches=1, shares=((1,),))
    assert feed_arrays(corpus, step_plan(plan, corpus.rows, 0), 0, 0, 0).documents_BT is None


def test_a_tokenizer_without_an_end_of_text_separates_nothing(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    source = texts(tmp_path / "texts")
    make_tokenizer(tmp_path / "tokenizer.json", [])
    corpus = open_corpus([source], sequence=4, tokenizer=str(tmp_path), cache=tmp_path / "cache")
    with pytest.raises(DataError, match="the tokens do not mark where one ends") as caught:
        corpus.require_separator()
    assert "<|endoftext|>" in str(caught.value) and "--documents joined" in str(caught.value)
    make_tokenizer(tmp_path / "tokenizer.json", ["</s>"])
    corpus = open_corpus([source], sequence=4, tokenizer=str(tmp_path), cache=tmp_path / "cache")
    corpus.require_separator()
    row = next(row for row in map(corpus.row, range(corpus.rows.count)) if corpus.separator in row.tolist())
    assert document_starts(row[None], corpus.separator).max() > 0
