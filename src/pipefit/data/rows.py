"""The rows of a corpus by number: the split into training and held-out rows, and the training order.

A corpus of N tokens is cut into rows of `sequence + 1` tokens. A row gives `sequence` inputs and, shifted by one,
`sequence` labels. The last row may be short. Nothing here reads a token: every rank computes the same numbers from
(count, seed, position) alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipefit.data.permutation import make_key, permute_indices
from pipefit.errors import DataError

NO_ROW = -1
"""The row number of a batch position without a row (in the last batch of an evaluation)."""

_SPLIT_KEY = make_key(0x5EED, 1)
"""Key of the permutation that chooses the held-out rows: the same for every seed, so that runs can be compared."""

_ORDER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSplit:
    """The rows of a corpus as numbers. A row's number is its position in the corpus."""

    count: int
    "All rows, held-out rows included."
    sequence: int
    "Input tokens of a row; it has the same number of labels."
    last_labels: int
    "Labels of the last row, 1 to `sequence`; every other row has `sequence`."
    held_out: int
    "Rows reserved for evaluation, spread over the corpus by a fixed shuffle."

    @property
    def training_count(self) -> int:
        """The number of training rows, which is one epoch."""
        return self.count - self.held_out

    def training_rows(self, places: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Return the rows at these positions of the endless training order (position = step * batch + position in the
        batch).

        Epoch `position // training_count` visits every training row once, in an order that is a function of (seed,
        epoch).
        """
        epochs, offsets = np.divmod(np.asarray(places, dtype=np.int64), self.training_count)
        shuffled = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            shuffled[here] = permute_indices(offsets[here], self.training_count, make_key(seed, int(epoch), _ORDER))
        return permute_indices(shuffled, self.count, _SPLIT_KEY)

    def held_out_rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return held-out rows start to stop in a fixed order; NO_ROW beyond their end."""
        places = np.arange(start, stop, dtype=np.int64)
        rows = np.full(places.shape, NO_ROW, dtype=np.int64)
        inside = places < self.held_out
        rows[inside] = permute_indices(places[inside] + self.training_count, self.count, _SPLIT_KEY)
        return rows

    def count_labels(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of valid labels of each row; 0 for NO_ROW."""
        counts = np.where(rows == self.count - 1, self.last_labels, self.sequence)
        return np.where(rows == NO_ROW, 0, counts).astype(np.int64)

    def require_batch(self, batch: int, where: str = "corpus") -> None:
        """Raise DataError if the training rows do not fill one batch."""
        if self.training_count < batch:
            raise DataError(
                "The corpus is too small for one batch.",
                where=where,
                seen=f"{self.training_count} training rows of {self.sequence} tokens ({self.held_out} rows are "
                "held out)",
                allowed=f"at least {batch} rows, the sequences of one step",
                next_step="give more text, a smaller batch, a shorter sequence, or hold out fewer rows",
            )


def cut_rows(tokens: int, sequence: int, held_out: float, where: str = "corpus") -> RowSplit:
    """Cut a corpus of `tokens` tokens into rows. `held_out` is a fraction below 1, or a number of rows from 1 up.

    A fraction above 0 holds out at least one row if there are two or more. Raises DataError if no label is left for
    training, or if `held_out` is out of range.
    """
    if tokens < 2:
        raise DataError(
            "The corpus is too small: a row needs at least two tokens, one to read and one to predict.",
            where=where,
            seen=f"{tokens} tokens",
            next_step="give more text",
        )
    count, rest = divmod(tokens, sequence + 1)
    last_labels = sequence
    if rest >= 2:
        count, last_labels = count + 1, rest - 1
    held_out_count = count_held_out(count, held_out, where)
    return RowSplit(count=count, sequence=sequence, last_labels=last_labels, held_out=held_out_count)


def count_held_out(count: int, held_out: float, where: str) -> int:
    """Return the number of held-out rows of `count` rows; see `cut_rows`."""
    check_held_out(held_out, "held_out")
    held_out_count = int(held_out) if held_out >= 1 else int(count * held_out)
    if 0 < held_out < 1 and held_out_count == 0 and count > 1:
        held_out_count = 1
    if held_out_count >= count:
        raise DataError(
            "All rows are held out; none is left to train on.",
            where=where,
            seen=f"{held_out_count} of {count} rows",
            next_step="hold out fewer rows, or give more text",
        )
    return held_out_count


def check_held_out(held_out: float, where: str) -> None:
    """Raise DataError unless `held_out` is a fraction of the rows or a whole number of rows."""
    if held_out < 0 or (held_out >= 1 and held_out != int(held_out)):
        raise DataError(
            "This is not a valid number of rows to hold out.",
            where=where,
            seen=held_out,
            allowed="a fraction from 0 up to 1, or a whole number of rows",
        )
