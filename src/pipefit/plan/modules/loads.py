"""The load of the fullest replica of a microbatch when a global batch is dealt out as evenly as possible.

Samples differ, and every microbatch waits for its fullest replica. Here samples are dealt heaviest first, back and
forth over the bins (the replicas of all microbatches, with equal numbers of samples), and similar bins come together in
one microbatch. That is an estimate for choosing layouts; the simulator uses the actual order of the samples.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from pipefit.cost.types import Array, Ints
from pipefit.plan.modules.module_budgets import DIVISION_BUDGET


class SampleDealer:
    """Deals out the samples of a global batch, and caches the result for each count of bins.

    `weights` [sampled batch, sample] as in `ModuleProfile`.
    """

    def __init__(self, weights: Array) -> None:
        self.heaviest_first: Array = -np.sort(-weights, axis=1)
        self._bins: dict[tuple[int, int], tuple[Array, float]] = {}
        self._loads: dict[tuple[int, int, int], tuple[float, float]] = {}

    def loads_by_replicas(self, microbatches: int, replicas: Ints, samples: int) -> tuple[Array, Array]:
        """Return `fullest_loads` for each of these counts of replicas."""
        loads = np.array(
            [self.fullest_load(microbatches, replica_count, samples) for replica_count in replicas.tolist()]
        ).reshape(-1, 2)
        return loads[:, 0], loads[:, 1]

    def fullest_load(self, microbatches: int, replicas: int, samples: int) -> tuple[float, float]:
        """See `fullest_loads`."""
        key = (microbatches, replicas, samples)
        if key not in self._loads:
            bin_samples = ceil(samples / replicas)
            if self.heaviest_first.shape[1]:
                filled, largest = self._fill_bins(microbatches * replicas, bin_samples)
                fullest = filled[:, replicas - 1 :: replicas]
                self._loads[key] = float(np.add.reduce(fullest, axis=None)) / fullest.size, largest
            else:
                self._loads[key] = float(bin_samples), float(bin_samples)
        return self._loads[key]

    def _fill_bins(self, bins: int, each: int) -> tuple[Array, float]:
        """Return ([sampled batch, bin] with `each` samples in every bin, the emptiest first; the fullest of all)."""
        if (bins, each) not in self._bins:
            if len(self._bins) * self.heaviest_first.size > DIVISION_BUDGET.cached_loads:
                self._bins.clear()
            batches, samples = self.heaviest_first.shape
            row = np.zeros((batches, each * bins))
            row[:, :samples] = self.heaviest_first
            dealt = row.reshape(batches, each, bins)
            filled = dealt[:, ::2].sum(axis=1) + dealt[:, 1::2, ::-1].sum(axis=1)
            filled.sort(axis=1)
            self._bins[bins, each] = filled, float(filled[:, -1].max())
        return self._bins[bins, each]


def fullest_loads(weights: Array, microbatches: int, replicas: int, samples: int) -> tuple[float, float]:
    """Return (mean over microbatches, largest) load of the fullest replica of a microbatch, in average samples.

    `weights` [sampled batch, sample] as in `ModuleProfile`; a microbatch has `samples` samples.
    """
    return SampleDealer(weights).fullest_load(microbatches, replicas, samples)
