"""Division of a microbatch's images among the replicas of a stage, for stages that divide images instead of samples.

A replica of a packed stage holds either the images of its samples, or a run of images from any samples
(`Stage.divide`). The images of one call are in the order of the samples and are cut into runs of complete images. So a
replica's tokens are one run in either case, and the transfer rule needs no extension. With few samples of many images,
this gives every replica work (OrchMLLM, arXiv 2503.23830, and VeOmni, arXiv 2508.02317, balance their encoders' images
likewise).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pipefit.layout import Run


def image_runs(tokens: Sequence[int], shares: Sequence[int]) -> list[Run]:
    """Return the run of images of each replica, for consecutive images with these `tokens`.

    An image goes to the replica that contains its middle if all tokens are cut in proportion to the `shares`. So a
    boundary is at most half an image away from the even one. Runs may be empty.
    """
    ends = np.cumsum(np.asarray(tokens, dtype=np.int64))
    if not len(ends):
        return [(0, 0)] * len(shares)
    middles = 2 * ends - np.asarray(tokens, dtype=np.int64)  # twice the middle: integers, equal on every rank
    parts = np.cumsum(np.asarray(shares, dtype=np.int64))
    bounds = np.searchsorted(middles * parts[-1], 2 * int(ends[-1]) * parts[:-1], side="left")
    return list(pairwise([0, *bounds.tolist(), len(ends)]))


def token_runs(tokens: Sequence[int], shares: Sequence[int]) -> list[Run]:
    """Return the same runs, in tokens."""
    starts = [0, *np.cumsum(np.asarray(tokens, dtype=np.int64)).tolist()]
    return [(starts[start], starts[stop]) for start, stop in image_runs(tokens, shares)]
