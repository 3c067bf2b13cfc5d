"""Pack conversations into rows: best fit, the longest first.

A row holds `sequence + 1` tokens, of which the first is only read. A conversation that fits is never cut. A longer one
is cut into parts that overlap by one token, so each of its labels is learned once. The packing is a function of the
lengths and the sequence alone, and equal on all ranks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipefit.data.rows import NO_ROW, RowSplit

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConversationRows(RowSplit):
    """Rows of whole conversations, each with its number of labels."""

    label_counts: Ints
    "(count,) labels of every row."

    def count_labels(self, rows: Ints) -> Ints:
        """See `RowSplit.count_labels`."""
        return np.where(rows == NO_ROW, 0, self.label_counts[np.maximum(rows, 0)]).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedParts:
    """The parts of conversations by row: row r holds the parts `first[r]` to `first[r + 1]`."""

    starts: Ints
    "(parts,) first token of every part, in the corpus."
    stops: Ints
    labels: Ints
    "(parts,) labels of every part."
    first: Ints
    "(rows + 1,)"

    def row_parts(self, row: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the parts of a row."""
        chosen = slice(self.first[row], self.first[row + 1])
        return list(zip(self.starts[chosen].tolist(), self.stops[chosen].tolist(), strict=True))

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return len(self.first) - 1

    def count_labels(self) -> Ints:
        """Return the labels of every row."""
        sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.labels)])
        return np.diff(sums[self.first])


def pack_parts(starts: Ints, stops: Ints, labels: Ints, capacity: int) -> PackedParts:
    """Pack parts of at most `capacity` tokens into rows of `capacity` tokens.

    The longest part comes first. Each goes to the row with the least sufficient room, or to a new row.
    """
    lengths = stops - starts
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), dtype=np.int64)
    rooms: list[int] = []
    rows_by_room: dict[int, list[int]] = {}
    count = 0
    for part, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        position = bisect_left(rooms, length)
        if position < len(rooms):
            room = rooms[position]
            rows = rows_by_room[room]
            row = rows.pop()
            if not rows:
                del rooms[position], rows_by_room[room]
        else:
            row, room, count = count, capacity, count + 1
        row_of[part] = row
        left = room - length
        if left:
            if left not in rows_by_room:
                rows_by_room[left] = []
                insort(rooms, left)
            rows_by_room[left].append(row)
    by_row = np.argsort(row_of, kind="stable")
    first = np.searchsorted(row_of[by_row], np.arange(count + 1))
    return PackedParts(starts=starts[by_row], stops=stops[by_row], labels=labels[by_row], first=first.astype(np.int64))


def cut_parts(starts: Ints, stops: Ints, capacity: int) -> tuple[Ints, Ints]:
    """Cut runs of tokens into parts of at most `capacity` tokens, each of which begins with the last token of the part
    before it."""
    stride = capacity - 1
    counts = np.maximum(1, -(-(stops - starts - 1) // stride))
    owner = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    part_starts = starts[owner] + within * stride
    return part_starts, np.minimum(part_starts + capacity, stops[owner])
