"""Choose the points at which to measure a layer: fewer than 40, instead of a table over all rows, lengths and contexts.

TeraPipe's tables have a thousand points and more for one layer (Li et al. 2021, section 3.3, and its code). The time of
a layer is a function of its tokens with one knee, plus attention, which is a sum of a few products. So tokens are
measured at powers of two, the knee is refined where the curve bends, and attention is measured at some twenty lengths
and contexts. The runtime attends to earlier slices one by one, so the cost of a context also depends on its number of
slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipefit.model.graph import Graph
from pipefit.model.ops import KINDS
from pipefit.plan.assemble.packed_rows import CONDITIONS
from pipefit.plan.request.sampled_batches import ASSUMED_PART

MOST_POINTS = 39
SMALLEST = 16
"""Tokens of the smallest measured microbatch, for sequences of at least 16 times this length."""
BENDS = 0.02
"""A knot that deviates from its neighbours' line by more than this share is in the knee."""


Rows = Literal["one", "some", "most"]
"""One row; as many as `most_tokens` allows; the geometric mean of the two."""

_PARTS = 32
"""Unit of lengths and contexts: this fraction of the sequence."""

_KNEE = 4
"""Points that `refine_points` may always add."""

_CROWD = 2
"""Maximum tokens of a slice with its context, in multiples of the largest microbatch."""

_WHOLE: tuple[tuple[float, Rows], ...] = (
    (32, "one"),
    (32, "most"),
    (9.2, "one"),
    (23.1, "most"),
    (20.7, "one"),
    (14.4, "most"),
)
"""(length, rows) of measured sequences without context: the longest, and lengths that are not round numbers."""

_SLICES: tuple[tuple[int, int, int, Rows], ...] = (
    (16, 16, 1, "one"),
    (4, 28, 7, "one"),
    (8, 24, 6, "most"),
    (30, 2, 1, "most"),
    (2, 30, 15, "one"),
    (2, 14, 3, "some"),
    (19, 9, 4, "most"),
    (8, 24, 3, "one"),
    (6, 26, 1, "some"),
    (16, 16, 1, "most"),
    (21, 11, 2, "one"),
    (3, 13, 4, "most"),
    (13, 3, 1, "one"),
    (11, 21, 5, "one"),
    (17, 13, 2, "some"),
    (2, 30, 6, "most"),
    (30, 2, 1, "one"),
    (10, 4, 1, "most"),
    (5, 9, 1, "one"),
    (13, 19, 8, "most"),
    (4, 28, 7, "some"),
    (22, 10, 1, "most"),
)
"""(length, context, earlier slices, rows) of the measured slices, the most informative first: few and many rows with
short and long slices, each with long and short contexts in few and many slices. Round lengths alone would not do, as
kernels are a few per cent faster at powers of two than between them; nor would one row, as caches hold less of many."""


class WorkPoint(NamedTuple):
    """One size of work."""

    rows: int
    tokens: int
    "Of one row, in this slice."
    past: int = 0
    "Tokens of earlier slices."
    earlier: int = 1
    "Slices that `past` came in, of nearly equal size; 1 where there are none."

    @property
    def earlier_slices(self) -> tuple[int, ...]:
        """Tokens of each earlier slice."""
        if not self.past:
            return ()
        count = min(self.earlier, self.past)
        return tuple(self.past * (i + 1) // count - self.past * i // count for i in range(count))


def first_points(graph: Graph, sequence: int, most_tokens: int) -> list[WorkPoint]:
    """Return the first points to measure. `most_tokens` (rows x length) is the largest microbatch that plans may use.

    A layer without attention depends on its number of tokens alone.
    """
    points = [_short_rows(count, sequence) for count in token_counts(most_tokens, sequence)]
    attention = [KINDS[operator.kind] for operator in graph.operators if KINDS[operator.kind].is_attention]
    if any(not kind.packs_rows for kind in attention):
        points += attention_points(sequence, most_tokens)[: max(0, MOST_POINTS - _KNEE - len(points))]
    elif attention:
        points += [point for point in attention_points(sequence, most_tokens) if not point.past]
    return list(dict.fromkeys(points))


def sizes_at(rows: int, tokens: int) -> dict[str, int]:
    """Return the symbols of a layer at a point.

    If images are embedded in a sequence, one in ASSUMED_PART of its tokens belongs to an image; a layer of images has
    an image in each row.
    """
    return {"B": rows, "T": tokens, **dict.fromkeys(CONDITIONS, max(1, rows * tokens // ASSUMED_PART))}


def row_points(tokens: int, most_tokens: int) -> list[WorkPoint]:
    """Return whole rows of one length: powers of two of them, up to `most_tokens` together."""
    most_rows = max(1, most_tokens // tokens)
    return [WorkPoint(1 << power, tokens) for power in range(most_rows.bit_length())]


def token_counts(most_tokens: int, sequence: int) -> list[int]:
    """Return `most_tokens` divided by powers of two, ascending, down to `SMALLEST` or a sixteenth of a shorter
    sequence.

    Images of a short sequence are small, and some microbatches have few.
    """
    counts, smallest = [max(1, most_tokens)], max(1, min(SMALLEST, sequence // 16))
    while counts[-1] // 2 >= smallest:
        counts.append(counts[-1] // 2)
    return counts[::-1]


def attention_points(sequence: int, most_tokens: int) -> list[WorkPoint]:
    """Return full sequences of several lengths, and slices with context, the most informative first."""
    points = []
    for parts, rows in _WHOLE:
        length = _sequence_share(parts, sequence)
        points.append(WorkPoint(_row_count(rows, most_tokens // length), length))
    for parts, past_parts, earlier, rows in _SLICES:
        length = _sequence_share(parts, sequence)
        past = min(_sequence_share(past_parts, sequence), sequence - length)
        if past:
            most_rows = min(most_tokens // length, _CROWD * most_tokens // (length + past))
            points.append(WorkPoint(_row_count(rows, most_rows), length, past, min(earlier, past)))
    return list(dict.fromkeys(points))


def _sequence_share(parts: float, sequence: int) -> int:
    return max(1, int(sequence * parts / _PARTS))


def _row_count(which: Rows, most: int) -> int:
    most = max(1, most)
    return {"one": 1, "some": max(1, round(math.sqrt(most))), "most": most}[which]


def refine_points(points: Sequence[WorkPoint], seconds: Sequence[float], sequence: int) -> list[WorkPoint]:
    """Return points to add around the knee: beside knots that deviate from their neighbours' line by over `BENDS`.

    Only points of one length and no context, as `first_points` makes for the tokens, locate the knee.
    """
    known = {point.rows * point.tokens: time_s for point, time_s in zip(points, seconds, strict=True) if not point.past}
    line = {p.rows * p.tokens for p in points if p == _short_rows(p.rows * p.tokens, sequence)}
    counts = sorted(line)
    added: list[WorkPoint] = []
    for low, here, high in zip(counts, counts[1:], counts[2:], strict=False):
        straight = known[low] + (known[high] - known[low]) * (here - low) / (high - low)
        if abs(straight - known[here]) > BENDS * known[here]:
            added += [_short_rows((low + here) // 2, sequence), _short_rows((here + high) // 2, sequence)]
    fresh = [point for point in dict.fromkeys(added) if point not in points]
    return fresh[: max(0, MOST_POINTS - len(points))]


def _short_rows(count: int, sequence: int) -> WorkPoint:
    """Return about `count` tokens in rows of an eighth of the sequence, so that attention hardly counts."""
    length = max(1, min(count, max(SMALLEST, sequence // 8), sequence))
    return WorkPoint(max(1, count // length), length)
