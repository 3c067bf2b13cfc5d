"""Rows that differ: how many tokens every replica has in every microbatch, from the counts of a sampled batch.

Position r of the batch belongs to microbatch r // (positions / microbatches), within it to the replica whose run of
positions holds it (`layout.split_by_shares` by the shares of the stage's group). What a replica holds of a packed
space are the tokens of its samples, one behind the other; or, of a stage that divides images, of its run of the images
of what the stage takes together (`image_split.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np

from pipefit.layout import Mesh, Run, split_by_shares
from pipefit.model.graph import Model
from pipefit.plan.assemble.image_split import image_runs, token_runs
from pipefit.plan.bounds.step_bounds import Ints
from pipefit.plan.types import Divide, SampleSpace, Stage

CONDITIONS: Mapping[str, str] = {"I": "patches", "L": "latents"}
"""Symbols of the graphs in which a packed row meets a sequence, and whose tokens they are."""


@dataclass(frozen=True, slots=True)
class MicrobatchGrouping:
    """How a stage takes a packed space's microbatches."""

    multiple: int = 1
    "So many together."
    divide: Divide = "samples"
    "What of them its replicas divide."


def stage_grouping(stage: Stage) -> MicrobatchGrouping:
    """How this stage does."""
    return MicrobatchGrouping(stage.microbatch_multiple, stage.divide)


ONE_BY_ONE = MicrobatchGrouping()


def packed_sizes(
    space: SampleSpace, microbatches: int, shares: Sequence[int], how: MicrobatchGrouping = ONE_BY_ONE
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """[microbatch][replica]: (tokens, sum of images' tokens squared); empty where rows are alike. Of a stage that takes
    several microbatches together, for each of them what all of them have."""
    if not space.counts:
        return ()
    units = microbatches // how.multiple
    if how.divide == "images":
        unit_sizes = [_replica_image_sizes(tokens, shares) for tokens in _image_tokens(space, units)]
        return tuple(table for table in unit_sizes for _ in range(how.multiple))
    squares = space.squares or [count * count for count in space.counts]
    both = [_by_replica(table, units, shares).repeat(how.multiple, axis=0) for table in (space.counts, squares)]
    return tuple(tuple(zip(*row, strict=True)) for row in zip(*(table.tolist() for table in both), strict=True))


def edge_sizes(
    space: SampleSpace,
    microbatches: int,
    source: Mesh,
    target: Mesh,
    how: tuple[MicrobatchGrouping, MicrobatchGrouping] = (ONE_BY_ONE, ONE_BY_ONE),
) -> Iterator[tuple[int, tuple[list[Run], list[Run]]]]:
    """Of every microbatch: all tokens, and the runs of them that the replicas of both groups hold, whose stages take
    them so."""
    ends = [
        _runs_of(space, microbatches, group.find_axis("replica").shares, grouping)
        for group, grouping in zip((source, target), how, strict=True)
    ]
    totals = np.asarray(space.counts, dtype=np.int64).reshape(microbatches, -1).sum(axis=1)
    for total, sent, received in zip(totals.tolist(), *ends, strict=True):
        yield total, (sent, received)


def packed_symbols(spaces: Sequence[SampleSpace], microbatches: int, share: float) -> tuple[tuple[str, int], ...]:
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
    frozen: dict[str, int] = {}
    reached = False
    for module in model.modules:
        frozen[module.name] = 0
        for layer in module.layers:
            reached = reached or any(parameter.trainable for parameter in model.layer_graph(layer).parameters)
            frozen[module.name] += not reached
    return frozen if reached else dict.fromkeys(frozen, 0)


def _by_replica(counts: Sequence[int], microbatches: int, shares: Sequence[int]) -> Ints:
    """[microbatch, replica]: sums over the positions of each."""
    table = np.asarray(counts, dtype=np.int64).reshape(microbatches, -1)
    sums = np.concatenate([np.zeros((microbatches, 1), np.int64), table.cumsum(axis=1)], axis=1)
    starts, stops = np.array(split_by_shares(table.shape[1], shares)).T
    per_replica: Ints = sums[:, stops] - sums[:, starts]
    return per_replica


def _image_tokens(space: SampleSpace, units: int) -> Iterator[list[int]]:
    """The tokens of the images of every so many positions that are taken together."""
    rows = len(space.images) // units
    for start in range(0, units * rows, rows):
        yield list(chain.from_iterable(space.images[start : start + rows]))


def _replica_image_sizes(tokens: Sequence[int], shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Of every replica, what its images have."""
    runs = [tokens[start:stop] for start, stop in image_runs(tokens, shares)]
    return tuple((sum(images), sum(count * count for count in images)) for images in runs)


def _runs_of(
    space: SampleSpace, microbatches: int, shares: Sequence[int], how: MicrobatchGrouping
) -> Iterator[list[Run]]:
    """For every microbatch, which run of its tokens each replica holds: the part of the replica's run of all that are
    taken together that falls into the microbatch."""
    units = microbatches // how.multiple
    totals = np.asarray(space.counts, dtype=np.int64).reshape(units, how.multiple, -1).sum(axis=2)
    if how.divide == "images":
        held = [[stop - start for start, stop in token_runs(tokens, shares)] for tokens in _image_tokens(space, units)]
    else:
        held = _by_replica(space.counts, units, shares).tolist()
    for replica_tokens, unit_totals in zip(held, totals.tolist(), strict=True):
        bounds = list(accumulate(replica_tokens, initial=0))
        for start, total in zip(accumulate(unit_totals, initial=0), unit_totals, strict=False):
            inside = [min(max(0, bound - start), total) for bound in bounds]
            yield list(pairwise(inside))
