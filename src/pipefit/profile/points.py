"""Which points of a layer to measure: fewer than 40, instead of a table over all rows, lengths and contexts.

TeraPipe's tables hold a thousand points and more for one layer (Li et al. 2021, section 3.3, and its code). The time
of a layer is a function of its tokens with one knee, plus attention, which is a sum of a few products: so tokens are
measured at powers of two, the knee is refined where the curve bends, and attention at some twenty lengths and contexts.
The runtime attends to earlier slices one by one, so a context costs by the number of slices that it came in, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipefit.model.graph import Graph

MOST_POINTS = 39
SMALLEST = 16
"Tokens of the smallest microbatch that is measured."
BENDS = 0.02
"A knot that its neighbours miss by more than this share is in the knee."


_ONE_ROW = (
    (1, 8, 8),
    (2, 2, 1),
    (2, 14, 1),
    (2, 14, 7),
    (4, 4, 1),
    (4, 8, 2),
    (4, 12, 3),
    (4, 12, 12),
    (8, 8, 1),
    (12, 4, 1),
    (15, 1, 1),
)
_MOST_ROWS = ((2, 8, 4), (4, 4, 1), (4, 12, 3), (8, 8, 1), (12, 4, 2), (15, 1, 1))
"""(length, context, earlier slices) of the measured slices; length and context in sixteenths of the sequence."""


class Point(NamedTuple):
    """One size of work."""

    rows: int
    tokens: int
    "Of one row, in this slice."
    past: int = 0
    "Tokens of earlier slices."
    earlier: int = 1
    "Slices that `past` came in, as equal as they can be; 1 where there are none."

    @property
    def chunks(self) -> tuple[int, ...]:
        """Tokens of each earlier slice."""
        if not self.past:
            return ()
        count = min(self.earlier, self.past)
        return tuple(self.past * (i + 1) // count - self.past * i // count for i in range(count))


def first_points(graph: Graph, sequence: int, most_tokens: int) -> list[Point]:
    """Where measuring starts. `most_tokens` (rows x length) is the largest microbatch that plans may use.

    A layer without attention depends on its number of tokens alone.
    """
    points = [_with_tokens(count, sequence) for count in token_counts(most_tokens)]
    if any(operator.kind == "attention" for operator in graph.operators):
        points += attention_points(sequence, most_tokens)
    return list(dict.fromkeys(points))


def token_counts(most_tokens: int) -> list[int]:
    """Powers of two parts of `most_tokens`, ascending, down to `SMALLEST`."""
    counts = [max(1, most_tokens)]
    while counts[-1] // 2 >= SMALLEST:
        counts.append(counts[-1] // 2)
    return counts[::-1]


def attention_points(sequence: int, most_tokens: int) -> list[Point]:
    """Whole sequences of several lengths, and slices with context; one row, and as many rows as fit."""
    part = max(1, sequence // 16)
    most_rows = max(1, most_tokens // sequence)
    points = [Point(rows, part * length) for rows in (1, most_rows) for length in (4, 8, 16)]
    for rows, slices in ((1, _ONE_ROW), (most_rows, _MOST_ROWS)):
        points += [Point(rows, part * length, part * past, count) for length, past, count in slices]
    return points


def refined(points: Sequence[Point], seconds: Sequence[float], sequence: int) -> list[Point]:
    """Points to add around the knee: between knots that their neighbours' straight line misses by over `BENDS`.

    Only points of one length and no context, as `first_points` makes for the tokens, say where the knee is.
    """
    known = {point.rows * point.tokens: time_s for point, time_s in zip(points, seconds, strict=True) if not point.past}
    line = {p.rows * p.tokens for p in points if p == _with_tokens(p.rows * p.tokens, sequence)}
    counts = sorted(line)
    added: list[Point] = []
    for low, here, high in zip(counts, counts[1:], counts[2:], strict=False):
        straight = known[low] + (known[high] - known[low]) * (here - low) / (high - low)
        if abs(straight - known[here]) > BENDS * known[here]:
            added += [_with_tokens((low + here) // 2, sequence), _with_tokens((here + high) // 2, sequence)]
    fresh = [point for point in dict.fromkeys(added) if point not in points]
    return fresh[: max(0, MOST_POINTS - len(points))]


def _with_tokens(count: int, sequence: int) -> Point:
    """About `count` tokens in rows of an eighth of the sequence, so that attention hardly counts."""
    length = max(1, min(count, max(SMALLEST, sequence // 8), sequence))
    return Point(max(1, count // length), length)
