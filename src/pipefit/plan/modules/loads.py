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


def fullest_loads(weights: Array, microbatches: int, replicas: int, samples: int) -> tuple[float, float]:
    """(mean over microbatches, largest) of what the fullest replica of a microbatch gets, in average samples.

    `weights` [sampled batch, sample] as in `ModuleProfile`; a microbatch has `samples` samples.
    """
    each = ceil(samples / replicas)
    if not weights.shape[1]:
        return float(each), float(each)
    batches, bins = len(weights), microbatches * replicas
    heaviest_first = np.zeros((batches, each * bins))
    heaviest_first[:, : weights.shape[1]] = -np.sort(-weights, axis=1)
    dealt = heaviest_first.reshape(batches, each, bins)
    dealt[:, 1::2] = dealt[:, 1::2, ::-1].copy()
    fullest = np.sort(dealt.sum(axis=1), axis=1)[:, replicas - 1 :: replicas]
    return float(fullest.mean()), float(fullest.max())
