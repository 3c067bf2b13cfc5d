"""Cutting a chain of layers into stages: exact dynamic programming over the real cost of every layer.

A stage is a run [i, j) of layers. The cut minimises the time of the slowest stage; among all cuts that reach it, the
largest memory of a stage; among those, the earliest cut positions. Stages may have different devices, so costs are
rows [stage][layer]. The method is the min-max recursion of AMP and PipeDream, run once per objective.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def partition(
    times_s: Sequence[Sequence[float]] | Array,
    memory_bytes: Sequence[Sequence[float]] | Array | None = None,
    limit_bytes: Sequence[float] | Array | None = None,
) -> tuple[int, ...] | None:
    """The boundaries (0, cut, ..., layers) of the best stages, or None if no cut fits the limits.

    `times_s[s][l]` is the time of layer l on the devices of stage s, `memory_bytes[s][l]` what it needs there (in
    flight count included), `limit_bytes[s]` what the stage may use. Every stage gets at least one layer. Exact:
    O(stages x layers^2). Raises ValueError if there are more stages than layers.
    """
    times = np.asarray(times_s, dtype=np.float64)
    stages, layers = times.shape
    if stages > layers:
        raise ValueError(f"{stages} stages need at least {stages} layers; there are {layers}")
    time = _run_sums(times)
    allowed = np.broadcast_to(np.triu(np.ones((layers + 1, layers + 1), dtype=bool), 1), time.shape).copy()
    memory = np.zeros_like(time) if memory_bytes is None else _run_sums(np.asarray(memory_bytes, dtype=np.float64))
    if limit_bytes is not None:
        allowed &= memory <= np.asarray(limit_bytes, dtype=np.float64)[:, None, None]
    slowest = _minimax(time, allowed)[-1][layers]
    if not np.isfinite(slowest):
        return None
    allowed &= time <= slowest * (1 + 1e-12)
    table = _minimax(memory, allowed)
    return _trace(table, memory, allowed)


def _run_sums(rows: Array) -> Array:
    """[stage][i][j]: the sum of row values over layers [i, j). One array for all stages where their rows are one."""
    if rows.strides[0] == 0:
        return np.broadcast_to(_run_sums(rows[:1].copy()), (len(rows), rows.shape[1] + 1, rows.shape[1] + 1))
    prefix = np.concatenate([np.zeros((rows.shape[0], 1)), np.cumsum(rows, axis=1)], axis=1)
    sums: Array = prefix[:, None, :] - prefix[:, :, None]
    return sums


def _minimax(cost: Array, allowed: NDArray[np.bool_]) -> list[Array]:
    """table[s][j]: the least possible largest cost of stages 0..s that hold layers [0, j)."""
    best = np.full(cost.shape[1], np.inf)
    best[0] = -np.inf
    table = []
    for stage in range(cost.shape[0]):
        step = np.where(allowed[stage], np.maximum(cost[stage], best[:, None]), np.inf)
        best = step.min(axis=0)
        table.append(best)
    return table


def _trace(table: list[Array], cost: Array, allowed: NDArray[np.bool_]) -> tuple[int, ...]:
    """The earliest boundaries whose largest cost is the optimum."""
    optimum = table[-1][-1]
    bounds = [len(table[0]) - 1]
    for stage in range(len(table) - 1, 0, -1):
        stop = bounds[-1]
        fits = allowed[stage, :, stop] & (cost[stage, :, stop] <= optimum) & (table[stage - 1] <= optimum)
        bounds.append(int(np.flatnonzero(fits)[0]))
    return (0, *reversed(bounds))
