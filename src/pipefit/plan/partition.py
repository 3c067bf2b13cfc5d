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
    flight count included), `limit_bytes[s]` what the stage may use; or `[s][k][l]` and `[s][k]` where several kinds
    of devices k all have to fit (equally good cuts are then told apart by the first). Every stage gets at least one
    layer. Exact: O(stages x layers^2). Raises ValueError if there are more stages than layers.
    """
    times = np.asarray(times_s, dtype=np.float64)
    stages, layers = times.shape
    if stages > layers:
        raise ValueError(f"{stages} stages need at least {stages} layers; there are {layers}")
    memory = np.zeros_like(times) if memory_bytes is None else np.asarray(memory_bytes, dtype=np.float64)
    limits = np.full(stages, np.inf) if limit_bytes is None else np.asarray(limit_bytes, dtype=np.float64)
    memory, limits = memory.reshape(stages, -1, layers), limits.reshape(stages, -1)
    ordered = np.triu(np.ones((layers + 1, layers + 1), dtype=bool), 1)
    sums = _Sums()
    kinds: dict[tuple[int, tuple[int, ...], tuple[float, ...]], int] = {}
    which = [
        kinds.setdefault((sums.of(time), tuple(map(sums.of, need)), tuple(limit.tolist())), len(kinds))
        for time, need, limit in zip(times, memory, limits, strict=True)
    ]
    time = []
    for own, needs, each in kinds:
        fits = np.all([sums[need] <= limit for need, limit in zip(needs, each, strict=True)], axis=0)
        time.append(np.where(ordered & fits, sums[own], np.inf))
    slowest = _minimax(time, which)[-1][layers]
    if not np.isfinite(slowest):
        return None
    need = [
        np.where(own <= slowest * (1 + 1e-12), sums[needs[0]], np.inf)
        for own, (_, needs, _) in zip(time, kinds, strict=True)
    ]
    return _trace(_minimax(need, which), need, which)


class _Sums:
    """[i][j]: the sum of a row of values over layers [i, j), for every row once."""

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}
        self._sums: list[Array] = []

    def of(self, row: Array) -> int:
        """The number of a row."""
        key = row.tobytes()
        if key not in self._known:
            self._known[key] = len(self._sums)
            prefix = np.concatenate(([0.0], np.cumsum(row)))
            self._sums.append(prefix[None, :] - prefix[:, None])
        return self._known[key]

    def __getitem__(self, number: int) -> Array:
        return self._sums[number]


def _minimax(cost: Sequence[Array], which: Sequence[int]) -> list[Array]:
    """table[s][j]: the least possible largest cost of stages 0..s that hold layers [0, j). `cost[which[s]]` is that of
    stage s for every run, infinite where it is not allowed."""
    best = np.full(len(cost[0]), np.inf)
    best[0] = -np.inf
    table = []
    for kind in which:
        best = np.maximum(cost[kind], best[:, None]).min(axis=0)
        table.append(best)
    return table


def _trace(table: list[Array], cost: Sequence[Array], which: Sequence[int]) -> tuple[int, ...]:
    """The earliest boundaries whose largest cost is the optimum."""
    optimum = table[-1][-1]
    bounds = [len(table[0]) - 1]
    for stage in range(len(table) - 1, 0, -1):
        fits = (cost[which[stage]][:, bounds[-1]] <= optimum) & (table[stage - 1] <= optimum)
        bounds.append(int(np.flatnonzero(fits)[0]))
    return (0, *reversed(bounds))
