"""Parts of tensors between the devices of a shard axis: three lowerings of each collective, exact for uneven parts.

`padded` pads every part to the longest and calls the even kernel (`run/transfers/comms.py`, which refuses uneven
parts). `grouped` calls a broadcast or a reduce for every part, of its own size. `alltoallv` sends each device its data
with split sizes. Empty parts are allowed. gloo rejects unequal parts in all_gather, and implements reduce_scatter by an
all_reduce, so its all-to-all moves half as much (costs: `cost/comm/lowerings.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipefit.errors import PlanError
from pipefit.lab.pace import pace_collective
from pipefit.layout import Run, split_by_shares
from pipefit.run.transfers import comms


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContext:
    """This device's position on the shard axis of its mesh."""

    group: Any
    "The process group of the axis: its members in order of position."
    shares: tuple[int, ...]
    position: int

    @property
    def size(self) -> int:
        return len(self.shares)

    def runs(self, length: int, units: int = 0) -> tuple[Run, ...]:
        """Return the runs of all devices for a dimension of this length, cut in `units` units (0: single elements)."""
        return split_by_shares(length, self.shares, length // units if units else 1)

    def length(self, total: int) -> int:
        """Return the local length of a dimension of length `total`."""
        start, stop = self.runs(total)[self.position]
        return stop - start


def gather_parts(
    x: torch.Tensor, runs: Sequence[Run], dim: int, context: ShardContext, lowering: str = "padded"
) -> torch.Tensor:
    """Return the full tensor from all devices' runs along `dim`; x is this device's run."""
    lengths = _run_lengths(runs)
    _require_length(x, dim, lengths[context.position], "all_gather", runs)
    moved = x.movedim(dim, 0).contiguous()
    out = GATHERS[lowering](moved, lengths, context)
    return out.movedim(0, dim).contiguous()


def scatter_sums(
    x: torch.Tensor, runs: Sequence[Run], dim: int, context: ShardContext, lowering: str = "padded"
) -> torch.Tensor:
    """Return this device's run along `dim` of the sum of x over all devices."""
    lengths = _run_lengths(runs)
    _require_length(x, dim, sum(lengths), "reduce_scatter", runs)
    moved = x.movedim(dim, 0).contiguous()
    out = SCATTERS[lowering](moved, lengths, context)
    return out.movedim(0, dim).contiguous()


def exchange_parts(
    x: torch.Tensor,
    cut: tuple[Sequence[Run], int],
    new: tuple[Sequence[Run], int],
    context: ShardContext,
    lowering: str = "padded",
) -> torch.Tensor:
    """Return this device's run along the dimension of `new`, complete along that of `cut`; x is its run along `cut`.

    Both are (runs of all devices, dimension), with different dimensions.
    """
    (runs, dim), (targets, along) = cut, new
    lengths, parts = _run_lengths(runs), _run_lengths(targets)
    _require_length(x, dim, lengths[context.position], "all_to_all", runs)
    _require_length(x, along, sum(parts), "all_to_all", targets)
    if lowering == "grouped":
        start, stop = targets[context.position]
        return gather_parts(x, runs, dim, context, lowering).narrow(along, start, stop - start).contiguous()
    pieces = [x.narrow(along, start, stop - start) for start, stop in targets]
    shape = list(x.shape)
    shape[along] = parts[context.position]
    wanted = [torch.Size([*shape[:dim], length, *shape[dim + 1 :]]) for length in lengths]
    if lowering == "padded":
        other_sizes = [size for slot, size in enumerate(x.shape) if slot not in (dim % x.dim(), along % x.dim())]
        sent = x.new_zeros((context.size, max(lengths) * max(parts) * torch.Size(other_sizes).numel()))
        for slot, piece in zip(sent, pieces, strict=True):
            slot[: piece.numel()] = piece.reshape(-1)
        received = torch.empty_like(sent)
        pace_collective(lambda: comms.all_to_all(received, sent, context.group))
        received_parts = [slot[: size.numel()].view(size) for slot, size in zip(received, wanted, strict=True)]
    else:
        sent = torch.cat([piece.reshape(-1) for piece in pieces])
        received = x.new_empty(sum(size.numel() for size in wanted))
        counts = [size.numel() for size in wanted]
        _all_to_all(received, sent, counts, [piece.numel() for piece in pieces], context)
        received_parts = [part.view(size) for part, size in zip(received.split(counts), wanted, strict=True)]
    return torch.cat(received_parts, dim)


def sum_all(x: torch.Tensor, context: ShardContext) -> torch.Tensor:
    """Return the sum of x over all devices, as a new tensor."""
    total = x.contiguous().clone()
    pace_collective(lambda: dist.all_reduce(total, group=context.group))
    return total


def _gather_padded(x: torch.Tensor, lengths: Sequence[int], context: ShardContext) -> torch.Tensor:
    longest = max(lengths)
    padded = x
    if len(x) < longest:
        padded = x.new_zeros((longest, *x.shape[1:]))
        padded[: len(x)] = x
    out = x.new_empty((longest * context.size, *x.shape[1:]))
    pace_collective(lambda: comms.all_gather(out, padded, context.group).wait())
    if min(lengths) < longest:
        out = torch.cat([out[i * longest : i * longest + length] for i, length in enumerate(lengths)])
    return out


def _gather_grouped(x: torch.Tensor, lengths: Sequence[int], context: ShardContext) -> torch.Tensor:
    out = x.new_empty((sum(lengths), *x.shape[1:]))
    parts = out.split(list(lengths))
    parts[context.position].copy_(x)
    if x.is_cuda:
        pace_collective(lambda: dist.all_gather(list(parts), x, group=context.group))  # NCCL: one launch of broadcasts
        return out

    def run_broadcasts() -> None:
        for root, part in enumerate(parts):
            if part.numel():
                dist.broadcast(part, group=context.group, group_src=root, async_op=True).wait()

    pace_collective(run_broadcasts)
    return out


def _gather_alltoallv(x: torch.Tensor, lengths: Sequence[int], context: ShardContext) -> torch.Tensor:
    out = x.new_empty((sum(lengths), *x.shape[1:]))
    sent = x.repeat(context.size, *[1] * (x.dim() - 1))
    _all_to_all(out, sent, list(lengths), [len(x)] * context.size, context)
    return out


def _scatter_padded(x: torch.Tensor, lengths: Sequence[int], context: ShardContext) -> torch.Tensor:
    longest = max(lengths)
    padded = x
    if min(lengths) < longest:
        padded = x.new_zeros((longest * context.size, *x.shape[1:]))
        for i, part in enumerate(x.split(list(lengths))):
            padded[i * longest : i * longest + len(part)] = part
    out = x.new_empty((longest, *x.shape[1:]))
    pace_collective(lambda: comms.reduce_scatter(out, padded, context.group).wait())
    return out[: lengths[context.position]]


def _scatter_grouped(x: torch.Tensor, lengths: Sequence[int], context: ShardContext) -> torch.Tensor:
    parts = list(x.split(list(lengths)))
    result = torch.empty_like(parts[context.position])
    if x.is_cuda:
        pace_collective(lambda: dist.reduce_scatter(result, parts, group=context.group))  # NCCL: one launch of reduces
        return result

    def run_reductions() -> torch.Tensor:
        summed = result
        for root, part in enumerate(parts):
            if part.numel():
                total = part.clone()  # the result on other ranks is undefined
                dist.reduce(total, group=context.group, group_dst=root, async_op=True).wait()
                if root == context.position:
                    summed = total
        return summed

    return pace_collective(run_reductions)


def _scatter_alltoallv(x: torch.Tensor, lengths: Sequence[int], context: ShardContext) -> torch.Tensor:
    length = lengths[context.position]
    received = x.new_empty((length * context.size, *x.shape[1:]))
    _all_to_all(received, x, [length] * context.size, list(lengths), context)
    return received.view(context.size, length, *x.shape[1:]).sum(0)


GATHERS = {"padded": _gather_padded, "grouped": _gather_grouped, "alltoallv": _gather_alltoallv}
SCATTERS = {"padded": _scatter_padded, "grouped": _scatter_grouped, "alltoallv": _scatter_alltoallv}


def _all_to_all(
    out: torch.Tensor, x: torch.Tensor, out_lengths: list[int], lengths: list[int], context: ShardContext
) -> None:
    pace_collective(lambda: comms.exchange(out, x, out_lengths, lengths, context.group))


def require_part(x: torch.Tensor, dim: int, runs: Sequence[Run], context: ShardContext, kind: str) -> None:
    """Raise PlanError for a tensor that is not this device's run along `dim`."""
    _require_length(x, dim, _run_lengths(runs)[context.position], kind, runs)


def _run_lengths(runs: Sequence[Run]) -> list[int]:
    return [stop - start for start, stop in runs]


def _require_length(x: torch.Tensor, dim: int, length: int, kind: str, runs: Sequence[Run]) -> None:
    """Raise PlanError for a tensor of the wrong local length: other devices rely on it, and would hang or fail."""
    if x.shape[dim] != length:
        raise PlanError(
            "A tensor that is not this device's part reached a collective.",
            where=f"{kind} along dimension {dim}",
            seen=f"{x.shape[dim]} of {runs[-1][1]}",
            allowed=f"{length}, with the runs {' '.join(f'{start}-{stop}' for start, stop in runs)}",
        )
