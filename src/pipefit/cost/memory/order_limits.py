"""Memory limits for action orders on lanes with mixed device kinds: a limit for the fullest device with which all fit.

Orders are built and compared by the bytes of the fullest device of a lane. A device of another kind holds its own
static bytes and at most some share of every activation and message. Its transient memory may exceed that share, because
a part of it does not depend on rows. With a limit L the device fits if the fullest device holds at most
static + (L - own static - excess) / share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipefit.cost.types import Array, CostTable

MIN_SHARE = 1e-9
"""Smallest share used in the division; a device with a smaller share holds next to nothing."""


def order_limits(costs: CostTable, placement: Sequence[int], least_bytes: Sequence[float]) -> tuple[float, ...]:
    """Return the limit per lane, in bytes of the cost table, with which every device kind fits.

    `least_bytes`, the memory of the smallest device per lane, is returned if all devices hold the same.
    """
    if not costs.kinds:
        return tuple(least_bytes)
    limits = np.full(len(least_bytes), np.inf)
    for kind in costs.kinds:
        for lane in np.flatnonzero(np.isfinite(kind.limit_bytes)).tolist():
            share = max(
                MIN_SHARE, _largest_ratio(_held_row(kind.table, placement, lane), _held_row(costs, placement, lane))
            )
            passing = _passing_bytes(kind.table, placement, lane) - share * _passing_bytes(costs, placement, lane)
            copied = _lane_stages(costs.reduce_copy_bytes, placement, lane).sum()
            excess = max(0.0, float(passing.max())) + (1.0 - share) * float(copied)
            left = float(kind.limit_bytes[lane] - kind.table.static_bytes[lane]) - excess
            limits[lane] = min(limits[lane], float(costs.static_bytes[lane]) + left / share)
    return tuple(limits.tolist())


def _largest_ratio(own: Array, most: Array) -> float:
    """Return the largest ratio own / most over all entries."""
    nonzero = most > 0
    return float((own[nonzero] / most[nonzero]).max(initial=0.0))


def _held_row(costs: CostTable, placement: Sequence[int], lane: int) -> Array:
    """Return all bytes that a lane holds between actions or has in transit, in one row."""
    saved, pending = costs.actions["F"].held_bytes, -costs.actions["W"].held_bytes
    parts = [_lane_stages(saved, placement, lane), _lane_stages(pending, placement, lane)]
    for edge in costs.edges:
        if placement[edge.target] == lane:
            parts += [edge.forward_bytes, edge.backward_sent_bytes]
        if placement[edge.source] == lane:
            parts += [edge.backward_bytes, edge.forward_sent_bytes]
    return np.concatenate([part.ravel() for part in parts])


def _passing_bytes(costs: CostTable, placement: Sequence[int], lane: int) -> Array:
    peaks = [_lane_stages(costs.actions[kind].peak_bytes, placement, lane) for kind in ("F", "I", "W", "B")]
    return np.concatenate([part.ravel() for part in peaks])


def _lane_stages(table: Array, placement: Sequence[int], lane: int) -> Array:
    """Return the stages of a lane from an array over stages, which may have one entry for all."""
    rows: Array = np.broadcast_to(table, (len(placement), *table.shape[1:]))[np.asarray(placement) == lane]
    return rows
