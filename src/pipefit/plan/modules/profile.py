"""What a module costs, as far as dividing devices among modules asks: by shards and recomputation, layer by layer.

Everything is that of one replica on one device of its shard group, and affine in the samples of a microbatch: launches
take what they take, the rest grows with the samples (reference: the profiles C(TP) of DistTrain, section 5). A sample
is an average one; `weights` say how samples differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array
from pipefit.cost.work import Recompute
from pipefit.plan.bounds.step_bounds import Ints
from pipefit.plan.modules.loads import SampleDealer

COMPARED = 3
"""Smaller counts of stages that a count is compared with."""

NEARLY = 1 - 1e-12
"""What is this part of something is as large, but for rounding."""

COLUMNS = (
    "fixed_s", "sample_s", "static_bytes", "state_bytes", "saved_bytes", "gradient_bytes", "passing_bytes", "behind",
)  # fmt: skip
"""Of a stage in `StageCuts`: sums over its layers, but of what they need in passing the most; last the stages of the
module from this one on, itself included."""


@dataclass(frozen=True, kw_only=True)
class ModuleVariant:
    """One way of running a module: its shards, and what it recomputes. Arrays have an entry for each layer."""

    shards: int
    recompute: Recompute = "none"
    fixed_s: Array
    "Forward and backward of a microbatch, whatever it holds."
    sample_s: Array
    "What each sample adds. A frozen module has its forward alone where nothing before it trains."
    static_bytes: Array
    "Parameters and gradients on a device."
    state_bytes: Array
    "Optimizer state, whole: the replicas split it (ZeRO-1)."
    saved_bytes: Array
    "What one sample keeps from its forward to its backward."
    passing_bytes: Array
    "What the layer needs for one sample, beside what is kept, while it runs."
    gradient_bytes: Array
    "What the replicas add up once a step."

    @cached_property
    def stage_cuts(self) -> StageCuts:
        """The cuts of the layers into one stage, two, and so on."""
        return StageCuts(self)


@dataclass(frozen=True, kw_only=True)
class ModuleProfile:
    """A module and the ways in which it may run."""

    name: str
    ways: tuple[ModuleVariant, ...]
    weights: Array = field(default_factory=lambda: np.ones((1, 0)))
    "[sampled batch, sample]: what a sample costs, an average one being 1; no columns: all samples are alike."
    overhead_s: float = 0.0
    "Of one stage's forward and backward, beside its layers."
    reduce_s_per_byte: float = 0.0
    "Of adding up gradients over many replicas: what a byte takes."
    workspace_bytes: float = 0.0
    "On every device beside what layers hold."
    parts: float = 0.0
    "Where its replicas divide images, how many an average sample has; 0: they divide samples."

    @cached_property
    def all_cuts(self) -> AllCuts:
        """The cuts of all ways."""
        return AllCuts(self.ways)

    @cached_property
    def variant_totals(self) -> VariantTotals:
        """What each way comes to over all layers."""
        return VariantTotals(self.ways)

    @cached_property
    def mean_cost(self) -> float:
        """What a sample costs on average."""
        return float(self.weights.mean()) if self.weights.size else 1.0

    def replica_loads(self, microbatches: int, replicas: Ints, samples: int) -> tuple[Array, Array]:
        """What the fullest replica of a microbatch of so many samples gets, for each of these counts of replicas, in
        average samples: on average, and at most."""
        if not self.parts:
            return self.sample_dealer.loads_by_replicas(microbatches, replicas, samples)
        most = self.sample_dealer.fullest_load(microbatches, 1, samples)[1]
        one = self.mean_cost / self.parts
        return one * np.ceil(samples * self.parts / replicas), most / replicas + one

    def most_replicas(self, samples: int, fixed: bool = False) -> int:
        """How many replicas a microbatch of so many samples is worth, at most: one for each of them, or for each image
        on average. Who divides images may have any number of replicas, if it is `fixed`."""
        if not self.parts:
            return samples
        return 1 << 30 if fixed else max(1, int(samples * self.parts))

    @cached_property
    def sample_dealer(self) -> SampleDealer:
        """Deals out the samples."""
        return SampleDealer(self.weights)


class VariantTotals:
    """Sums over all layers, with an entry for each way; of what they need in passing, the most."""

    def __init__(self, ways: Sequence[ModuleVariant]) -> None:
        self.shards: Ints = np.array([way.shards for way in ways], dtype=np.int64)
        self.fixed_s: Array = np.array([way.fixed_s.sum() for way in ways])
        self.sample_s: Array = np.array([way.sample_s.sum() for way in ways])
        self.static_bytes: Array = np.array([way.static_bytes.sum() for way in ways])
        self.state_bytes: Array = np.array([way.state_bytes.sum() for way in ways])
        self.saved_bytes: Array = np.array([way.saved_bytes.sum() for way in ways])
        self.passing_bytes: Array = np.array([way.passing_bytes.max() for way in ways])
        self.gradient_bytes: Array = np.array([way.gradient_bytes.sum() for way in ways])


class AllCuts:
    """The cuts of several ways, one way after the other."""

    def __init__(self, ways: Sequence[ModuleVariant]) -> None:
        each = [way.stage_cuts for way in ways]
        sizes = [len(cuts.counts) for cuts in each]
        self.way: Ints = np.repeat(np.arange(len(ways)), sizes)
        self.row: Ints = np.concatenate([np.arange(size) for size in sizes])
        "Which one of its way's a cut is."
        self.start: Ints = np.cumsum([0, *sizes[:-1]])
        "The first cut of every way."
        self.shards: Ints = np.repeat([way.shards for way in ways], sizes)
        self.counts: Ints = np.concatenate([cuts.counts for cuts in each])
        "Stages."
        self.sizes: Ints = np.concatenate([cuts.sizes for cuts in each])
        self.first: Ints = np.cumsum(self.sizes) - self.sizes
        self.stages: dict[str, Array] = dict(
            zip(COLUMNS, np.concatenate([cuts.stages for cuts in each], axis=1), strict=True)
        )
        "By their names, the columns of `StageCuts`."
        self.most_gradient_bytes = self.largest_stages(self.stages["gradient_bytes"])

    def largest_stages(self, stages: Array) -> Array:
        """[..., cut]: the largest of the stages of every cut."""
        found: Array = np.maximum.reduceat(stages, self.first, axis=-1)
        return found

    def smallest_stages(self, stages: Array) -> Array:
        """[..., cut]: the smallest of the stages of every cut."""
        found: Array = np.minimum.reduceat(stages, self.first, axis=-1)
        return found


class StageCuts:
    """For counts of stages, the cut whose slowest stage is fastest for an average sample, and sums over the layers of
    those of its stages that tell: one run of stages after the other, `sizes[i]` of the i-th cut from `first[i]` on.

    A stage is left out if another of the same cut takes and needs at least as much, with more stages behind it: it is
    neither the slowest nor the fullest. A count is left out if every stage of a smaller one has a stage here that takes
    and needs at least as much, with at least as many stages behind it: it cannot be better.
    """

    def __init__(self, way: ModuleVariant) -> None:
        cuts = even_cuts(way.fixed_s + way.sample_s)
        stages, first = _stage_columns(way, cuts)
        tells = _undominated_stages(stages, first)
        own = np.split(stages[:, tells], np.cumsum(np.add.reduceat(tells, first))[:-1], axis=1)
        largest = np.maximum.reduceat(stages, first, axis=1)
        may_be_worse = np.logical_and.reduce(largest[:, :, None] >= largest[:, None, :] * NEARLY)
        kept: list[int] = []
        for index, each in enumerate(own):
            others = (other for other in kept[: -1 - COMPARED : -1] if may_be_worse[index, other])
            if not any(_no_better(each, own[other]) for other in others):
                kept.append(index)
        self.bounds = tuple(cuts[index] for index in kept)
        self.counts: Ints = np.array(kept, dtype=np.int64) + 1
        self.sizes: Ints = np.array([own[index].shape[1] for index in kept], dtype=np.int64)
        self.first: Ints = np.cumsum([0, *self.sizes[:-1]])
        self.stages: Array = np.concatenate([own[index] for index in kept], axis=1)
        "[COLUMNS, stage]"


def _stage_columns(way: ModuleVariant, cuts: Sequence[tuple[int, ...]]) -> tuple[Array, Ints]:
    """([COLUMNS, stage] of one cut after the other, where each begins)."""
    layers = len(way.sample_s)
    starts = np.concatenate([np.array(bounds[:-1]) + index * layers for index, bounds in enumerate(cuts)])
    counts = np.array([len(bounds) - 1 for bounds in cuts])
    first = np.cumsum(counts) - counts
    summed = np.tile(np.stack([getattr(way, name) for name in COLUMNS[:-2]]), len(cuts))
    found = np.empty((len(COLUMNS), len(starts)))
    found[:-2] = np.add.reduceat(summed, starts, axis=1)
    found[-2] = np.maximum.reduceat(np.tile(way.passing_bytes, len(cuts)), starts)
    found[-1] = np.repeat(first + counts, counts) - np.arange(len(starts))
    return found, first


def _undominated_stages(stages: Array, first: Ints) -> NDArray[np.bool_]:
    """Which stages are not outdone by the first one of their cut, or by one that is the largest of it in something, or
    the slowest of those between the first and the last one, whose layers are most often alike."""
    sizes = np.diff([*first, stages.shape[1]])
    cut = np.repeat(np.arange(len(first)), sizes)
    found = np.ones(stages.shape[1], dtype=np.bool_)
    between = stages[1].copy()
    between[first] = between[first + sizes - 1] = -1.0
    best = [first]
    for column in (stages[1], stages[2], stages[4], between):
        hits = np.flatnonzero(column == np.maximum.reduceat(column, first)[cut])
        best.append(hits[np.searchsorted(cut[hits], np.arange(len(first)))])
    for one in best:
        beaten = np.logical_and.reduce(stages[:, one][:, cut] >= stages)
        beaten[one] = False
        found &= ~beaten
    return found


def _no_better(stages: Array, than: Array) -> bool:
    """Whether every stage of `than` has one among `stages` that is at least as large in everything."""
    larger = np.logical_and.reduce(stages[:, None, :] >= than[:, :, None] * NEARLY)
    return bool(np.logical_or.reduce(larger, axis=1).all())


def even_cuts(seconds: Array) -> list[tuple[int, ...]]:
    """For one stage, two, ... up to one for each layer, the boundaries (0, cut, ..., layers) whose slowest stage is
    fastest. Exact: the min-max recursion, O(layers^3) in arrays."""
    layers = len(seconds)
    sums = np.concatenate(([0.0], np.cumsum(seconds)))
    run = sums[:, None] - sums[None, :]  # [stop, start]
    run[np.triu_indices(layers + 1)] = np.inf  # an empty run is none
    best = run[:, 0].copy()
    chosen = np.zeros((layers + 1, layers + 1), dtype=np.int64)
    for stages in range(2, layers + 1):  # the last of so many stages starts behind as many layers less one
        slowest = np.maximum(best[stages - 1 : layers], run[stages:, stages - 1 : layers])
        starts = slowest.argmin(axis=1)
        best[stages:] = slowest[np.arange(len(starts)), starts]
        best[stages - 1] = np.inf
        chosen[stages, stages:] = starts + stages - 1
    at = np.full(layers + 1, layers)
    bounds = np.zeros((layers + 1, layers + 1), dtype=np.int64)
    for stages in range(layers, 1, -1):  # of all cuts with at least so many stages, where that one starts
        at[stages:] = chosen[stages, at[stages:]]
        bounds[stages:, stages - 1] = at[stages:]
    return [(*bounds[stages, :stages].tolist(), layers) for stages in range(1, layers + 1)]
