"""The rows of a corpus by number: which are for training, which are held out, and in which order they come.

A corpus of N tokens is cut into rows of `sequence + 1` tokens; a row gives `sequence` inputs and, shifted by one,
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
"""The row number of a place in a batch that no row fills (the last batch of an evaluation)."""

_SPLIT_KEY = make_key(0x5EED, 1)
"""Key of the permutation that chooses the held-out rows: the same for every seed, so that runs can be compared."""

_ORDER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSplit:
    """The rows of a corpus as numbers. A row's number is its place in the corpus."""

    count: int
    "All rows, the held-out ones among them."
    sequence: int
    "Input tokens of a row, as many as its labels."
    last_labels: int
    "Labels of the last row, 1 to `sequence`; every other row has `sequence`."
    held_out: int
    "Rows kept for evaluation, spread over the corpus by a fixed shuffle."

    @property
    def training_count(self) -> int:
        """How many rows an epoch has."""
        return self.count - self.held_out

    def training_rows(self, places: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """The rows at these places of the endless training order (place = step * batch + position in the batch).

        Epoch `place // training` visits every training row once, in an order that is a function of (seed, epoch).
        """
        epochs, offsets = np.divmod(np.asarray(places, dtype=np.int64), self.training_count)
        shuffled = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            shuffled[here] = permute_indices(offsets[here], self.training_count, make_key(seed, int(epoch), _ORDER))
        return permute_indices(shuffled, self.count, _SPLIT_KEY)

    def held_out_rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Rows start to stop of the held-out ones, in a fixed order; NO_ROW beyond their end."""
        places = np.arange(start, stop, dtype=np.int64)
        rows = np.full(places.shape, NO_ROW, dtype=np.int64)
        inside = places < self.held_out
        rows[inside] = permute_indices(places[inside] + self.training_count, self.count, _SPLIT_KEY)
        return rows

    def count_labels(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of valid labels of each row; 0 for NO_ROW."""
        counts = np.where(rows == self.count - 1, self.last_labels, self.sequence)
        return np.where(rows == NO_ROW, 0, counts).astype(np.int64)

    def require_batch(self, batch: int, where: str = "corpus") -> None:
        """Raises DataError if the training rows do not fill one batch."""
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
    """The rows of a corpus of `tokens` tokens. `held_out`: a fraction below 1, or a count of rows from 1 up.

    A fraction above 0 holds out at least one row where there are two. Raises DataError if not one label is left to
    train on, or if `held_out` is out of range.
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
    check_held_out(held_out, "held_out")
    kept = int(held_out) if held_out >= 1 else int(count * held_out)
    if 0 < held_out < 1 and kept == 0 and count > 1:
        kept = 1
    if kept >= count:
        raise DataError(
            "So many rows are held out that none is left to train on.",
            where=where,
            seen=f"{kept} of {count} rows",
            next_step="hold out fewer rows, or give more text",
        )
    return RowSplit(count=count, sequence=sequence, last_labels=last_labels, held_out=kept)


def check_held_out(held_out: float, where: str) -> None:
    """Raises DataError unless it is a fraction of the rows, or a number of them."""
    if held_out < 0 or (held_out >= 1 and held_out != int(held_out)):
        raise DataError(
            "This is no part of the rows to hold out.",
            where=where,
            seen=held_out,
            allowed="a fraction from 0 up to 1, or a whole number of rows",
        )
