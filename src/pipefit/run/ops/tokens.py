"""put_tokens(h, x, places) {cut, drops} and take_tokens(h, places) {cut}: rows of a sequence by flat index b T + t.

h (B, T, D), x (1, I, D), places int64 (1, I); results (B, T, D) and (1, L, D). Only the indices are saved.

If a shard program splits the sequence (`cut`), a device has a run of its rows or tokens. Indices on other devices are
mapped to one spare row after its own: values put there are dropped, values taken are zero. So are indices of -1 of
rows that are left out (`drops`). No size depends on the indices, so the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipefit.model.graph import Operator
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep


class _PutTokens(torch.autograd.Function):
    """Scatter x into the flattened rows of h at `places` (I,); an index past the last row means another device."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, x: torch.Tensor, places: torch.Tensor, spare: bool) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.spare = spare
        rows = append_spare(h.reshape(-1, h.shape[-1]), spare).index_copy(0, places, x.flatten(0, 1))
        return rows[:-1].view(h.shape) if spare else rows.view(h.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (places,) = ctx.saved_tensors
        rows = append_spare(dy.reshape(-1, dy.shape[-1]), ctx.spare)
        dx = rows.index_select(0, places).unsqueeze(0) if ctx.needs_input_grad[1] else None
        dh = None
        if ctx.needs_input_grad[0]:
            dh = rows.index_fill(0, places, 0)
            dh = (dh[:-1] if ctx.spare else dh).view(dy.shape)
        return dh, dx, None, None


class _TakeTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, places: torch.Tensor, spare: bool) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.shape, ctx.spare = h.shape, spare
        return append_spare(h.reshape(-1, h.shape[-1]), spare).index_select(0, places).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (places,) = ctx.saved_tensors
        count = ctx.shape[0] * ctx.shape[1]
        dh = dy.new_zeros((count + ctx.spare, ctx.shape[2])).index_add_(0, places, dy.flatten(0, 1))
        return dh[:count].view(ctx.shape), None, None


def append_spare(rows: torch.Tensor, spare: bool) -> torch.Tensor:
    """Return the rows, followed by a row of zeros if `spare`."""
    return torch.nn.functional.pad(rows, (0, 0, 0, 1)) if spare else rows


def own_places(
    operator: Operator, context: OperatorContext
) -> Callable[[SavedForward, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function (record, h, places) -> (I,): indices into the local rows of h, one past the end if not
    local."""
    if "cut" not in operator.attributes:
        drops = operator.attributes.get("drops", False)
        return lambda record, h, places: _skip_absent(places.flatten(), h) if drops else places.flatten()
    dim, first, _ = operator.attributes["cut"]

    def places_here(record: SavedForward, h: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        row_length = record.tokens if dim == 1 else h.shape[1]
        start = first
        if first < 0:
            start = context.shard.runs(record.tokens if dim == 1 else record.rows)[context.shard.position][0]
        flat = places.flatten()
        row, token = flat // row_length, flat % row_length
        row, token = (row, token - start) if dim == 1 else (row - start, token)
        here = (row >= 0) & (row < h.shape[0]) & (token >= 0) & (token < h.shape[1])
        return torch.where(here, row * h.shape[1] + token, h.shape[0] * h.shape[1])

    return places_here


def _skip_absent(places: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Return places with the spare row in place of -1."""
    return torch.where(places < 0, h.shape[0] * h.shape[1], places)


def build_put(operator: Operator, context: OperatorContext) -> OperatorStep:
    local_places = own_places(operator, context)
    spare = "cut" in operator.attributes or operator.attributes.get("drops", False)
    apply = _PutTokens.apply
    return OperatorStep(
        lambda record, h, x, places: apply(h, x, local_places(record, h, places), spare), wants_record=True
    )


def build_take(operator: Operator, context: OperatorContext) -> OperatorStep:
    local_places, spare = own_places(operator, context), "cut" in operator.attributes
    apply = _TakeTokens.apply
    return OperatorStep(lambda record, h, places: apply(h, local_places(record, h, places), spare), wants_record=True)


BUILDERS = {"put_tokens": build_put, "take_tokens": build_take}
