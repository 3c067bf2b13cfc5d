"""How much of a stage's gradient reduction hides under its last backward.

The runtime starts a bucket's reduction as soon as the backward has finished the bucket's layers, last layer first.
Reductions of a stage follow each other, so what is left after the backward is the largest over the buckets of (all
reductions from that bucket on) - (backward that was left when it was complete). The last bucket always remains.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.cost.work import BUCKET_BYTES

Piece = tuple[float, float]
"""(bytes of gradients, seconds of the backward) of one layer."""


def hidden_s(reduce_s: float, layers: Sequence[Piece], bucket_bytes: float = BUCKET_BYTES) -> float:
    """Seconds of `reduce_s` that are over when the stage's last backward is. `layers` stand in the chain's order.

    Seconds are shared out over the buckets by their bytes. 0 where nothing is reduced or all is one bucket.
    """
    left = remaining_lines(layers, bucket_bytes)
    if not left:
        return 0.0
    return reduce_s - max(0.0, *(share * reduce_s - beside_s for share, beside_s in left))


def remaining_lines(layers: Sequence[Piece], bucket_bytes: float = BUCKET_BYTES) -> list[tuple[float, float]]:
    """(share, seconds) of every bucket: at least share x the whole reduction - seconds of it are left after the
    backward, because the bucket and those behind it cannot start sooner. Empty where nothing is reduced."""
    pieces = bucket_finish_times(layers, bucket_bytes)
    total_bytes = sum(size for size, _ in pieces)
    if not total_bytes:
        return []
    backward_s = sum(seconds for _, seconds in layers)
    lines: list[tuple[float, float]] = []
    behind = 0.0
    for size, complete_s in reversed(pieces):
        behind += size
        lines.append((behind / total_bytes, backward_s - complete_s))
    return lines


def bucket_finish_times(layers: Sequence[Piece], bucket_bytes: float = BUCKET_BYTES) -> list[Piece]:
    """(bytes, when in the backward it is complete) of every bucket, in the order in which they start."""
    buckets: list[Piece] = []
    size, complete_s, elapsed_s = 0.0, 0.0, 0.0
    for layer_bytes, seconds in reversed(layers):
        elapsed_s += seconds
        if not layer_bytes:
            continue
        if size and size + layer_bytes > bucket_bytes:
            buckets.append((size, complete_s))
            size = 0.0
        size += layer_bytes
        complete_s = elapsed_s
    return [*buckets, (size, complete_s)] if size else buckets
