"""Costs of a module for dividing devices among modules: by shards and recomputation, layer by layer.

Costs are those of one replica on one device of its shard group, and affine in the samples of a microbatch: a fixed part
for launches, and a part per sample (reference: the profiles C(TP) of DistTrain, section 5). A sample is an average one;
`weights` say how samples differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array, Ints
from pipefit.model.analysis.saved import Recompute
from pipefit.plan.modules.loads import SampleDealer
from pipefit.plan.modules.module_budgets import DIVISION_BUDGET

NEARLY = 1 - 1e-12
"""Tolerance for rounding in comparisons of sizes."""

FIGURE_NAMES = (
    "fixed_s", "sample_s", "static_bytes", "state_bytes", "saved_bytes", "gradient_bytes", "passing_bytes", "behind",
)  # fmt: skip
"""Columns of a stage in `StageCuts`: sums over its layers, but the maximum of `passing_bytes`; `behind` is the number
of stages of the module from this one on, including it."""


@dataclass(frozen=True, kw_only=True)
class ModuleVariant:
    """One variant of a module: its shards and recomputation. Arrays have an entry for each layer."""

    shards: int
    recompute: Recompute = "none"
    fixed_s: Array
    "Forward and backward of a microbatch, independent of its samples."
    sample_s: Array
    "Time of each sample. A frozen module has only a forward if nothing before it trains."
    static_bytes: Array
    "Parameters and gradients on a device."
    state_bytes: Array
    "Optimizer state before it is sharded over the replicas (ZeRO-1)."
    saved_bytes: Array
    "Activations of one sample kept from forward to backward."
    passing_bytes: Array
    "Transient memory of the layer for one sample while it runs."
    gradient_bytes: Array
    "Gradients reduced over the replicas once a step."

    @cached_property
    def stage_cuts(self) -> StageCuts:
        """Cuts of the layers into one stage, two, and so on."""
        return StageCuts(self)


@dataclass(frozen=True, kw_only=True)
class ModuleProfile:
    """A module and its variants."""

    name: str
    ways: tuple[ModuleVariant, ...]
    weights: Array = field(default_factory=lambda: np.ones((1, 0)))
    "[sampled batch, sample]: cost of a sample relative to an average one; no columns: all samples are alike."
    overhead_s: float = 0.0
    "Overhead of one stage's forward and backward, besides its layers."
    reduce_s_per_byte: float = 0.0
    "Gradient reduction over many replicas, per byte."
    workspace_bytes: float = 0.0
    "Memory on every device besides that of the layers."
    parts: float = 0.0
    "Mean number of images of a sample if its replicas divide images; 0: they divide samples."

    @cached_property
    def all_cuts(self) -> AllCuts:
        """Cuts of all variants."""
        return AllCuts(self.ways)

    @cached_property
    def variant_totals(self) -> VariantTotals:
        """Sums over all layers for each variant."""
        return VariantTotals(self.ways)

    @cached_property
    def mean_cost(self) -> float:
        """Mean cost of a sample."""
        return float(self.weights.mean()) if self.weights.size else 1.0

    def replica_loads(self, microbatches: int, replicas: Ints, samples: int) -> tuple[Array, Array]:
        """Return the (mean, largest) load of the fullest replica of a microbatch, for each of these counts of replicas.

        A load is in average samples; a microbatch has `samples` samples.
        """
        if not self.parts:
            return self.sample_dealer.loads_by_replicas(microbatches, replicas, samples)
        largest = self.sample_dealer.fullest_load(microbatches, 1, samples)[1]
        piece_cost = self.mean_cost / self.parts
        return piece_cost * np.ceil(samples * self.parts / replicas), largest / replicas + piece_cost

    def most_replicas(self, samples: int, fixed: bool = False) -> int:
        """Return the maximum useful number of replicas: one for each sample of a microbatch, or for each image on
        average.

        A module that divides images may have any number of replicas if it is `fixed`.
        """
        if not self.parts:
            return samples
        return 1 << 30 if fixed else max(1, int(samples * self.parts))

    @cached_property
    def sample_dealer(self) -> SampleDealer:
        """The dealer of the samples."""
        return SampleDealer(self.weights)


class VariantTotals:
    """Sums over all layers, with an entry for each variant; the maximum of `passing_bytes`."""

    def __init__(self, ways: Sequence[ModuleVariant]) -> None:
        self.shards: Ints = np.array([variant.shards for variant in ways], dtype=np.int64)
        self.fixed_s: Array = np.array([variant.fixed_s.sum() for variant in ways])
        self.sample_s: Array = np.array([variant.sample_s.sum() for variant in ways])
        self.static_bytes: Array = np.array([variant.static_bytes.sum() for variant in ways])
        self.state_bytes: Array = np.array([variant.state_bytes.sum() for variant in ways])
        self.saved_bytes: Array = np.array([variant.saved_bytes.sum() for variant in ways])
        self.passing_bytes: Array = np.array([variant.passing_bytes.max() for variant in ways])
        self.gradient_bytes: Array = np.array([variant.gradient_bytes.sum() for variant in ways])


class AllCuts:
    """Cuts of several variants, one variant after the other."""

    def __init__(self, ways: Sequence[ModuleVariant]) -> None:
        cuts_by_variant = [variant.stage_cuts for variant in ways]
        sizes = [len(cuts.counts) for cuts in cuts_by_variant]
        self.way: Ints = np.repeat(np.arange(len(ways)), sizes)
        self.row: Ints = np.concatenate([np.arange(size) for size in sizes])
        "Index of a cut among those of its variant."
        self.start: Ints = np.cumsum([0, *sizes[:-1]])
        "First cut of every variant."
        self.shards: Ints = np.repeat([variant.shards for variant in ways], sizes)
        self.counts: Ints = np.concatenate([cuts.counts for cuts in cuts_by_variant])
        "Number of stages."
        self.sizes: Ints = np.concatenate([cuts.sizes for cuts in cuts_by_variant])
        self.first: Ints = np.cumsum(self.sizes) - self.sizes
        self.stages: dict[str, Array] = dict(
            zip(FIGURE_NAMES, np.concatenate([cuts.stages for cuts in cuts_by_variant], axis=1), strict=True)
        )
        "The columns of `StageCuts`, by name."
        self.most_gradient_bytes = self.largest_stages(self.stages["gradient_bytes"])

    def largest_stages(self, stages: Array) -> Array:
        """[..., cut]: the largest of the stages of every cut."""
        largest: Array = np.maximum.reduceat(stages, self.first, axis=-1)
        return largest

    def smallest_stages(self, stages: Array) -> Array:
        """[..., cut]: the smallest of the stages of every cut."""
        smallest: Array = np.minimum.reduceat(stages, self.first, axis=-1)
        return smallest


class StageCuts:
    """For counts of stages, the cut whose slowest stage is fastest for an average sample, with sums over layers by
    stage.

    Only undominated stages are stored, one cut after the other: `sizes[i]` stages of the i-th cut from `first[i]` on. A
    stage is left out if another of the same cut takes and needs at least as much, with more stages behind it: it is
    neither the slowest nor the fullest. A count is left out if every stage of a smaller one has a stage here that takes
    and needs at least as much, with at least as many stages behind it: it cannot be better.
    """

    def __init__(self, way: ModuleVariant) -> None:
        cuts = even_cuts(way.fixed_s + way.sample_s)
        stages, first = _stage_columns(way, cuts)
        tells = _undominated_stages(stages, first)
        stages_by_cut = np.split(stages[:, tells], np.cumsum(np.add.reduceat(tells, first))[:-1], axis=1)
        largest = np.maximum.reduceat(stages, first, axis=1)
        may_be_worse = np.logical_and.reduce(largest[:, :, None] >= largest[:, None, :] * NEARLY)
        cut_indices: list[int] = []
        for index, cut_stages in enumerate(stages_by_cut):
            last = cut_indices[: -1 - DIVISION_BUDGET.compared_stage_counts : -1]
            smaller_counts = (smaller for smaller in last if may_be_worse[index, smaller])
            if not any(_no_better(cut_stages, stages_by_cut[smaller]) for smaller in smaller_counts):
                cut_indices.append(index)
        self.bounds = tuple(cuts[index] for index in cut_indices)
        self.counts: Ints = np.array(cut_indices, dtype=np.int64) + 1
        self.sizes: Ints = np.array([stages_by_cut[index].shape[1] for index in cut_indices], dtype=np.int64)
        self.first: Ints = np.cumsum([0, *self.sizes[:-1]])
        self.stages: Array = np.concatenate([stages_by_cut[index] for index in cut_indices], axis=1)
        "[FIGURE_NAMES, stage]"


def _stage_columns(way: ModuleVariant, cuts: Sequence[tuple[int, ...]]) -> tuple[Array, Ints]:
    """Return ([FIGURE_NAMES, stage] of one cut after the other, index of the first stage of each)."""
    layers = len(way.sample_s)
    starts = np.concatenate([np.array(bounds[:-1]) + index * layers for index, bounds in enumerate(cuts)])
    counts = np.array([len(bounds) - 1 for bounds in cuts])
    first = np.cumsum(counts) - counts
    summed = np.tile(np.stack([getattr(way, name) for name in FIGURE_NAMES[:-2]]), len(cuts))
    columns = np.empty((len(FIGURE_NAMES), len(starts)))
    columns[:-2] = np.add.reduceat(summed, starts, axis=1)
    columns[-2] = np.maximum.reduceat(np.tile(way.passing_bytes, len(cuts)), starts)
    columns[-1] = np.repeat(first + counts, counts) - np.arange(len(starts))
    return columns, first


def _undominated_stages(stages: Array, first: Ints) -> NDArray[np.bool_]:
    """Return a mask of the stages that are not dominated by a few strong stages of their cut.

    These are its first stage, the stages that are the largest in some quantity, and the slowest stage between the first
    and the last one, whose layers are most often alike.
    """
    sizes = np.diff([*first, stages.shape[1]])
    cut = np.repeat(np.arange(len(first)), sizes)
    undominated = np.ones(stages.shape[1], dtype=np.bool_)
    between = stages[1].copy()
    between[first] = between[first + sizes - 1] = -1.0
    best = [first]
    for column in (stages[1], stages[2], stages[4], between):
        hits = np.flatnonzero(column == np.maximum.reduceat(column, first)[cut])
        best.append(hits[np.searchsorted(cut[hits], np.arange(len(first)))])
    for strong in best:
        beaten = np.logical_and.reduce(stages[:, strong][:, cut] >= stages)
        beaten[strong] = False
        undominated &= ~beaten
    return undominated


def _no_better(stages: Array, than: Array) -> bool:
    """Return whether every stage of `than` has one among `stages` that is at least as large in everything."""
    larger = np.logical_and.reduce(stages[:, None, :] >= than[:, :, None] * NEARLY)
    return bool(np.logical_or.reduce(larger, axis=1).all())


def even_cuts(seconds: Array) -> list[tuple[int, ...]]:
    """Return the boundaries (0, cut, ..., layers) with the fastest slowest stage, for one stage up to one for each
    layer.

    Exact: the min-max recursion, O(layers^3) in arrays.
    """
    layers = len(seconds)
    sums = np.concatenate(([0.0], np.cumsum(seconds)))
    run = sums[:, None] - sums[None, :]  # [stop, start]
    run[np.triu_indices(layers + 1)] = np.inf  # no empty stages
    best = run[:, 0].copy()
    chosen = np.zeros((layers + 1, layers + 1), dtype=np.int64)
    for stages in range(2, layers + 1):  # the last of `stages` stages starts after at least `stages - 1` layers
        slowest = np.maximum(best[stages - 1 : layers], run[stages:, stages - 1 : layers])
        starts = slowest.argmin(axis=1)
        best[stages:] = slowest[np.arange(len(starts)), starts]
        best[stages - 1] = np.inf
        chosen[stages, stages:] = starts + stages - 1
    stops = np.full(layers + 1, layers)
    bounds = np.zeros((layers + 1, layers + 1), dtype=np.int64)
    for stages in range(layers, 1, -1):  # the start of the last stage, for all cuts with at least `stages` stages
        stops[stages:] = chosen[stages, stops[stages:]]
        bounds[stages:, stages - 1] = stops[stages:]
    return [(*bounds[stages, :stages].tolist(), layers) for stages in range(1, layers + 1)]
