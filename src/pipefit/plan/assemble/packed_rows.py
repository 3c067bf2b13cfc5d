"""Unequal rows: tokens of every replica in every microbatch, from the counts of a sampled batch.

Position r of the batch belongs to microbatch r // (positions / microbatches). Within it, it belongs to the replica
whose run of positions contains it (`layout.split_by_shares` by the shares of the stage's mesh). In a packed space a
replica holds the tokens of its samples, concatenated. On a stage that divides images, it holds its run of the images of
one call (`image_split.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from pipefit.cost.types import Ints
from pipefit.layout import Mesh, Run, split_by_shares
from pipefit.model.graph import Model
from pipefit.plan.assemble.image_split import image_runs, token_runs
from pipefit.plan.types import Divide, SampleSpace, Stage

CONDITIONS: Mapping[str, str] = {"I": "patches", "L": "latents"}
"""Symbols of the graphs in which a packed row meets a sequence, with the space of their tokens."""


@dataclass(frozen=True, slots=True)
class MicrobatchGrouping:
    """Grouping of a packed space's microbatches into calls of a stage."""

    multiple: int = 1
    "Microbatches per call."
    divide: Divide = "samples"
    "Unit that the replicas divide."


def stage_grouping(stage: Stage) -> MicrobatchGrouping:
    """Return the grouping of this stage."""
    return MicrobatchGrouping(stage.microbatch_multiple, stage.divide)


ONE_BY_ONE = MicrobatchGrouping()


def packed_sizes(
    space: SampleSpace, microbatches: int, shares: Sequence[int], how: MicrobatchGrouping = ONE_BY_ONE
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return [microbatch][replica]: (tokens, sum of squared tokens of images); empty if all rows are equal.

    If a stage processes several microbatches per call, each of them has the sizes of the whole call.
    """
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
    """Yield, for every microbatch, its tokens and the runs of tokens that the replicas of both groups hold. `how` is
    the grouping of the source and target stages."""
    ends = [
        _runs_of(space, microbatches, group.find_axis("replica").shares, grouping)
        for group, grouping in zip((source, target), how, strict=True)
    ]
    totals = np.asarray(space.counts, dtype=np.int64).reshape(microbatches, -1).sum(axis=1)
    for total, sent, received in zip(totals.tolist(), *ends, strict=True):
        yield total, (sent, received)


def sample_runs(starts: Sequence[int], shares: Sequence[int]) -> list[Run]:
    """Return the run of tokens of each replica, for consecutive samples of one call divided by shares.

    `starts` are the first token of every sample, and the end of the last; the runs count from the first.
    """
    samples = split_by_shares(len(starts) - 1, shares)
    return [(starts[first] - starts[0], starts[stop] - starts[0]) for first, stop in samples]


def runs_within(runs: Sequence[Run], start: int, total: int) -> tuple[Run, ...]:
    """Return the parts of a call's runs in its microbatch of `total` tokens that begins at token `start`."""
    return tuple((min(max(0, first - start), total), min(max(0, stop - start), total)) for first, stop in runs)


def packed_symbols(spaces: Sequence[SampleSpace], microbatches: int, share: float) -> tuple[tuple[str, int], ...]:
    """Return the symbols of packed rows attached to a sequence, with their mean tokens per microbatch on a replica of
    this share. Empty for a text model."""
    known = {space.name: space for space in spaces if space.counts}
    return tuple(
        (symbol, round(sum(known[name].counts) / microbatches * share))
        for symbol, name in CONDITIONS.items()
        if name in known
    )


def frozen_layers(model: Model) -> dict[str, int]:
    """Return, for each module, the number of leading layers without a backward pass: no layer up to them is trained. 0
    for all modules if the model has no trained parameter."""
    frozen: dict[str, int] = {}
    reached = False
    for module in model.modules:
        frozen[module.name] = 0
        for layer in module.layers:
            reached = reached or any(parameter.trainable for parameter in model.layer_graph(layer).parameters)
            frozen[module.name] += not reached
    return frozen if reached else dict.fromkeys(frozen, 0)


def _by_replica(counts: Sequence[int], microbatches: int, shares: Sequence[int]) -> Ints:
    """Return [microbatch, replica]: sums over the positions of each."""
    table = np.asarray(counts, dtype=np.int64).reshape(microbatches, -1)
    sums = _running_sums(table)
    starts, stops = np.array(split_by_shares(table.shape[1], shares)).T
    per_replica: Ints = sums[:, stops] - sums[:, starts]
    return per_replica


def _image_tokens(space: SampleSpace, units: int) -> Iterator[list[int]]:
    """Yield the tokens of the images of each call."""
    rows = len(space.images) // units
    for start in range(0, units * rows, rows):
        yield list(chain.from_iterable(space.images[start : start + rows]))


def _replica_image_sizes(tokens: Sequence[int], shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return (tokens, sum of squared tokens) of each replica's images."""
    runs = [tokens[start:stop] for start, stop in image_runs(tokens, shares)]
    return tuple((sum(images), sum(count * count for count in images)) for images in runs)


def _runs_of(
    space: SampleSpace, microbatches: int, shares: Sequence[int], how: MicrobatchGrouping
) -> Iterator[list[Run]]:
    """Yield, for every microbatch, the run of its tokens on each replica: the overlap of the replica's run of the call
    with the microbatch."""
    units = microbatches // how.multiple
    counts = np.asarray(space.counts, dtype=np.int64).reshape(units, -1)
    totals = counts.reshape(units, how.multiple, -1).sum(axis=2)
    if how.divide == "images":
        held = [token_runs(tokens, shares) for tokens in _image_tokens(space, units)]
    else:
        held = [sample_runs(starts, shares) for starts in _running_sums(counts).tolist()]
    for runs, unit_totals in zip(held, totals.tolist(), strict=True):
        for start, total in zip(accumulate(unit_totals, initial=0), unit_totals, strict=False):
            yield list(runs_within(runs, start, total))


def _running_sums(table: Ints) -> Ints:
    """Return the sums of the columns before each column, and of all of them."""
    sums: Ints = np.concatenate([np.zeros((len(table), 1), np.int64), table.cumsum(axis=1)], axis=1)
    return sums
