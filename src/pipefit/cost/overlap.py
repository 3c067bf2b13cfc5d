"""How much of a stage's gradient reduction hides under its last backward.

The runtime starts a bucket's reduction as soon as the backward has finished the bucket's layers, last layer first.
Reductions of a stage follow each other, so what is left after the backward is the largest over the buckets of (all
reductions from that bucket on) - (backward that was left when it was complete). The last bucket always remains.
"""

from __future__ import annotations

from collections.abc import Sequence

BUCKET_BYTES = 32 << 20
"""Gradients that are reduced together: as `run/build.py` fills its buckets."""

Piece = tuple[float, float]
"""(bytes of gradients, seconds of the backward) of one layer."""


def hidden_s(reduce_s: float, layers: Sequence[Piece], bucket_bytes: float = BUCKET_BYTES) -> float:
    """Seconds of `reduce_s` that are over when the stage's last backward is. `layers` stand in the chain's order.

    Seconds are shared out over the buckets by their bytes. 0 where nothing is reduced or all is one bucket.
    """
    pieces = buckets(layers, bucket_bytes)
    whole = sum(size for size, _ in pieces)
    if not whole:
        return 0.0
    backward_s = sum(seconds for _, seconds in layers)
    left_s, after_s = 0.0, 0.0
    for size, complete_s in reversed(pieces):
        left_s += reduce_s * size / whole
        after_s = max(after_s, left_s - (backward_s - complete_s))
    return reduce_s - after_s


def buckets(layers: Sequence[Piece], bucket_bytes: float = BUCKET_BYTES) -> list[Piece]:
    """(bytes, when in the backward it is complete) of every bucket, in the order in which they start."""
    found: list[Piece] = []
    size, complete_s, elapsed_s = 0.0, 0.0, 0.0
    for own, seconds in reversed(layers):
        elapsed_s += seconds
        if not own:
            continue
        if size and size + own > bucket_bytes:
            found.append((size, complete_s))
            size = 0.0
        size += own
        complete_s = elapsed_s
    return [*found, (size, complete_s)] if size else found
