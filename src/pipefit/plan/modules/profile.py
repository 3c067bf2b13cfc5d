"""What a module costs, as far as dividing devices among modules asks: by shards and recomputation, layer by layer.

Everything is that of one replica on one device of its shard group, and affine in the samples of a microbatch: launches
take what they take, the rest grows with the samples (reference: the profiles C(TP) of DistTrain, section 5). A sample
is an average one; `weights` say how samples differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipefit.cost.types import Array
from pipefit.cost.work import Recompute
from pipefit.plan.bounds import Ints

COMPARED = 3
"""Smaller counts of stages that a count is compared with."""


@dataclass(frozen=True, kw_only=True)
class Way:
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
    def cuts(self) -> StageCuts:
        """The cuts of the layers into one stage, two, and so on."""
        return StageCuts(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProfile:
    """A module and the ways in which it may run."""

    name: str
    ways: tuple[Way, ...]
    weights: Array = field(default_factory=lambda: np.ones((1, 0)))
    "[sampled batch, sample]: what a sample costs, an average one being 1; no columns: all samples are alike."
    overhead_s: float = 0.0
    "Of one stage's forward and backward, beside its layers."
    reduce_s_per_byte: float = 0.0
    "Of adding up gradients over many replicas: what a byte takes."
    workspace_bytes: float = 0.0
    "On every device beside what layers hold."


class StageCuts:
    """For counts of stages, the cut whose slowest stage is fastest for an average sample, and sums over the layers of
    its stages: one run of stages after the other, the i-th from `first[i]` on.

    A count is left out if every stage of a smaller one has a stage here that takes and needs at least as much, with at
    least as many stages behind it: it cannot be better.
    """

    def __init__(self, way: Way) -> None:
        own = (way.fixed_s, way.sample_s, way.static_bytes, way.state_bytes, way.saved_bytes, way.gradient_bytes)
        layers = np.stack(own, axis=1)
        kept: list[tuple[tuple[int, ...], Array]] = []
        for bounds in even_cuts(way.fixed_s + way.sample_s):
            behind = np.arange(len(bounds) - 1, 0, -1)[:, None]
            passing = np.maximum.reduceat(way.passing_bytes, np.array(bounds[:-1]))[:, None]
            stages = np.hstack((np.add.reduceat(layers, np.array(bounds[:-1]), axis=0), passing, behind))
            if not any(_no_better(stages, other) for _, other in kept[: -1 - COMPARED : -1]):
                kept.append((bounds, stages))
        self.bounds = tuple(bounds for bounds, _ in kept)
        counts = [len(bounds) - 1 for bounds in self.bounds]
        self.counts: Ints = np.array(counts, dtype=np.int64)
        self.first: Ints = np.cumsum([0, *counts[:-1]])
        self.behind: Ints = np.concatenate([np.arange(count, 0, -1) for count in counts])
        "Stages of the module from this one on, itself included."
        self.fixed_s, self.sample_s = self._sums(way.fixed_s), self._sums(way.sample_s)
        self.static_bytes, self.state_bytes = self._sums(way.static_bytes), self._sums(way.state_bytes)
        self.saved_bytes, self.gradient_bytes = self._sums(way.saved_bytes), self._sums(way.gradient_bytes)
        self.passing_bytes = self._over(way.passing_bytes, np.maximum)
        self.whole_fixed_s, self.whole_sample_s = float(way.fixed_s.sum()), float(way.sample_s.sum())

    def _sums(self, layers: Array) -> Array:
        return self._over(layers, np.add)

    def _over(self, layers: Array, operation: np.ufunc) -> Array:
        return np.concatenate([operation.reduceat(layers, np.array(bounds[:-1])) for bounds in self.bounds])


def _no_better(stages: Array, than: Array) -> bool:
    """Whether every stage of `than` has one among `stages` that is at least as large in everything."""
    larger = np.all(stages[None, :, :] >= than[:, None, :] * (1 - 1e-12), axis=2)
    return bool(np.all(np.any(larger, axis=1)))


def even_cuts(seconds: Array) -> list[tuple[int, ...]]:
    """For one stage, two, ... up to one for each layer, the boundaries (0, cut, ..., layers) whose slowest stage is
    fastest. Exact: the min-max recursion, O(layers^3) in arrays."""
    layers = len(seconds)
    sums = np.concatenate(([0.0], np.cumsum(seconds)))
    run = sums[None, :] - sums[:, None]
    run[np.tril_indices(layers + 1)] = np.inf  # [start, stop]: an empty run is none
    best, chosen = run[0], []
    found: list[tuple[int, ...]] = [(0, layers)]
    for stages in range(2, layers + 1):
        slowest = np.maximum(best[:, None], run)
        starts = slowest.argmin(axis=0)
        best = slowest[starts, np.arange(layers + 1)]
        chosen.append(starts)
        bounds = [layers]
        for back in range(stages - 2, -1, -1):
            bounds.append(int(chosen[back][bounds[-1]]))
        found.append((0, *reversed(bounds)))
    return found
