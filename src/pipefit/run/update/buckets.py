"""Flat storage of a lane's parameters and gradients: one pair of flat tensors per bucket, a view per parameter.

A bucket holds parameters of one stage with equal reduction, scatter, decay and norm rules, in the order in which a
backward completes them (last layer first), up to a size. Buckets are formed from plan data only, so all ranks of a lane
form the same ones in the same order. Under ZeRO-1 a bucket is cut evenly over the scatter group: every rank owns one
run of the flat elements (`Gflat`: the parameters of the bucket concatenated). With several groups that shard the state
(HSDP), every group is cut in the same way. Under ZeRO-2 a bucket never spans two
layers, and keeps only the owned run of its gradients; under ZeRO-3 also only the owned run of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipefit.layout import AxisName, Box, Run
from pipefit.optimizers import FlatPiece, ParameterPart
from pipefit.optimizers.sharded_state import ShardedState, shards_gradients, shards_parameters

ALIGN = 32
"""Elements: every parameter starts at a multiple, so that flat kernels read aligned vectors."""


@dataclass(slots=True, kw_only=True)
class BucketEntry:
    """One parameter in one stage of this device: a trained one, or a frozen one whose values are sharded."""

    name: str
    "Global name."
    stage: int
    layer: int
    "Index of the layer within its stage: a backward completes the last first."
    shape: tuple[int, ...]
    "Global shape."
    box: Box
    "The local part of the parameter."
    tensor: torch.nn.Parameter
    "The local part; its storage moves into the bucket."
    sum_over: tuple[AxisName, ...]
    "Axes along which it is replicated, so that its gradient is summed."
    alike_over: tuple[AxisName, ...] = ()
    "Axes along which it is replicated with equal gradients, so that no sum is needed."
    state_axes: tuple[AxisName, ...] = ()
    "Axes over which its optimizer state is sharded (ZeRO-1)."
    sharded: ShardedState = "none"
    "What is sharded over these axes."
    state_group: int = 0
    "Number of neighbours along these axes that shard it together; 0: all of them."
    fill: Callable[[], Tensor] | None = None
    "Returns the initial value of the local part, for a tensor without storage (ZeRO-3)."
    decays: bool = True
    counted: bool = True
    "True if this lane counts it in the global norm and saves it; False if another stage owns a tied parameter."
    tied: bool = False
    "Used by stages of several lanes."
    across: tuple[int, ...] = ()
    "Devices of several lanes with equal layouts, for stages that take turns: one sum over all of them. () otherwise."
    state: tuple[str, ...] = ()
    "If `across` is set, the forms of its optimizer state: different forms need separate buckets on every lane."
    twin: torch.nn.Parameter | None = None
    "The same parameter in a second stage on this device. It shares storage, so gradients accumulate in one buffer."

    @property
    def bucket_key(self) -> tuple[object, ...]:
        """Key of entries that may share a bucket."""
        alone = self.tied or self.twin is not None
        where: tuple[object, ...] = (self.name,) if alone else (self.stage, self.across, self.state)
        if shards_gradients(self.sharded):
            where = (self.stage, self.layer, self.sharded)
        rules = self.sum_over, self.alike_over, self.state_axes, self.decays, self.counted
        return (*where, *rules, self.tensor.requires_grad, self.tensor.dtype)


@dataclass(slots=True, kw_only=True)
class GradientBucket:
    """Parameters that are reduced and updated together."""

    entries: tuple[BucketEntry, ...]
    offsets: tuple[int, ...]
    parameters: Tensor
    "Flat, compute dtype, padded with zeros. Without storage between the uses of a layer under ZeRO-3."
    gradients: Tensor
    "Flat, gradient dtype; only the owned run under ZeRO-2 and ZeRO-3."
    owned: Run
    "The run of flat elements whose optimizer state this rank holds."
    owned_parameters: Tensor
    "The owned run of the parameters: a view of them, or all that persists under ZeRO-3."
    views: dict[str, Tensor] = field(default_factory=dict)
    "Gradient of each entry, in its local shape; empty under ZeRO-2 and ZeRO-3."

    @property
    def trains(self) -> bool:
        """True if the parameters have gradients; False for frozen ones, which are only gathered (ZeRO-3)."""
        return self.entries[0].tensor.requires_grad

    @property
    def shards_gradients(self) -> bool:
        """True if only the owned run of the gradients persists (ZeRO-2 and ZeRO-3)."""
        return shards_gradients(self.entries[0].sharded)

    @property
    def shards_parameters(self) -> bool:
        """True if only the owned run of the parameters persists (ZeRO-3)."""
        return shards_parameters(self.entries[0].sharded)

    @property
    def owned_gradients(self) -> Tensor:
        return self.gradients if self.shards_gradients else self.gradients[slice(*self.owned)]

    def split_flat(self, flat: Tensor) -> list[Tensor]:
        """Return the view of each entry, in its local shape, in a flat tensor of all elements."""
        return [
            flat[offset : offset + entry.tensor.numel()].view(entry.tensor.shape)
            for entry, offset in zip(self.entries, self.offsets, strict=True)
        ]

    def allocate_parameters(self) -> None:
        """Give released parameters their storage again, with undefined content (ZeRO-3)."""
        self.parameters.untyped_storage().resize_(self.parameters.numel() * self.parameters.itemsize)

    def release_parameters(self) -> None:
        """Free the storage of the complete parameters (ZeRO-3)."""
        self.parameters.untyped_storage().resize_(0)

    @property
    def stage(self) -> int:
        return self.entries[0].stage

    @property
    def used_elements(self) -> int:
        """Elements up to the end of the last parameter: equal on every lane, for any split of the state there."""
        return self.offsets[-1] + -(-self.entries[-1].tensor.numel() // ALIGN) * ALIGN

    @property
    def first_layer(self) -> int:
        """The layer of the stage whose gradients complete the bucket."""
        return min(entry.layer for entry in self.entries)

    @property
    def waits_for_stages(self) -> bool:
        """True if the bucket is shared between two stages of this device, and so must wait for both."""
        return any(entry.twin is not None for entry in self.entries)

    @property
    def is_tied(self) -> bool:
        return self.entries[0].tied

    @property
    def summing_devices(self) -> tuple[int, ...]:
        return self.entries[0].across

    def owned_runs(self) -> list[tuple[BucketEntry, Run, Run]]:
        """Return (entry, run within its local flat elements, run within the owned piece) for everything this rank
        owns."""
        runs = []
        low, high = self.owned
        for entry, offset in zip(self.entries, self.offsets, strict=True):
            start, stop = max(offset, low), min(offset + entry.tensor.numel(), high)
            if start < stop:
                runs.append((entry, (start - offset, stop - offset), (start - low, stop - low)))
        return runs


def flat_piece(bucket: GradientBucket, master_dtype: torch.dtype, sum_parts: Callable[[Tensor], None]) -> FlatPiece:
    """Return the elements of a bucket whose state this rank holds, for its optimizer."""
    return FlatPiece(
        parameter=bucket.owned_parameters,
        master_dtype=master_dtype,
        decays=bucket.entries[0].decays,
        shapes={entry.name: entry.shape for entry in bucket.entries},
        parts=tuple(
            ParameterPart(entry.name, entry.shape, entry.box, local, owned)
            for entry, local, owned in bucket.owned_runs()
        ),
        sum_parts=sum_parts,
    )


def make_buckets(
    entries: Sequence[BucketEntry],
    gradient_dtype: torch.dtype,
    bucket_bytes: int,
    scatter_place: Mapping[object, tuple[int, int]],
) -> list[GradientBucket]:
    """Return the buckets of one lane, in launching order; the entries' storage moves into them.

    `scatter_place[stage, state_axes]` is (this rank's index, size) of the group that shards the state.
    """
    runs: list[list[BucketEntry]] = []
    current: dict[object, list[BucketEntry]] = {}
    for entry in sorted(entries, key=lambda e: (-e.stage, -e.layer)):
        run = current.get(entry.bucket_key)
        size = sum(e.tensor.numel() for e in run) * gradient_dtype.itemsize if run else 0
        if run is None or size + entry.tensor.numel() * gradient_dtype.itemsize > bucket_bytes:
            run = []
            runs.append(run)
            current[entry.bucket_key] = run
        run.append(entry)
    runs.sort(key=lambda run: (-run[0].stage, -min(e.layer for e in run)))
    return [_make_bucket(run, gradient_dtype, scatter_place) for run in runs]


def divide_trained(buckets: Sequence[GradientBucket]) -> tuple[list[GradientBucket], list[GradientBucket]]:
    """Return the buckets with gradients, and the buckets of frozen parameters."""
    return [bucket for bucket in buckets if bucket.trains], [bucket for bucket in buckets if not bucket.trains]


def _make_bucket(
    entries: Sequence[BucketEntry], gradient_dtype: torch.dtype, scatter_place: Mapping[object, tuple[int, int]]
) -> GradientBucket:
    position, parts = scatter_place.get((entries[0].stage, entries[0].state_axes), (0, 1))
    offsets, end = [], 0
    for entry in entries:
        offsets.append(end)
        end += -(-entry.tensor.numel() // ALIGN) * ALIGN
    unit = parts * ALIGN
    total = -(-end // unit) * unit
    first, owned = entries[0].tensor, (position * total // parts, (position + 1) * total // parts)
    flat = torch.zeros(total, dtype=first.dtype, device=first.device)
    bucket = GradientBucket(
        entries=tuple(entries),
        offsets=tuple(offsets),
        parameters=flat,
        gradients=flat[:0],
        owned=owned,
        owned_parameters=flat[slice(*owned)],
    )
    for entry, view in zip(entries, bucket.split_flat(flat), strict=True):
        with torch.no_grad():
            view.copy_(entry.tensor if entry.fill is None else entry.fill())
        entry.tensor.data = view
        if entry.twin is not None:
            entry.twin.data = view
    if bucket.shards_parameters:
        bucket.owned_parameters = flat[slice(*owned)].clone()
        bucket.release_parameters()
    # Last, when the first storages of the parameters are free.
    size = owned[1] - owned[0] if bucket.shards_gradients else total
    size = size if bucket.trains else 0
    bucket.gradients = torch.zeros(size, dtype=gradient_dtype, device=first.device)
    if not bucket.shards_gradients:
        views = bucket.split_flat(bucket.gradients)
        bucket.views = {entry.name: view for entry, view in zip(entries, views, strict=True)}
    return bucket
