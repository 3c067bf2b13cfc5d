"""The input arrays of one action on one device: tokens, labels and positions, cut from the step plan. numpy only.

Labels are the tokens shifted by one over the whole row *before* slicing, so the label of a slice's last token is the
first token of the next slice. Document boundaries are read from the row's tokens: a document ends with its separator.
Rows of conversations carry marks instead, which say the first token of a document and the tokens that count as labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pipefit.data.stepplan import StepPlan
from pipefit.layout import Run

IGNORE = -100
"""The label that the loss ignores, PyTorch's default `ignore_index` of cross_entropy."""

LEARNED, STARTS = 1, 2
"""Bits of a mark: the token is a label where it comes next; the token is the first of its document."""


class RowReader(Protocol):
    """A source of rows by number: a Corpus, or an array in a test."""

    def row(self, index: int) -> NDArray[np.int64]:
        """Return (sequence + 1,) token ids; positions without a token hold IGNORE."""
        ...

    @property
    def separator(self) -> int | None:
        """The token that ends every document; None if documents are not separated."""
        ...


@runtime_checkable
class RowMarks(Protocol):
    """The marks of a source of rows, for chat data."""

    def row_marks(self, index: int) -> NDArray[np.uint8]:
        """Return (sequence + 1,) marks of the row's tokens: sums of LEARNED and STARTS."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedArrays:
    """Arrays of B rows by T tokens of a slice, int64."""

    tokens_BT: NDArray[np.int64]
    "Token ids; 0 at positions without a token."
    labels_BT: NDArray[np.int64]
    "The next token of each token; IGNORE if there is none, or if it does not count."
    positions_BT: NDArray[np.int64]
    "Positions within the row; they do not restart at 0 in each slice."
    documents_BT: NDArray[np.int64] | None = None
    "Position in the row at which each token's document starts; None if documents are joined."
    rows_B: NDArray[np.int64]
    "Positions of the rows within the step's batch: keys for dropout that do not depend on the layout."

    def take_tokens(self, runs: Sequence[Run]) -> FeedArrays:
        """Return the arrays of these runs of tokens, one after another. Documents must be joined."""
        assert self.documents_BT is None, "documents are kept apart in complete sequences only"
        tokens_BT, labels_BT, positions_BT = (
            np.concatenate([array[:, start:stop] for start, stop in runs], axis=1)
            for array in (self.tokens_BT, self.labels_BT, self.positions_BT)
        )
        return replace(self, tokens_BT=tokens_BT, labels_BT=labels_BT, positions_BT=positions_BT)


def feed_arrays(
    corpus: RowReader,
    plan: StepPlan,
    stage: int,
    microbatch: int,
    replica: int,
    slice_: int = 0,
    part: tuple[int, int] = (0, 1),
) -> FeedArrays:
    """Return the arrays for F of (stage, microbatch, slice_) on one replica of the stage's mesh; B may be 0. `part`:
    (position, size) of an expert axis that divides the rows."""
    start, stop = take_part(plan.batch_run(stage, microbatch, replica), *part)
    first, last = plan.slice_runs[slice_]
    block = np.full((stop - start, plan.shape.sequence_length + 1), IGNORE, dtype=np.int64)
    marks = np.full(block.shape, LEARNED, dtype=np.uint8)
    reader = corpus if isinstance(corpus, RowMarks) else None
    for index, row in enumerate(plan.rows[start:stop]):
        if row >= 0:
            block[index] = corpus.row(int(row))
            if reader is not None:
                marks[index] = reader.row_marks(int(row))
    documents = None
    if plan.shape.apart:
        starts = document_starts(block, corpus.separator) if reader is None else starts_of((marks & STARTS) > 0)
        documents = starts[:, first:last]
    tokens = block[:, first:last]
    labels = np.where(marks & LEARNED, block, IGNORE)[:, first + 1 : last + 1]
    return FeedArrays(
        tokens_BT=np.where(tokens == IGNORE, 0, tokens),
        labels_BT=labels,
        positions_BT=np.broadcast_to(np.arange(first, last, dtype=np.int64), tokens.shape).copy(),
        documents_BT=documents,
        rows_B=np.arange(start, stop, dtype=np.int64),
    )


def take_part(run: Run, position: int, parts: int) -> Run:
    """Return one of the equal parts of a run of rows."""
    start, size = run[0], (run[1] - run[0]) // parts
    return start + position * size, start + (position + 1) * size


def document_starts(tokens_BT: NDArray[np.int64], separator: int | None) -> NDArray[np.int64]:
    """Return the position in its row at which each token's document starts; a separator is the last token of its
    document.

    Without a separator every row is one document.
    """
    first_BT = np.zeros(tokens_BT.shape, dtype=np.bool_)
    if separator is not None:
        first_BT[:, 1:] = tokens_BT[:, :-1] == separator
    return starts_of(first_BT)


def starts_of(first_BT: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the position in its row at which each token's document starts. `first_BT`: first tokens of documents."""
    places = np.arange(first_BT.shape[1], dtype=np.int64)
    return np.maximum.accumulate(np.where(first_BT, places, 0), axis=1)
