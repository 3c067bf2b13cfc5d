"""Memory of every lane with one order of the work and any cut of the layers, without a cost table for each cut.

The order of a lane determines which microbatches it holds at every moment; the cut only sets their size. So the order
is read once, and a cut is a few numbers per stage (`cost/memory/stage.py`). Transfer buffers are not counted: they
depend on the times of actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.memory.stage import stage_memory
from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.cost.types import Array
from pipefit.plan.cutting.rows import LayerRow
from pipefit.schedule.actions import Schedule

_CODE = {"F": 0, "I": 1, "W": 2, "B": 3}


class CutMemory:
    """Memory under one order of compute actions, for cuts of layers with these costs on every stage."""

    def __init__(self, computed: Schedule, rows: Sequence[LayerRow]) -> None:
        self._rows = rows
        self._lane = np.asarray(computed.placement)
        self._order: list[NDArray[np.int64]] = [
            np.array([len(_CODE) * action.stage + _CODE[action.kind] for action in lane], dtype=np.int64)
            for lane in computed.lanes
        ]
        self._known: dict[tuple[int, int, int], tuple[Array, Array, float]] = {}

    def lane_peaks(self, bounds: Sequence[int]) -> list[float]:
        """Return the peak bytes of every lane under the cut (0, cut, ..., layers)."""
        stages = [self._stage_memory(stage, start, stop) for stage, (start, stop) in enumerate(pairwise(bounds))]
        change = np.concatenate([held for held, _, _ in stages])
        passing = np.concatenate([worst for _, worst, _ in stages])
        static = np.bincount(self._lane, weights=[stays for _, _, stays in stages]) + WORKSPACE_BYTES
        peaks = []
        for lane, order in enumerate(self._order):
            step = change[order]
            after = np.cumsum(step)
            peak = (np.maximum(after, after - step) + passing[order]).max(initial=0.0)
            peaks.append(float(static[lane] + peak))
        return peaks

    def _stage_memory(self, stage: int, start: int, stop: int) -> tuple[Array, Array, float]:
        """Return (change by F, I, W and B, temporary memory of each, static memory) of a stage of these layers."""
        row = self._rows[stage]
        key = (id(row), start, stop)
        if key not in self._known:
            memory = stage_memory(row.layers[start:stop])
            saved, pending, passing = memory.saved_bytes, memory.pending_bytes, memory.passing
            self._known[key] = (
                np.array([saved, pending - saved, -pending, -saved]),
                np.array([passing["F"], passing["I"], passing["W"], passing["B"]]),
                float(row.static_bytes[start:stop].sum()),
            )
        return self._known[key]
