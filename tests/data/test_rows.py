"""Rows: how a corpus is cut, held out and ordered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.data_toys import ArrayCorpus

from pipefit.data.feed_arrays import IGNORE
from pipefit.data.rows import NO_ROW, RowSplit, cut_rows
from pipefit.errors import DataError


@given(tokens=st.integers(2, 500), sequence=st.integers(1, 40))
def test_rows_and_labels_are_those_of_a_naive_packing(tokens: int, sequence: int) -> None:
    corpus = ArrayCorpus(np.arange(tokens), sequence)
    packed = [list(range(i, min(i + sequence + 1, tokens))) for i in range(0, tokens, sequence + 1)]
    packed = [row for row in packed if len(row) >= 2]
    assert corpus.rows.count == len(packed)
    numbers = np.arange(len(packed))
    assert corpus.rows.count_labels(numbers).tolist() == [len(row) - 1 for row in packed]
    for number, row in enumerate(packed):
        got = corpus.row(number)
        assert got[got != IGNORE].tolist() == row
    assert corpus.rows.count_labels(np.array([NO_ROW])).tolist() == [0]


@given(tokens=st.integers(20, 3000), held_out=st.floats(0, 0.9), seed=st.integers(0, 2**32))
def test_an_epoch_has_every_training_row_once_and_no_held_out_row(tokens: int, held_out: float, seed: int) -> None:
    count = -(-tokens // 9) if tokens % 9 != 1 else tokens // 9
    assume(count > 1)
    rows = cut_rows(tokens, 8, held_out)
    kept = rows.held_out_rows(0, rows.held_out).tolist()
    for epoch in range(2):
        places = np.arange(epoch * rows.training_count, (epoch + 1) * rows.training_count)
        order = rows.training_rows(places, seed).tolist()
        assert sorted(order + kept) == list(range(rows.count))


def test_the_order_depends_on_seed_and_epoch_and_the_held_out_rows_do_not() -> None:
    rows = cut_rows(9 * 400, 8, 0.1)
    first, second = (rows.training_rows(np.arange(e * 360, (e + 1) * 360), 1).tolist() for e in range(2))
    other = rows.training_rows(np.arange(360), 2).tolist()
    assert first != second and first != other and sorted(first) == sorted(second) == sorted(other)
    kept = rows.held_out_rows(0, 40)
    assert len(set(kept.tolist())) == 40
    # Spread over the corpus, not its tail: of 40 rows, each quarter has some.
    assert np.bincount(kept // 100, minlength=4).min() > 0


def test_places_are_read_in_any_order_and_across_epochs() -> None:
    rows = cut_rows(9 * 50, 8, 0)
    places = np.array([130, 2, 49, 50, 51, 0])
    together = rows.training_rows(places, 3)
    assert together.tolist() == [int(rows.training_rows(np.array([p]), 3)[0]) for p in places]


def test_held_out_beyond_the_end_is_no_row() -> None:
    rows = cut_rows(9 * 10, 8, 3)
    assert rows.held_out == 3
    assert rows.held_out_rows(2, 5).tolist()[1:] == [NO_ROW, NO_ROW]


@pytest.mark.parametrize(("held_out", "kept"), [(0, 0), (0.25, 25), (0.001, 1), (1, 1), (7, 7), (7.0, 7)])
def test_held_out_is_a_fraction_or_a_count(held_out: float, kept: int) -> None:
    assert cut_rows(900, 8, held_out).held_out == kept


@pytest.mark.parametrize(
    ("tokens", "held_out", "message"),
    [
        (1, 0.0, "too small: a row needs at least two tokens"),
        (0, 0.0, "0 tokens"),
        (90, -0.5, "not a valid number of rows to hold out"),
        (90, 2.5, "a whole number of rows"),
        (90, 10, "none is left to train on"),
    ],
)
def test_a_corpus_that_cannot_be_cut_says_why(tokens: int, held_out: float, message: str) -> None:
    with pytest.raises(DataError, match=message):
        cut_rows(tokens, 8, held_out, "here")


def test_too_small_for_a_batch_names_both_numbers() -> None:
    rows = RowSplit(count=10, sequence=8, last_labels=8, held_out=3)
    rows.require_batch(7)
    with pytest.raises(DataError, match="too small for one batch") as caught:
        rows.require_batch(8, "mine.txt")
    assert "7 training rows of 8 tokens (3 rows are held out)" in caught.value.full_text()
    assert "at least 8 rows" in caught.value.full_text() and "mine.txt" in caught.value.full_text()
