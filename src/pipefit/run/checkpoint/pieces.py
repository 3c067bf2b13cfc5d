"""Local parts of global tensors for saving and loading: a box, or a flat run of a box's elements.

A flat run (ZeRO's split of the flattened elements) consists of at most 2 * ndim - 1 boxes: the run's ragged head and
tail in every dimension, and one full block between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pipefit.layout import Box, Run, flat_boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPiece:
    """One rank's part of the global tensor `name`. It may be empty, and several ranks may hold it."""

    name: str
    shape: tuple[int, ...]
    "The global shape."
    tensor: torch.Tensor
    "The data: with the box's sizes, or one-dimensional and contiguous if `flat` is given. Any device."
    box: Box | None = None
    "The local box of the tensor; None is all of it."
    flat: Run | None = None
    "The local run of the box's elements (row-major, counted within the box); None is all of them."

    def tensor_chunks(self) -> list[TensorChunk]:
        """Return the non-empty boxes of this piece, as views of `tensor`. Asserts that the sizes agree."""
        box = tuple((0, length) for length in self.shape) if self.box is None else self.box
        assert len(box) == len(self.shape), f"{self.name}: box {box} of shape {self.shape}"
        assert all(0 <= a <= b <= n for (a, b), n in zip(box, self.shape, strict=True)), f"{self.name}: {box}"
        sizes = tuple(stop - start for start, stop in box)
        data = self.tensor.detach()
        if self.flat is None:
            assert tuple(data.shape) == sizes, f"{self.name}: tensor of {tuple(data.shape)} for a box of {sizes}"
            return [TensorChunk(box, data)] if data.numel() else []
        start, stop = self.flat
        assert 0 <= start <= stop <= math.prod(sizes), f"{self.name}: run {self.flat} of {math.prod(sizes)}"
        assert data.shape == (stop - start,), f"{self.name}: tensor of {tuple(data.shape)} for run {self.flat}"
        result, offset = [], 0
        for inner in flat_boxes(sizes, start, stop):
            lengths = [high - low for low, high in inner]
            count = math.prod(lengths)
            moved = tuple((low + base, high + base) for (low, high), (base, _) in zip(inner, box, strict=True))
            result.append(TensorChunk(moved, data[offset : offset + count].view(lengths)))
            offset += count
        return result


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A non-empty box of a global tensor, and its data."""

    box: Box
    data: torch.Tensor

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(start for start, _ in self.box)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as one-dimensional uint8 on the CPU, in row-major order: a view if they are stored so."""
    data = tensor.detach().cpu().contiguous()
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
