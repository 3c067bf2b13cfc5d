"""Limits for orders where kinds of devices hold different amounts: what the fullest device may hold, so that all fit.

Orders are made and compared by what the fullest device of a lane holds. A device of another kind holds its own static
bytes and, of every activation and message, at most some share; of what passes it may need more than that share,
because some of it does not depend on rows. So with a limit L it fits as long as the fullest one holds no more than
static + (L - own static - excess) / share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipefit.cost.types import Array, CostTable

NOTHING = 1e-9
"""A smaller share is counted as this one: such a device holds next to nothing."""


def order_limits(costs: CostTable, placement: Sequence[int], least_bytes: Sequence[float]) -> tuple[float, ...]:
    """Of every lane, the bytes of the cost table with which every kind of device fits; `least_bytes`, the memory of
    its smallest device, where all hold the same."""
    if not costs.kinds:
        return tuple(least_bytes)
    limits = np.full(len(least_bytes), np.inf)
    for kind in costs.kinds:
        for lane in np.flatnonzero(np.isfinite(kind.limit_bytes)).tolist():
            share = max(
                NOTHING, _largest_ratio(_held_row(kind.table, placement, lane), _held_row(costs, placement, lane))
            )
            passing = _passing_bytes(kind.table, placement, lane) - share * _passing_bytes(costs, placement, lane)
            copied = _lane_stages(costs.reduce_copy_bytes, placement, lane).sum()
            excess = max(0.0, float(passing.max())) + (1.0 - share) * float(copied)
            left = float(kind.limit_bytes[lane] - kind.table.static_bytes[lane]) - excess
            limits[lane] = min(limits[lane], float(costs.static_bytes[lane]) + left / share)
    return tuple(limits.tolist())


def _largest_ratio(own: Array, most: Array) -> float:
    """The largest part that one has of the other, entry by entry."""
    nonzero = most > 0
    return float((own[nonzero] / most[nonzero]).max(initial=0.0))


def _held_row(costs: CostTable, placement: Sequence[int], lane: int) -> Array:
    """Everything that a lane holds between actions or has on its way, in one row."""
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
    """The stages of a lane from an array over stages, which may have one entry for all."""
    rows: Array = np.broadcast_to(table, (len(placement), *table.shape[1:]))[np.asarray(placement) == lane]
    return rows
