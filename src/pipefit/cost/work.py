"""What a pipeline has to do, in the terms that costs are made from: no plan, no schedule, only graphs and groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipefit.cost.static_memory import Precision
from pipefit.layout import Mesh
from pipefit.model.graph import Graph

Recompute = Literal["none", "selective", "full"]

BUCKET_BYTES = 32 << 20
"""Bytes of gradients that are reduced together: as `run/worker/build.py` fills its buckets."""

Messages = tuple[tuple[int, int, float], ...]
"""(source device, target device, bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Elements that the devices of a stage store, per position of the shard axis."""

    trainable: tuple[int, ...]
    frozen: tuple[int, ...]
    whole: tuple[int, ...]
    "The trainable ones that every shard position stores alike: their gradients are summed over the shard axis."


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """One stage on its group."""

    lane: int
    group: Mesh
    layers: tuple[tuple[Graph, ...], ...]
    "[layer][position of the shard axis]; one entry where the layer is not sharded."
    rows: tuple[int, ...]
    "Rows of one microbatch on each position of the replica axis."
    slices: tuple[int, ...]
    "Tokens of each slice of one row."
    recompute: Recompute
    parameters: ParameterCounts
    split_state: bool
    "ZeRO-1: the optimizer state is split over the replicas by their shares."
    shares: tuple[tuple[int, ...], ...] = ()
    "Of every layer along the shard axis, where layers have shares of their own; empty: the group's."

    symbols: tuple[tuple[str, int], ...] = ()
    "Sizes that the graphs name beside rows and tokens, the same in every microbatch."
    packed: tuple[tuple[tuple[int, int], ...], ...] = ()
    "[microbatch][replica] of rows that are packed: tokens, and the sum of the images' tokens squared. `rows` and"
    " `slices` are then those of an average one. Empty: all microbatches are alike."
    frozen: int = 0
    "Layers at its beginning without a backward: neither they nor any layer before them is trained."
    turns: int = 1
    "Stages that hold the same layers on lanes of their own and take turns, itself included: their gradients are summed"
    " over all of them at once (`TiedWork.rings`)."

    @property
    def has_equal_shards(self) -> bool:
        """Whether all positions of the shard axis have as much of every layer."""
        return all(len({*shares}) <= 1 for shares in (*self.shares, self.group.find_axis("shard").shares))

    def shares_of(self, layer: int) -> tuple[int, ...]:
        """Everyone's shares of a layer along the shard axis."""
        return self.shares[layer] if self.shares else self.group.find_axis("shard").shares


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeWork:
    """One tensor between two stages: the messages (source device, target device, bytes) per slice and direction."""

    source: int
    target: int
    tensor: str
    forward: tuple[tuple[tuple[int, int, float], ...], ...]
    "[slice] -> messages."
    backward: tuple[tuple[tuple[int, int, float], ...], ...]
    ragged: tuple[tuple[Messages, Messages], ...] = ()
    "[microbatch] -> (forward, backward), where microbatches differ; `forward` and `backward` are then the largest."


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWork:
    """Gradients that several stages exchange once an iteration, because they share parameters."""

    stages: tuple[int, ...]
    messages: tuple[tuple[int, int, float], ...]
    "(source device, target device, bytes): every stage's own gradient to each of the others."
    elements: int = 0
    "Of the shared parameters, as one device holds them."
    rings: tuple[tuple[int, ...], ...] = ()
    "Of stages that take turns: the devices that sum theirs together, in place of messages."


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineWork:
    """All stages and edges of one pipeline."""

    stages: tuple[StageWork, ...]
    edges: tuple[EdgeWork, ...]
    tied: tuple[TiedWork, ...] = ()
    precision: Precision
    bucket_bytes: float = BUCKET_BYTES
    "Gradients that are reduced together."

    @property
    def num_lanes(self) -> int:
        return max(stage.lane for stage in self.stages) + 1

    @property
    def distinct_microbatches(self) -> int:
        """The number of microbatches, where they differ; else 1."""
        return max([1, *(len(stage.packed) for stage in self.stages)])
