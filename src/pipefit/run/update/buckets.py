"""Flat storage of a lane's parameters and gradients: one pair of flat tensors per bucket, a view per parameter.

A bucket holds parameters of one stage with equal reduction, scatter, decay and norm rules, in the order in which a
backward completes them (last layer first), up to a size. Buckets are formed from plan data only, so all ranks of a lane
form the same ones in the same order. Under ZeRO-1 a bucket is cut evenly over the scatter group: every rank owns one
run of the flat elements (`Gflat`: the parameters of the bucket concatenated).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipefit.layout import AxisName, Box, Run
from pipefit.optimizers import FlatPiece, ParameterPart

ALIGN = 32
"""Elements: every parameter starts at a multiple, so that flat kernels read aligned vectors."""


@dataclass(slots=True, kw_only=True)
class BucketEntry:
    """One trainable parameter in one stage of this device."""

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
        where = (self.name,) if alone else (self.stage, self.across, self.state)
        return (*where, self.sum_over, self.alike_over, self.state_axes, self.decays, self.counted, self.tensor.dtype)


@dataclass(slots=True, kw_only=True)
class GradientBucket:
    """Parameters that are reduced and updated together."""

    entries: tuple[BucketEntry, ...]
    offsets: tuple[int, ...]
    parameters: Tensor
    "Flat, compute dtype, padded with zeros."
    gradients: Tensor
    "Flat, gradient dtype."
    owned: Run
    "The run of flat elements whose optimizer state this rank holds."
    views: dict[str, Tensor] = field(default_factory=dict)
    "Gradient of each entry, in its local shape."

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
        parameter=bucket.parameters[slice(*bucket.owned)],
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

    `scatter_place[stage, state_axes]` is (this rank's index, size) of the scatter group.
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
    first = entries[0].tensor
    flat = torch.zeros(total, dtype=first.dtype, device=first.device)
    gradients = torch.zeros(total, dtype=gradient_dtype, device=first.device)
    bucket = GradientBucket(
        entries=tuple(entries),
        offsets=tuple(offsets),
        parameters=flat,
        gradients=gradients,
        owned=(position * total // parts, (position + 1) * total // parts),
    )
    for entry, offset in zip(entries, offsets, strict=True):
        shape = entry.tensor.shape
        run = slice(offset, offset + math.prod(shape))
        view = flat[run].view(shape)
        with torch.no_grad():
            view.copy_(entry.tensor)
        entry.tensor.data = view
        if entry.twin is not None:
            entry.twin.data = view
        bucket.views[entry.name] = gradients[run].view(shape)
    return bucket
