"""Samples that differ: what is known of them when a plan is made, and who takes which of a batch.

A plan is made for whole global batches, not for average samples (Entrain, arXiv 2605.27918): a few are sampled, each
arranged over microbatches and replicas, and simulated as it would run.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from pipefit.cost.types import Array, Ints
from pipefit.errors import PlanError
from pipefit.layout import split_by_shares
from pipefit.model.graph import Model
from pipefit.plan.types import Divide, Job, SampleArrangement, SampleSpace
from pipefit.schedule.actions import Schedule


class StageShares(NamedTuple):
    """Who takes what of a stage."""

    replicas: tuple[int, ...]
    "Their shares."
    multiple: int = 1
    "How many microbatches are taken together."
    divide: Divide = "samples"


Shares = Sequence[StageShares]

Arrange = Callable[["SampledBatches", int, SampleArrangement, Shares, int, "Schedule | None"], Ints]
"""(samples, which batch, loads of the stages, their shares, microbatches, the lowered order of actions where
microbatches are put in order) -> for every position of the batch, which of its samples stands there."""

ASSUMED_PART = 4
"""Where nothing is known of the samples: every sample has one image of the sequence's tokens over this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatches:
    """Sampled global batches. Arrays [batch, sample] by space; spaces that are not named have rows that are alike."""

    tokens: Mapping[str, Ints]
    squares: Mapping[str, Ints]
    "Sums over a sample's images of their tokens squared."
    note: str
    "Where they come from."
    images: Mapping[str, Sequence[Sequence[tuple[int, ...]]]] = field(default_factory=dict)
    "Tokens of every image of a sample, likewise; {} where they are not known, and cannot be divided."

    @property
    def batch_count(self) -> int:
        return min((len(one) for one in self.tokens.values()), default=1)

    def to_space(self, name: str, job: Job, batch: int, order: Ints) -> SampleSpace:
        """The space as a plan has it, its samples in this order."""
        if name not in self.tokens:
            return SampleSpace(name=name, rows=job.batch, tokens=job.sequence)
        counts, squares = ([int(one) for one in table[name][batch][order]] for table in (self.tokens, self.squares))
        images = tuple(self.images[name][batch][one] for one in order.tolist()) if name in self.images else ()
        return SampleSpace(
            name=name, rows=job.batch, tokens=0, counts=tuple(counts), squares=tuple(squares), images=images
        )

    def select_batches(self, batches: slice) -> SampledBatches:
        """Some of the batches alone."""
        return replace(
            self,
            tokens={name: table[batches] for name, table in self.tokens.items()},
            squares={name: table[batches] for name, table in self.squares.items()},
            images={name: table[batches] for name, table in self.images.items()},
        )

    def images_per_sample(self, space: str) -> float:
        """How many images a sample has on average; 0 where that is not known."""
        if space not in self.images:
            return 0.0
        return float(np.mean([len(one) for batch in self.images[space] for one in batch]))


def complete_samples(samples: SampledBatches, model: Model, job: Job) -> SampledBatches:
    """With every packed space of the model; one that is not named has no tokens. Raises PlanError for batches of
    another size than the job's."""
    tokens, squares = dict(samples.tokens), dict(samples.squares)
    for name in [module.space for module in model.modules if module.space != "samples"]:
        tokens.setdefault(name, np.zeros((samples.batch_count, job.batch), dtype=np.int64))
        squares.setdefault(name, np.zeros((samples.batch_count, job.batch), dtype=np.int64))
    for name, table in tokens.items():
        if table.shape != (samples.batch_count, job.batch) or squares[name].shape != table.shape:
            raise PlanError(
                "The sampled batches are not of the size of the job's.",
                where=f"samples, space {name!r}",
                seen=f"{table.shape} tokens, {squares[name].shape} squares",
                allowed=f"{job.batch} samples in each of them",
            )
    for name, known in samples.images.items():
        told = [[sum(each) for each in batch] for batch in known]
        if told != tokens[name].tolist():
            raise PlanError(
                "The images of the sampled batches do not have the tokens of their samples.",
                where=f"samples, space {name!r}",
                seen=f"{sum(map(sum, told))} tokens in {len(told)} batches of images",
                allowed=f"{tokens[name].sum()} in {len(tokens[name])}, sample by sample",
            )
    return replace(samples, tokens=tokens, squares=squares)


def assumed_samples(model: Model, job: Job) -> SampledBatches:
    """One image a sample in every packed space, of a part of the sequence: where no data is named."""
    each = max(1, job.sequence // ASSUMED_PART)
    names = [module.space for module in model.modules if module.space != "samples"]
    return SampledBatches(
        tokens={name: np.full((1, job.batch), each, dtype=np.int64) for name in names},
        squares={name: np.full((1, job.batch), each * each, dtype=np.int64) for name in names},
        note=f"samples: every one with an image of {each} tokens to see and to generate: assumed",
    )


def deal_samples(
    samples: SampledBatches,
    batch: int,
    arranging: SampleArrangement,
    shares: Shares,
    count: int,
    schedule: Schedule | None = None,
) -> Ints:
    """An `Arrange` that leaves microbatches in their order, whatever the schedule: samples go into bins, the heaviest
    first, each into the bin with the least load that has room (longest processing time first, Graham 1969). A bin is
    what a replica of the most finely divided stage has in one microbatch (of those that take them one by one, and
    divide samples); bins that are alike come together in one, because it waits for its fullest, and light microbatches
    alternate with heavy ones. Where the replicas are uneven, microbatches are balanced first and then each of them. The
    load of a sample is the sum over stages of its part of the stage's work."""
    size = next(iter(samples.tokens.values())).shape[1] if samples.tokens else 0
    if not size:
        return np.zeros(0, dtype=np.int64)
    load = np.zeros(size)
    for one in arranging.loads:
        if one.space in samples.tokens:
            own = one.token_s * samples.tokens[one.space][batch] + one.square_s * samples.squares[one.space][batch]
            load += own * (1.0 + one.backward)
    if not arranging.balance or not load.any():
        return np.arange(size, dtype=np.int64)
    finest = max(
        (own.replicas for own in shares if own.multiple == 1 and own.divide == "samples"), key=len, default=(1,)
    )
    rooms = [stop - start for start, stop in split_by_shares(size // count, finest)]
    heaviest = np.argsort(-load, kind="stable")
    if len({*rooms}) == 1:
        bins = _lightest_first(heaviest, load, rooms * count)
        return np.array(list(itertools.chain.from_iterable(_order_bins(bins, load, len(rooms)))), dtype=np.int64)
    order: list[int] = []
    for own_rows in _lightest_first(heaviest, load, [size // count] * count):
        for replica in _lightest_first(np.array(own_rows), load, rooms):
            order += replica
    return np.array(order, dtype=np.int64)


def _order_bins(bins: Sequence[list[int]], load: Array, replicas: int) -> list[list[int]]:
    """The bins in an order in which those of one microbatch are alike; the lightest microbatch first, then the
    heaviest, the next lightest, and so on. Every other microbatch is turned round, so that no replica always has the
    heaviest bin."""
    ranked = sorted(bins, key=lambda own: (float(load[own].sum()), own))
    groups = [ranked[start : start + replicas] for start in range(0, len(ranked), replicas)]
    found: list[list[int]] = []
    for place in range(len(groups)):
        group = groups[place // 2] if place % 2 == 0 else groups[-1 - place // 2]
        found += group if place // 2 % 2 == 0 else group[::-1]
    return found


def _lightest_first(heaviest: Ints, load: Array, rooms: Sequence[int]) -> list[list[int]]:
    """Who goes into which bin: each to the bin with the least load that has room."""
    bins: list[list[int]] = [[] for _ in rooms]
    heap = [(0.0, index) for index, room in enumerate(rooms) if room]
    heapq.heapify(heap)
    for one in heaviest.tolist():
        total, index = heapq.heappop(heap)
        bins[index].append(one)
        if len(bins[index]) < rooms[index]:
            heapq.heappush(heap, (total + float(load[one]), index))
    return bins
