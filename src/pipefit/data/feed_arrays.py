"""What one device is fed for one action: tokens, labels and positions, cut from the step plan. numpy only.

Labels are the tokens shifted by one over the whole row *before* any slicing, so that the last token of a slice is
asked for the first token of the next. Documents are found in the row's own tokens: one ends with its separator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipefit.data.stepplan import StepPlan

IGNORE = -100
"""The label that the loss leaves out, as PyTorch's cross_entropy does by default."""


class RowReader(Protocol):
    """Anything that gives rows by number: a Corpus, or an array in a test."""

    def row(self, index: int) -> NDArray[np.int64]:
        """(sequence + 1,) token ids; places without a token hold IGNORE."""
        ...

    @property
    def separator(self) -> int | None:
        """The token that ends every document; None where nothing separates them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedArrays:
    """B rows by T tokens of a slice, int64."""

    tokens_BT: NDArray[np.int64]
    "Token ids; 0 where there is none."
    labels_BT: NDArray[np.int64]
    "The next token of each; IGNORE where there is none."
    positions_BT: NDArray[np.int64]
    "Places within the row: slices do not start at 0 again."
    documents_BT: NDArray[np.int64] | None = None
    "Where in its row the document of each token starts; None where documents are joined."
    rows_B: NDArray[np.int64]
    "Positions of the rows within the step's batch: keys for dropout that do not depend on the layout."


def feed_arrays(
    corpus: RowReader, plan: StepPlan, stage: int, microbatch: int, replica: int, slice_: int = 0
) -> FeedArrays:
    """The arrays for F of (stage, microbatch, slice_) on one replica of the stage's group; B may be 0."""
    start, stop = plan.batch_run(stage, microbatch, replica)
    first, last = plan.slice_runs[slice_]
    block = np.full((stop - start, plan.shape.sequence_length + 1), IGNORE, dtype=np.int64)
    for place, row in enumerate(plan.rows[start:stop]):
        if row >= 0:
            block[place] = corpus.row(int(row))
    tokens, labels = block[:, first:last], block[:, first + 1 : last + 1]
    return FeedArrays(
        tokens_BT=np.where(tokens == IGNORE, 0, tokens),
        labels_BT=labels.copy(),
        positions_BT=np.broadcast_to(np.arange(first, last, dtype=np.int64), tokens.shape).copy(),
        documents_BT=document_starts(block, corpus.separator)[:, first:last] if plan.shape.apart else None,
        rows_B=np.arange(start, stop, dtype=np.int64),
    )


def document_starts(tokens_BT: NDArray[np.int64], separator: int | None) -> NDArray[np.int64]:
    """The place in its row where the document of each token starts; a separator is the last token of its document.
    Without a separator every row is one document."""
    starts = np.zeros_like(tokens_BT)
    if separator is not None:
        places = np.arange(1, tokens_BT.shape[1], dtype=np.int64)
        starts[:, 1:] = np.where(tokens_BT[:, :-1] == separator, places, 0)
    return np.maximum.accumulate(starts, axis=1)
