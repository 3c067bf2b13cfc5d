"""Unequal samples: sampled global batches to plan for, and their assignment to replicas and microbatches.

Plans are made for real global batches rather than average samples (Entrain, arXiv 2605.27918). A few batches are
sampled, arranged over microbatches and replicas, and simulated.
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
    """Division of a stage's work among its replicas."""

    replicas: tuple[int, ...]
    "Shares of the replicas."
    multiple: int = 1
    "Microbatches processed per call."
    divide: Divide = "samples"


AllStageShares = Sequence[StageShares]

Arrange = Callable[["SampledBatches", int, SampleArrangement, AllStageShares, int, "Schedule | None"], Ints]
"""(samples, batch index, loads of the stages, their shares, microbatches, lowered order of actions if microbatches are
reordered) -> for every position of the batch, the index of its sample."""

ASSUMED_PART = 4
"""Without data: every sample has one image of the sequence's tokens divided by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatches:
    """Sampled global batches. Arrays [batch, sample] by space; in spaces that are not named all rows are equal."""

    tokens: Mapping[str, Ints]
    squares: Mapping[str, Ints]
    "Sums over a sample's images of their squared token counts."
    note: str
    "Source of the samples."
    images: Mapping[str, Sequence[Sequence[tuple[int, ...]]]] = field(default_factory=dict)
    "Tokens of every image of a sample, by space; {} if unknown, and then images cannot be divided."

    @property
    def batch_count(self) -> int:
        return min((len(table) for table in self.tokens.values()), default=1)

    def to_space(self, name: str, job: Job, batch: int, order: Ints) -> SampleSpace:
        """Return the space as a plan stores it, with its samples in this order."""
        if name not in self.tokens:
            return SampleSpace(name=name, rows=job.batch, tokens=job.sequence)
        counts, squares = ([int(index) for index in table[name][batch][order]] for table in (self.tokens, self.squares))
        images = tuple(self.images[name][batch][index] for index in order.tolist()) if name in self.images else ()
        return SampleSpace(
            name=name, rows=job.batch, tokens=0, counts=tuple(counts), squares=tuple(squares), images=images
        )

    def select_batches(self, batches: slice) -> SampledBatches:
        """Return a subset of the batches."""
        return replace(
            self,
            tokens={name: table[batches] for name, table in self.tokens.items()},
            squares={name: table[batches] for name, table in self.squares.items()},
            images={name: table[batches] for name, table in self.images.items()},
        )

    def images_per_sample(self, space: str) -> float:
        """Return the mean number of images of a sample; 0 if unknown."""
        if space not in self.images:
            return 0.0
        return float(np.mean([len(sample) for batch in self.images[space] for sample in batch]))


def complete_samples(samples: SampledBatches, model: Model, job: Job) -> SampledBatches:
    """Return the samples with every packed space of the model; a space without samples has no tokens. Raises PlanError
    if the batches do not have the job's size."""
    tokens, squares = dict(samples.tokens), dict(samples.squares)
    for name in [module.space for module in model.modules if module.space != "samples"]:
        tokens.setdefault(name, np.zeros((samples.batch_count, job.batch), dtype=np.int64))
        squares.setdefault(name, np.zeros((samples.batch_count, job.batch), dtype=np.int64))
    for name, table in tokens.items():
        if table.shape != (samples.batch_count, job.batch) or squares[name].shape != table.shape:
            raise PlanError(
                "The sampled batches do not have the job's size.",
                where=f"samples, space {name!r}",
                seen=f"{table.shape} tokens, {squares[name].shape} squares",
                allowed=f"{job.batch} samples in each of them",
            )
    for name, known in samples.images.items():
        image_sums = [[sum(sample) for sample in batch] for batch in known]
        if image_sums != tokens[name].tolist():
            raise PlanError(
                "The images of the sampled batches do not add up to the tokens of their samples.",
                where=f"samples, space {name!r}",
                seen=f"{sum(map(sum, image_sums))} tokens in {len(image_sums)} batches of images",
                allowed=f"{tokens[name].sum()} in {len(tokens[name])}, sample by sample",
            )
    return replace(samples, tokens=tokens, squares=squares)


def assumed_samples(model: Model, job: Job) -> SampledBatches:
    """Return samples for a job without data: one image per sample in every packed space, a fraction of the sequence
    long."""
    tokens_per_image = max(1, job.sequence // ASSUMED_PART)
    names = [module.space for module in model.modules if module.space != "samples"]
    return SampledBatches(
        tokens={name: np.full((1, job.batch), tokens_per_image, dtype=np.int64) for name in names},
        squares={name: np.full((1, job.batch), tokens_per_image * tokens_per_image, dtype=np.int64) for name in names},
        note=f"samples: assumed, each with an image of {tokens_per_image} tokens to encode and to generate",
    )


def samples_of_spaces(spaces: Sequence[SampleSpace], note: str) -> SampledBatches:
    """Return the one batch of samples that the spaces of a plan hold. `note` says where it is from."""
    packed = [space for space in spaces if space.counts]
    return SampledBatches(
        tokens={space.name: np.array([space.counts], dtype=np.int64) for space in packed},
        squares={space.name: np.array([space.squares], dtype=np.int64) for space in packed},
        note=note,
        images={space.name: [space.images] for space in packed if space.images},
    )


def deal_samples(
    samples: SampledBatches,
    batch: int,
    arranging: SampleArrangement,
    shares: AllStageShares,
    count: int,
    schedule: Schedule | None = None,
) -> Ints:
    """Return an arrangement (see `Arrange`) that keeps the order of microbatches, whatever the schedule.

    Samples go into bins, the heaviest first, each into the least loaded bin with room (longest processing time first,
    Graham 1969). A sample's load is the sum over stages of its share of the stage's work. A bin is one replica's part
    of one microbatch on the most finely divided stage that divides samples one microbatch at a time. Similar bins form
    one microbatch, since it waits for its fullest bin; light and heavy microbatches alternate. For uneven replicas,
    microbatches are balanced first, then the replicas of each.
    """
    size = next(iter(samples.tokens.values())).shape[1] if samples.tokens else 0
    if not size:
        return np.zeros(0, dtype=np.int64)
    load = np.zeros(size)
    for stage_load in arranging.loads:
        if stage_load.space in samples.tokens:
            forward_s = (
                stage_load.token_s * samples.tokens[stage_load.space][batch]
                + stage_load.square_s * samples.squares[stage_load.space][batch]
            )
            load += forward_s * (1.0 + stage_load.backward)
    if not arranging.balance or not load.any():
        return np.arange(size, dtype=np.int64)
    finest = max(
        (stage.replicas for stage in shares if stage.multiple == 1 and stage.divide == "samples"), key=len, default=(1,)
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
    """Return the bins in an order that groups similar bins into one microbatch.

    The lightest microbatch comes first, then the heaviest, the next lightest, and so on. Every other pair of
    microbatches is reversed, so that no replica always has the heaviest bin.
    """
    ranked = sorted(bins, key=lambda own: (float(load[own].sum()), own))
    groups = [ranked[start : start + replicas] for start in range(0, len(ranked), replicas)]
    ordered: list[list[int]] = []
    for position in range(len(groups)):
        group = groups[position // 2] if position % 2 == 0 else groups[-1 - position // 2]
        ordered += group if position // 2 % 2 == 0 else group[::-1]
    return ordered


def _lightest_first(heaviest: Ints, load: Array, rooms: Sequence[int]) -> list[list[int]]:
    """Return the samples of each bin: every sample goes to the least loaded bin with room."""
    bins: list[list[int]] = [[] for _ in rooms]
    heap = [(0.0, index) for index, room in enumerate(rooms) if room]
    heapq.heapify(heap)
    for sample in heaviest.tolist():
        total, index = heapq.heappop(heap)
        bins[index].append(sample)
        if len(bins[index]) < rooms[index]:
            heapq.heappush(heap, (total + float(load[sample]), index))
    return bins
