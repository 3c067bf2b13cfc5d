"""Adafactor: Shazeer and Stern (2018), in the order of operations of `torch.optim.Adafactor`.

The second moment of a matrix is the product of its row and column means, so the state is rows + columns. The means
need all elements of the parameter. Ranks that hold parts of it (shards, ZeRO-1) add up partial sums, and all of them
keep the means of the full parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipefit.layout import Box, flat_boxes
from pipefit.optimizers.base import (
    FlatPiece,
    OptimizerKind,
    OptimizerOptions,
    OptimizerState,
    TensorShape,
    register_optimizer,
    update_elements,
)

if TYPE_CHECKING:
    from torch import Tensor

ROWS, COLUMNS, FULL = "row", "column", "variance"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdafactorOptions(OptimizerOptions):
    """The options of Adafactor."""

    lr: float = 1e-2
    "Peak of the relative step size; a step uses at most 1 / sqrt(number of the step)."
    weight_decay: float = 0.0
    "Decoupled; parameters with one dimension (norms, biases) are not decayed."
    beta2_decay: float = -0.8
    "The new squares enter the second moment with weight (number of the step) ** beta2_decay."
    eps: float = 2.0**-23
    "Lower bound of the second moment's root, and of the mean of a row. The default is that of float32."
    eps_scale: float = 1e-3
    "Lower bound of the parameter's root mean square, by which steps are scaled."
    clip: float = 1.0
    "Upper bound of the update's root mean square."

    def option_limits(self) -> Mapping[str, tuple[bool, str]]:
        return {
            **OptimizerOptions.option_limits(self),
            "beta2_decay": (self.beta2_decay <= 0, "a number, 0 or less"),
            "eps": (self.eps > 0, "a number above 0"),
            "eps_scale": (self.eps_scale > 0, "a number above 0"),
            "clip": (self.clip >= 1, "a number, 1 or more"),
        }


@dataclass(frozen=True, slots=True)
class ParameterChunk:
    """A box of a parameter, stored as one run of the flat piece."""

    name: str
    box: Box
    run: slice

    def view_of(self, flat: Tensor) -> Tensor:
        """Return the chunk's elements of a flat tensor, in the shape of the box."""
        return flat[self.run].view([stop - start for start, stop in self.box])

    def mean_slices(self, state: str) -> tuple[slice, ...]:
        """Return the part of a state tensor that belongs to the chunk."""
        slices = tuple(slice(start, stop) for start, stop in self.box)
        return {ROWS: slices[:-1], COLUMNS: (*slices[:-2], *slices[-1:]), FULL: slices}[state]


class AdafactorState(OptimizerState):
    """Row and column means of the squared gradients of matrices; all squares of other parameters."""

    options: AdafactorOptions

    def __init__(self, optimizer: OptimizerKind, piece: FlatPiece, options: Any) -> None:
        OptimizerState.__init__(self, optimizer, piece, options)
        self._shapes, self._sum_parts = dict(piece.shapes), piece.sum_parts
        self._chunks = list(_piece_chunks(piece, update_elements(piece.parameter.device)))
        self._index = {name: index for index, name in enumerate(self._shapes)}

    def step(self, gradient: Tensor, lr: float, count: int) -> None:
        options, weight = self.options, count**self.options.beta2_decay
        scales = self._update_means(gradient, weight).clamp_(min=options.eps_scale)
        denominators = self._root_mean_squares(gradient).div_(options.clip).clamp_(min=1.0)
        steps = scales.mul_(-min(lr, 1.0 / math.sqrt(count))).div_(denominators)
        for chunk in self._chunks:
            value = chunk.view_of(self.master)
            if self.decay:
                value.mul_(1.0 - lr * self.decay)
            value.addcmul_(self._direction(chunk, gradient), steps[self._index[chunk.name]])
        self.round_master()

    def _update_means(self, gradient: Tensor, weight: float) -> Tensor:
        """Add the squared gradient to the means. Return the root mean square of every parameter."""
        sizes = [tensor.numel() for tensor in self.shared.values()]
        sums = self.master.new_zeros(sum(sizes) + len(self._shapes))
        *parts, squares = sums.split([*sizes, len(self._shapes)])
        new = {key: part.view(self.shared[key].shape) for key, part in zip(self.shared, parts, strict=True)}
        for chunk in self._chunks:
            squared = chunk.view_of(gradient).to(self.master.dtype).square()
            for state, axis in ((ROWS, -1), (COLUMNS, -2), (FULL, None)):
                if (state, chunk.name) in new:
                    added = squared if axis is None else squared.sum(axis)
                    new[state, chunk.name][chunk.mean_slices(state)].add_(added)
            squares[self._index[chunk.name]] += chunk.view_of(self.master).square().sum()
        self._sum_parts(sums)
        for (state, name), mean in self.shared.items():
            count = {ROWS: self._shapes[name][-1:], COLUMNS: self._shapes[name][-2:-1], FULL: ()}[state]
            mean.lerp_(new[state, name].div_(math.prod(count)), weight)
        return self._divide_by_sizes(squares)

    def _root_mean_squares(self, gradient: Tensor) -> Tensor:
        """Return the root mean square of the update of every parameter, before it is clipped and scaled."""
        squares = self.master.new_zeros(len(self._shapes))
        for chunk in self._chunks:
            squares[self._index[chunk.name]] += self._direction(chunk, gradient).square_().sum()
        self._sum_parts(squares)
        return self._divide_by_sizes(squares)

    def _divide_by_sizes(self, squares: Tensor) -> Tensor:
        for name, index in self._index.items():
            squares[index] /= max(1, math.prod(self._shapes[name]))
        return squares.sqrt_()

    def _direction(self, chunk: ParameterChunk, gradient: Tensor) -> Tensor:
        """Return the gradient of a chunk, divided by the root of the second moment."""
        eps = self.options.eps
        if (FULL, chunk.name) in self.shared:
            variance = self.shared[FULL, chunk.name][chunk.mean_slices(FULL)].clone()
        else:
            rows, columns = (self.shared[state, chunk.name] for state in (ROWS, COLUMNS))
            mean = rows.mean(-1, keepdim=True).clamp_(min=eps)
            rows = rows.div(mean)[chunk.mean_slices(ROWS)]
            variance = rows.unsqueeze(-1) * columns[chunk.mean_slices(COLUMNS)].unsqueeze(-2)
        return variance.clamp_(min=eps * eps).rsqrt_().mul_(chunk.view_of(gradient))


def factored_state(shape: TensorShape) -> Mapping[str, TensorShape]:
    """Return the state tensors of a parameter: means of rows and of columns, or all squares below two dimensions."""
    if len(shape) < 2:
        return {FULL: shape}
    return {ROWS: shape[:-1], COLUMNS: (*shape[:-2], shape[-1])}


def _piece_chunks(piece: FlatPiece, limit: int) -> Iterator[ParameterChunk]:
    """Yield boxes that together are the parameters of the piece, each of at most `limit` elements if its last two
    dimensions allow it."""
    for part in piece.parts:
        position = part.place[0]
        for local in flat_boxes([stop - start for start, stop in part.box], *part.local):
            box = tuple((low + base, high + base) for (low, high), (base, _) in zip(local, part.box, strict=True))
            for smaller in _split_box(box, limit):
                size = math.prod(stop - start for start, stop in smaller)
                yield ParameterChunk(part.name, smaller, slice(position, position + size))
                position += size


def _split_box(box: Box, limit: int) -> Iterator[Box]:
    """Yield consecutive parts of a box, cut along its first dimension with more than one index."""
    size = math.prod(stop - start for start, stop in box)
    axis = next((index for index, (start, stop) in enumerate(box) if stop - start > 1), None)
    if size <= limit or axis is None:
        yield box
        return
    first, last = box[axis]
    rows = max(1, limit * (last - first) // size)
    for start in range(first, last, rows):
        yield from _split_box((*box[:axis], (start, min(last, start + rows)), *box[axis + 1 :]), limit)


ADAFACTOR = register_optimizer(
    OptimizerKind(
        name="adafactor",
        summary="Adafactor: means of the squared gradient by row and by column",
        options=AdafactorOptions,
        state=AdafactorState,
        shared_state=factored_state,
        gradient_reads=3,
        temporaries=2,
    )
)
