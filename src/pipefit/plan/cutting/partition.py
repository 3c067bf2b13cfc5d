"""Cuts of a chain of layers into stages: exact dynamic programming over the real cost of every layer.

A stage is a run [i, j) of layers. The cut minimises the time of the slowest stage, then the largest memory of a stage,
then the cut positions. Stages may have different devices, so costs are rows [stage][layer]. The method is the min-max
recursion of AMP and PipeDream, run once per objective. The loops are written once, to run as plain Python and compiled
by numba (`schedule/taskgraph/kernel.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipefit.cost.types import Array
from pipefit.schedule.taskgraph.kernel import choose_loop

COMPILED_CUT_WORK = 4_000
"""Amount of work (layers and runs of layers over all stages) from which importing numba pays off: a search makes
hundreds of cuts."""


def partition_layers(
    times_s: Sequence[Sequence[float]] | Array,
    memory_bytes: Sequence[Sequence[float]] | Array | None = None,
    limit_bytes: Sequence[float] | Array | None = None,
    compiled: bool | None = None,
) -> tuple[int, ...] | None:
    """Return the boundaries (0, cut, ..., layers) of the best stages, or None if no cut fits the limits.

    `times_s[s][l]` is the time of layer l on the devices of stage s, `memory_bytes[s][l]` its memory there (for all
    microbatches in flight), `limit_bytes[s]` the limit of the stage. With several device kinds k that all have to fit,
    these are `[s][k][l]` and `[s][k]`, and ties are broken by the first kind. No value is negative. Every stage gets at
    least one layer. Exact: O(stages x layers^2). `compiled` forces numba on or off; both return the same cut. Raises
    ValueError if there are more stages than layers.
    """
    times = np.asarray(times_s, dtype=np.float64)
    stages, layers = times.shape
    if stages > layers:
        raise ValueError(f"{stages} stages need at least {stages} layers; there are {layers}")
    limits = np.full(stages, np.inf) if limit_bytes is None else np.asarray(limit_bytes, dtype=np.float64)
    needs = np.zeros((stages, 1, layers + 1))
    if memory_bytes is not None:
        needs = _prefix_sums(np.asarray(memory_bytes, dtype=np.float64).reshape(stages, -1, layers))
    arrays = [_prefix_sums(times), needs, limits.reshape(stages, -1)]
    room, bounds = np.empty((stages, layers + 1)), np.zeros(stages + 1, dtype=np.int64)
    function = _choose_kernel(best_bounds, stages, layers, compiled)
    if function is best_bounds:
        boundaries = [0] * (stages + 1)
        exists = best_bounds(*(array.tolist() for array in arrays), room.tolist(), boundaries)
        return tuple(boundaries) if exists else None
    exists = function(*arrays, room, bounds)
    return tuple(bounds.tolist()) if exists else None


def some_partition_fits(memory_bytes: Array, limit_bytes: Array, compiled: bool | None = None) -> bool:
    """Return whether any cut keeps every stage within its limits.

    Arguments are those of `partition_layers`, with an axis for the device kinds. Exact: O(stages x layers).
    """
    stages, _, layers = memory_bytes.shape
    function = _choose_kernel(some_bounds, stages, layers, compiled)
    arrays = [_prefix_sums(memory_bytes), limit_bytes, np.zeros((2, layers + 1), dtype=np.int64)]
    if function is some_bounds:
        return bool(some_bounds(*(array.tolist() for array in arrays)))
    return bool(function(*arrays))


def best_bounds(times: Any, needs: Any, limits: Any, table: Any, bounds: Any) -> int:
    """Fill `bounds` with the best boundaries. Returns 1, or 0 if there are none.

    `times[s][j]` is the sum over layers [0, j) of stage s, `needs[s][k][j]` that sum of the memory of kind k,
    `limits[s][k]` its limit. `table[s][j]` is scratch space: the least possible largest cost of stages 0..s on layers
    [0, j).
    """
    stages, layers = len(times), len(times[0]) - 1
    max_time = np.inf  # of a stage's time, in the second pass
    for fullest in (False, True):
        for s in range(stages):
            time, need, limit, row = times[s], needs[s], limits[s], table[s]
            last = layers - (stages - 1 - s)
            for j in range(layers + 1):
                row[j] = np.inf
            for i in range(s, 1 if s == 0 else last):
                before = -np.inf if s == 0 else table[s - 1][i]
                if before == np.inf:
                    continue
                for j in range(i + 1, last + 1):
                    cost = time[j] - time[i]
                    fits = cost <= max_time
                    for k in range(len(limit)):
                        fits = fits and need[k][j] - need[k][i] <= limit[k]
                    if not fits:
                        break
                    if fullest:
                        cost = need[0][j] - need[0][i]
                    row[j] = min(row[j], max(cost, before))
        if table[stages - 1][layers] == np.inf:
            return 0
        if not fullest:
            max_time = table[stages - 1][layers] * (1 + 1e-12)
    best = table[stages - 1][layers]
    bounds[stages] = layers
    for s in range(stages - 1, 0, -1):
        time, need, limit = times[s], needs[s], limits[s]
        stop = bounds[s + 1]
        for i in range(s, stop):
            fits = table[s - 1][i] <= best and time[stop] - time[i] <= max_time and need[0][stop] - need[0][i] <= best
            for k in range(len(limit)):
                fits = fits and need[k][stop] - need[k][i] <= limit[k]
            if fits:
                bounds[s] = i
                break
    return 1


def some_bounds(needs: Any, limits: Any, reached: Any) -> int:
    """Return 1 if any boundaries keep every stage within its limits, else 0; arguments as for `best_bounds`.

    `reached` [2][layers + 1] starts with zeros. Entry j of a row is 1 if the stages so far can hold layers [0, j).
    """
    stages, layers = len(needs), len(needs[0][0]) - 1
    reached[0][0] = 1
    for s in range(stages):
        need, limit, here, there = needs[s], limits[s], reached[s % 2], reached[1 - s % 2]
        last = layers - (stages - 1 - s)
        for j in range(layers + 1):
            there[j] = 0
        marked = stop = s
        for i in range(s, last):
            if here[i] == 0:
                continue
            stop = max(stop, i)
            fits = True
            while fits and stop < last:  # a later start never reaches less far
                for k in range(len(limit)):
                    fits = fits and need[k][stop + 1] - need[k][i] <= limit[k]
                if fits:
                    stop += 1
            for j in range(max(i, marked) + 1, stop + 1):
                there[j] = 1
            marked = max(marked, stop)
    return int(reached[stages % 2][layers])


def _choose_kernel(function: Any, stages: int, layers: int, compiled: bool | None) -> Any:
    work = stages * (layers + (layers - stages + 1) ** 2)
    return choose_loop(function, work, True if compiled is None and work >= COMPILED_CUT_WORK else compiled)


def _prefix_sums(rows: Array) -> Array:
    """Return [..., j]: the sums over the layers before j."""
    sums = np.zeros((*rows.shape[:-1], rows.shape[-1] + 1))
    np.cumsum(rows, axis=-1, out=sums[..., 1:])
    return sums
