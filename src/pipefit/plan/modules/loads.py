"""How much the fullest replica of a microbatch has to do, when a global batch is dealt out as evenly as can be.

Samples differ; every microbatch waits for its fullest replica. Here samples are dealt, heaviest first, to and fro over
the bins (replicas of all microbatches, as many samples in each), and bins that are alike come together in one
microbatch. That is an estimate for choosing layouts; what a step really does is told by the order that its samples
get, which the simulator is given.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from pipefit.cost.types import Array
from pipefit.plan.bounds.step_bounds import Ints

KNOWN = 1 << 22
"""Values of filled bins that are remembered at most: 32 MiB."""


class SampleDealer:
    """Deals out the samples of a global batch; what it did for one count of bins it knows for the next time.

    `weights` [sampled batch, sample] as in `ModuleProfile`.
    """

    def __init__(self, weights: Array) -> None:
        self.heaviest_first: Array = -np.sort(-weights, axis=1)
        self._bins: dict[tuple[int, int], tuple[Array, float]] = {}
        self._loads: dict[tuple[int, int, int], tuple[float, float]] = {}

    def loads_by_replicas(self, microbatches: int, replicas: Ints, samples: int) -> tuple[Array, Array]:
        """`fullest_loads` of each of these counts of replicas."""
        found = np.array([self.fullest_load(microbatches, one, samples) for one in replicas.tolist()]).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def fullest_load(self, microbatches: int, replicas: int, samples: int) -> tuple[float, float]:
        """See `fullest_loads`."""
        key = (microbatches, replicas, samples)
        if key not in self._loads:
            each = ceil(samples / replicas)
            if self.heaviest_first.shape[1]:
                filled, most = self._fill_bins(microbatches * replicas, each)
                fullest = filled[:, replicas - 1 :: replicas]
                self._loads[key] = float(np.add.reduce(fullest, axis=None)) / fullest.size, most
            else:
                self._loads[key] = float(each), float(each)
        return self._loads[key]

    def _fill_bins(self, bins: int, each: int) -> tuple[Array, float]:
        """([sampled batch, bin] with `each` samples in every bin, the emptiest first; the fullest of all)."""
        if (bins, each) not in self._bins:
            if len(self._bins) * self.heaviest_first.size > KNOWN:
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
    """(mean over microbatches, largest) of what the fullest replica of a microbatch gets, in average samples.

    `weights` [sampled batch, sample] as in `ModuleProfile`; a microbatch has `samples` samples.
    """
    return SampleDealer(weights).fullest_load(microbatches, replicas, samples)
