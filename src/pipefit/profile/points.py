"""Which points of a layer to measure: fewer than 40, instead of a table over all rows, lengths and contexts.

TeraPipe's tables hold a thousand points and more for one layer (Li et al. 2021, section 3.3, and its code). The time
of a layer is a function of its tokens with one knee, plus attention, which is a sum of a few products: so tokens are
measured at powers of two, the knee is refined where the curve bends, and attention at some twenty lengths and contexts.
The runtime attends to earlier slices one by one, so a context costs by the number of slices that it came in, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipefit.model.graph import Graph
from pipefit.plan.assemble.packed_rows import CONDITIONS
from pipefit.plan.request.sampled_batches import ASSUMED_PART

MOST_POINTS = 39
SMALLEST = 16
"Tokens of the smallest microbatch that is measured, of sequences of 16 times as many and more."
BENDS = 0.02
"A knot that its neighbours miss by more than this share is in the knee."


Rows = Literal["one", "some", "most"]
"""One; as many as `most_tokens` have room for; the geometric mean of the two."""

_PARTS = 32
"Lengths and contexts are given in so many parts of the sequence."

_KNEE = 4
"Points that `refine_points` may always add."

_CROWD = 2
"Slices hold at most so many times the tokens of the largest microbatch, those of their context among them."

_WHOLE: tuple[tuple[float, Rows], ...] = (
    (32, "one"),
    (32, "most"),
    (9.2, "one"),
    (23.1, "most"),
    (20.7, "one"),
    (14.4, "most"),
)
"""(length, rows) of measured sequences without context: the longest, and lengths that are no round numbers."""

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
"""(length, context, earlier slices, rows) of the measured slices, the most telling first: few and many rows with short
and long slices, each with long contexts and short ones in few slices and many. Round lengths alone would not do, as
kernels are a few per cent faster at powers of two than between them; nor would one row, as caches hold less of many."""


class WorkPoint(NamedTuple):
    """One size of work."""

    rows: int
    tokens: int
    "Of one row, in this slice."
    past: int = 0
    "Tokens of earlier slices."
    earlier: int = 1
    "Slices that `past` came in, as equal as they can be; 1 where there are none."

    @property
    def earlier_slices(self) -> tuple[int, ...]:
        """Tokens of each earlier slice."""
        if not self.past:
            return ()
        count = min(self.earlier, self.past)
        return tuple(self.past * (i + 1) // count - self.past * i // count for i in range(count))


def first_points(graph: Graph, sequence: int, most_tokens: int) -> list[WorkPoint]:
    """Where measuring starts. `most_tokens` (rows x length) is the largest microbatch that plans may use.

    A layer without attention depends on its number of tokens alone.
    """
    points = [_short_rows(count, sequence) for count in token_counts(most_tokens, sequence)]
    if any(operator.kind == "attention" for operator in graph.operators):
        points += attention_points(sequence, most_tokens)[: max(0, MOST_POINTS - _KNEE - len(points))]
    elif any(operator.kind == "packed_attention" for operator in graph.operators):
        points += [point for point in attention_points(sequence, most_tokens) if not point.past]
    return list(dict.fromkeys(points))


def sizes_at(rows: int, tokens: int) -> dict[str, int]:
    """The symbols of a layer at a point. Where images meet a sequence, one in ASSUMED_PART of its tokens is of one; a
    layer of images has an image in each row."""
    return {"B": rows, "T": tokens, **dict.fromkeys(CONDITIONS, max(1, rows * tokens // ASSUMED_PART))}


def row_points(tokens: int, most_tokens: int) -> list[WorkPoint]:
    """Whole rows of one length: powers of two of them, up to `most_tokens` together."""
    most = max(1, most_tokens // tokens)
    return [WorkPoint(1 << power, tokens) for power in range(most.bit_length())]


def token_counts(most_tokens: int, sequence: int) -> list[int]:
    """Powers of two parts of `most_tokens`, ascending, down to `SMALLEST`, or a sixteenth of a shorter sequence: its
    images are small, and some microbatches have few."""
    counts, smallest = [max(1, most_tokens)], max(1, min(SMALLEST, sequence // 16))
    while counts[-1] // 2 >= smallest:
        counts.append(counts[-1] // 2)
    return counts[::-1]


def attention_points(sequence: int, most_tokens: int) -> list[WorkPoint]:
    """Whole sequences of several lengths, and slices with context, the most telling first."""
    points = []
    for parts, rows in _WHOLE:
        length = _sequence_share(parts, sequence)
        points.append(WorkPoint(_row_count(rows, most_tokens // length), length))
    for parts, past_parts, earlier, rows in _SLICES:
        length = _sequence_share(parts, sequence)
        past = min(_sequence_share(past_parts, sequence), sequence - length)
        if past:
            most = min(most_tokens // length, _CROWD * most_tokens // (length + past))
            points.append(WorkPoint(_row_count(rows, most), length, past, min(earlier, past)))
    return list(dict.fromkeys(points))


def _sequence_share(parts: float, sequence: int) -> int:
    return max(1, int(sequence * parts / _PARTS))


def _row_count(which: Rows, most: int) -> int:
    most = max(1, most)
    return {"one": 1, "some": max(1, round(math.sqrt(most))), "most": most}[which]


def refine_points(points: Sequence[WorkPoint], seconds: Sequence[float], sequence: int) -> list[WorkPoint]:
    """Points to add around the knee: between knots that their neighbours' straight line misses by over `BENDS`.

    Only points of one length and no context, as `first_points` makes for the tokens, say where the knee is.
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
    """About `count` tokens in rows of an eighth of the sequence, so that attention hardly counts."""
    length = max(1, min(count, max(SMALLEST, sequence // 8), sequence))
    return WorkPoint(max(1, count // length), length)
