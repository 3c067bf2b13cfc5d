"""image_positions(x, grid, table, start|'') {rows, columns, aligned, merge}: x plus positions, interpolated to images.

x (B, T, D), grid int64 (B, T, 4): row, column, rows, columns of the patches; table (N, D), where N is rows x columns,
plus one leading row for start tokens; start (D,). The table entries of a patch and their weights are computed from its
grid on the device, in float32 or wider, in the forward and again in the backward: nothing is saved. The table's
gradient, of a few hundred rows, goes through autograd as a dense tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from pipefit.model.graph import Operator
from pipefit.run.autograd.attention_kernels import statistics_dtype
from pipefit.run.autograd.interpolation import bicubic_taps, bilinear_taps
from pipefit.run.ops import OperatorContext, OperatorStep


class TableSizes(NamedTuple):
    """The size of a table of positions, and its interpolation."""

    rows: int
    columns: int
    aligned: bool
    "Whether it is bilinear with aligned corners, instead of bicubic."


class _ImagePositions(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, grid: torch.Tensor, table: Any, start: Any, sizes: TableSizes, merge: int
    ) -> torch.Tensor:
        """With `merge` above 1, x is (B, T merge^2, D)."""
        ctx.save_for_backward(grid)
        ctx.sizes, ctx.shape, ctx.has_start, ctx.merge = sizes, table.shape, start is not None, merge
        grid = patch_grid(grid, merge)
        wide = statistics_dtype(x.dtype)
        total = torch.zeros((grid[..., 0].numel(), x.shape[-1]), dtype=wide, device=x.device)
        for entry, weight in table_entries(grid, sizes, start is not None, wide):
            total.addcmul_(table.detach().index_select(0, entry).to(wide), weight.unsqueeze(1))
        y = x + total.view(x.shape).to(x.dtype)
        if start is None:
            return y
        first = (start + table[0]).detach()
        return torch.where((grid[..., :1] < 0), first, y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        grid = patch_grid(*ctx.saved_tensors, ctx.merge)
        wide = statistics_dtype(dy.dtype)
        of_start = (grid[..., :1] < 0) if ctx.has_start else None
        dx = dy if of_start is None else dy.masked_fill(of_start, 0)
        dtable = dstart = None
        if ctx.has_start and (ctx.needs_input_grad[2] or ctx.needs_input_grad[3]):
            dstart = (dy - dx).reshape(-1, dy.shape[-1]).sum(0, dtype=wide)
        if ctx.needs_input_grad[2]:
            dtable = torch.zeros(ctx.shape, dtype=wide, device=dy.device)
            flat = dx.reshape(-1, dy.shape[-1])
            for entry, weight in table_entries(grid, ctx.sizes, ctx.has_start, wide):
                dtable.index_add_(0, entry, flat.to(wide) * weight.unsqueeze(1))
            if dstart is not None:
                dtable[0] += dstart
            dtable = dtable.to(dy.dtype)
        if dstart is not None:
            dstart = dstart.to(dy.dtype) if ctx.needs_input_grad[3] else None
        return dx, None, dtable, dstart, None, None


def table_entries(
    grid: torch.Tensor, sizes: TableSizes, has_start: bool, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the table entries that the tokens read, with their weights: sixteen pairs of (B T,), or four with aligned
    corners. Start tokens read none: their weights are zero."""
    row, column, tall, broad = grid.reshape(-1, 4).unbind(-1)
    patch, find_taps = row >= 0, bilinear_taps if sizes.aligned else bicubic_taps
    vertical, down = find_taps(row.clamp(min=0), tall.clamp(min=1), sizes.rows, dtype)
    horizontal, right = find_taps(column, broad.clamp(min=1), sizes.columns, dtype)
    for i in range(len(vertical)):
        for j in range(len(horizontal)):
            yield vertical[i] * sizes.columns + horizontal[j] + int(has_start), down[i] * right[j] * patch


def build_image_positions(operator: Operator, context: OperatorContext) -> OperatorStep:
    attributes = operator.attributes
    sizes = TableSizes(int(attributes["rows"]), int(attributes["columns"]), bool(attributes.get("aligned")))
    merge = int(operator.attributes.get("merge", 1))
    apply = _ImagePositions.apply

    def add_to_squares(x: torch.Tensor, grid: torch.Tensor, table: Any, start: Any = None) -> Any:
        return apply(x.flatten(1, 2), grid, table, start, sizes, merge).view_as(x)

    if merge > 1:
        return OperatorStep(add_to_squares)
    return OperatorStep(lambda x, grid, table, start=None: apply(x, grid, table, start, sizes, 1))


def patch_grid(grid: torch.Tensor, merge: int) -> torch.Tensor:
    """Return the grid (B, T merge^2, 4) of patches from the grid (B, T, 4) of squares of merge x merge patches. Start
    tokens keep row -1."""
    if merge == 1:
        return grid
    step = torch.arange(merge * merge, device=grid.device)
    row, column, rows, columns = (size.unsqueeze(-1) for size in grid.unbind(-1))
    in_rows = torch.where(row < 0, -1, row * merge + step // merge)
    in_columns = column * merge + step % merge
    sizes = [(size * merge).expand_as(in_rows) for size in (rows, columns)]
    return torch.stack((in_rows, in_columns, *sizes), dim=-1).flatten(1, 2)


BUILDERS = {"image_positions": build_image_positions}
