"""Dividing images: which of a microbatch's images each replica of a stage takes, where samples are not what is divided.

A replica of a packed stage holds the images of its own samples, or its own images, whichever samples they are of
(`Stage.divide`). The images of what the stage takes together stand in the order of the samples, and are cut into runs
of whole images, so a replica's tokens are one run in either case and the transfer rule needs nothing else. With few
samples of many images this is what gives every replica something to do (OrchMLLM, arXiv 2503.23830, and VeOmni, arXiv
2508.02317, balance their encoders' images likewise).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pipefit.layout import Run


def image_runs(tokens: Sequence[int], shares: Sequence[int]) -> list[Run]:
    """The run of images that each replica takes, of images with so many `tokens`, one behind the other: an image goes
    where its middle lies when all tokens are cut in proportion to the `shares`. So a boundary is at most half an image
    away from where it would be even. Runs may be empty."""
    ends = np.cumsum(np.asarray(tokens, dtype=np.int64))
    if not len(ends):
        return [(0, 0)] * len(shares)
    middles = 2 * ends - np.asarray(tokens, dtype=np.int64)  # twice the middle: whole numbers, alike on every rank
    parts = np.cumsum(np.asarray(shares, dtype=np.int64))
    bounds = np.searchsorted(middles * parts[-1], 2 * int(ends[-1]) * parts[:-1], side="left")
    return list(pairwise([0, *bounds.tolist(), len(ends)]))


def token_runs(tokens: Sequence[int], shares: Sequence[int]) -> list[Run]:
    """The same runs, in tokens."""
    starts = [0, *np.cumsum(np.asarray(tokens, dtype=np.int64)).tolist()]
    return [(starts[start], starts[stop]) for start, stop in image_runs(tokens, shares)]
