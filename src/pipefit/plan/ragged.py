"""Rows that differ: how many tokens every replica has in every microbatch, from the counts of a sampled batch.

Position r of the batch belongs to microbatch r // (positions / microbatches), within it to the replica whose run of
positions holds it (`layout.split` by the shares of the stage's group). What a replica holds of a packed space are the
tokens of its samples, one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from pipefit.layout import Group, Run, split
from pipefit.model.graph import Model
from pipefit.plan.bounds import Ints
from pipefit.plan.types import Space

CONDITIONS: Mapping[str, str] = {"I": "patches", "L": "latents"}
"""Symbols of the graphs in which a packed row meets a sequence, and whose tokens they are."""


def packed_sizes(
    space: Space, microbatches: int, shares: Sequence[int], multiple: int = 1
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """[microbatch][replica]: (tokens, sum of images' tokens squared); empty where rows are alike. Of a stage that takes
    `multiple` microbatches together, for each of them what all of them have."""
    if not space.counts:
        return ()
    squares = space.squares or [count * count for count in space.counts]
    each = [
        _by_replica(one, microbatches // multiple, shares).repeat(multiple, axis=0) for one in (space.counts, squares)
    ]
    return tuple(tuple(zip(*row, strict=True)) for row in zip(*(one.tolist() for one in each), strict=True))


def edge_sizes(
    space: Space, microbatches: int, source: Group, target: Group, multiples: tuple[int, int] = (1, 1)
) -> Iterator[tuple[int, tuple[list[Run], list[Run]]]]:
    """Of every microbatch: all tokens, and the runs of them that the replicas of both groups hold, whose stages take so
    many microbatches together."""
    ends = [
        _runs_of(space.counts, microbatches, group.axis("replica").shares, multiple)
        for group, multiple in zip((source, target), multiples, strict=True)
    ]
    totals = np.asarray(space.counts, dtype=np.int64).reshape(microbatches, -1).sum(axis=1)
    for total, sent, taken in zip(totals.tolist(), *ends, strict=True):
        yield total, (sent, taken)


def conditions(spaces: Sequence[Space], microbatches: int, share: float) -> tuple[tuple[str, int], ...]:
    """The symbols of packed rows that meet a sequence: the tokens in an average microbatch that a replica with this
    share of it has. Empty for a model of text."""
    known = {space.name: space for space in spaces if space.counts}
    return tuple(
        (symbol, round(sum(known[name].counts) / microbatches * share))
        for symbol, name in CONDITIONS.items()
        if name in known
    )


def frozen_layers(model: Model) -> dict[str, int]:
    """Of every module, how many layers at its beginning have no backward: neither they nor any before are trained. 0
    everywhere for a model of which nothing is trained."""
    found: dict[str, int] = {}
    reached = False
    for module in model.modules:
        found[module.name] = 0
        for layer in module.layers:
            reached = reached or any(one.trainable for one in model.layer_graph(layer).parameters)
            found[module.name] += not reached
    return found if reached else dict.fromkeys(found, 0)


def _by_replica(counts: Sequence[int], microbatches: int, shares: Sequence[int]) -> Ints:
    """[microbatch, replica]: sums over the positions of each."""
    table = np.asarray(counts, dtype=np.int64).reshape(microbatches, -1)
    sums = np.concatenate([np.zeros((microbatches, 1), np.int64), table.cumsum(axis=1)], axis=1)
    starts, stops = np.array(split(table.shape[1], shares)).T
    found: Ints = sums[:, stops] - sums[:, starts]
    return found


def _runs_of(counts: Sequence[int], microbatches: int, shares: Sequence[int], multiple: int) -> Iterator[list[Run]]:
    """For every microbatch, which run of its tokens each replica holds: the part of the replica's run of all that are
    taken together that falls into the microbatch."""
    units = _by_replica(counts, microbatches // multiple, shares)
    totals = np.asarray(counts, dtype=np.int64).reshape(microbatches // multiple, multiple, -1).sum(axis=2)
    for own, each in zip(units.tolist(), totals.tolist(), strict=True):
        bounds = list(accumulate(own, initial=0))
        for start, total in zip(accumulate(each, initial=0), each, strict=False):
            inside = [min(max(0, bound - start), total) for bound in bounds]
            yield list(pairwise(inside))
