"""Overlap of a stage's gradient reduction with its last backward.

The runtime starts the reduction of a bucket when the backward has finished the bucket's layers, last layer first.
Reductions of a stage run one after another. The time left after the backward is therefore the largest over the buckets
of (all reductions from that bucket on) - (backward time left when the bucket was complete). The last bucket never
overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from pipefit.cost.work import BUCKET_BYTES

LayerGradient = tuple[float, float]
"""(bytes of gradients, seconds of the backward) of one layer."""


def hidden_s(reduce_s: float, layers: Sequence[LayerGradient], bucket_bytes: float = BUCKET_BYTES) -> float:
    """Return the seconds of `reduce_s` that overlap the stage's last backward. `layers` are in model order.

    Seconds are distributed over the buckets by their bytes. The result is 0 without a reduction or with one bucket.
    """
    left = remaining_lines(layers, bucket_bytes)
    if not left:
        return 0.0
    return reduce_s - max(0.0, *(share * reduce_s - beside_s for share, beside_s in left))


def remaining_lines(layers: Sequence[LayerGradient], bucket_bytes: float = BUCKET_BYTES) -> list[tuple[float, float]]:
    """Return (share, seconds) of every bucket; empty without a reduction.

    At least share x (full reduction) - seconds remains after the backward, because the bucket and all later ones cannot
    start sooner.
    """
    pieces = bucket_finish_times(layers, bucket_bytes)
    total_bytes = fsum(size for size, _ in pieces)
    if not total_bytes:
        return []
    backward_s = fsum(seconds for _, seconds in layers)
    lines: list[tuple[float, float]] = []
    behind = 0.0
    for size, complete_s in reversed(pieces):
        behind += size
        lines.append((behind / total_bytes, backward_s - complete_s))
    return lines


def delay_pieces(sizes: Sequence[int], layers: int) -> list[int]:
    """Return the bytes that are ready when the backward has finished each layer, if a layer's are ready only when the
    backward has finished this number of further layers. `sizes` are in model order."""
    return [sum(sizes[: layers + 1]), *sizes[layers + 1 :], *[0] * layers][: len(sizes)]


def bucket_finish_times(layers: Sequence[LayerGradient], bucket_bytes: float = BUCKET_BYTES) -> list[LayerGradient]:
    """Return (bytes, time in the backward at which it is complete) of every bucket, in the order of their starts."""
    buckets: list[LayerGradient] = []
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
