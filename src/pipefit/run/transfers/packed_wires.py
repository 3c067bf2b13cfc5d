"""Send and receive of tensors of packed spaces: the same operations in every step, with different pieces.

The pieces of a transfer follow from the step's counts and are settled before the first action of the step. All receive
buffers of an edge have the size of the longest so far, and the consumer takes a view of one: blocks of equal size are
reused without fragmentation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from pipefit.layout import Box
from pipefit.run.transfers.cells import JointMessage, Operation, TensorCell
from pipefit.run.transfers.comms import Channel
from pipefit.run.transfers.pieces import IncomingPieces, OutgoingPieces

T = TypeVar("T", IncomingPieces, OutgoingPieces)


@dataclass(slots=True)
class LongestBuffer:
    """The largest number of elements in a receive buffer of an edge so far."""

    elements: int = 0


@dataclass(slots=True)
class SettledTransfer(Generic[T]):
    """One transfer of one microbatch, with its pieces in the current step."""

    find: Callable[[], T]
    longest: LongestBuffer = field(default_factory=LongestBuffer)
    now: T = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.find()

    def settle_again(self) -> None:
        """Find the pieces again, for the counts of another step."""
        self.now = self.find()
        self.longest.elements = max(self.longest.elements, math.prod(self.now.shape))


def packed_send(
    cell: TensorCell,
    queue: deque[Any],
    window: int,
    settled: SettledTransfer[OutgoingPieces],
    channel: Callable[[int], Channel],
    adds: Any,
) -> Operation:
    """Return the operation that sends the receivers' pieces of the cell's tensor; a replica without tokens sends
    nothing. `adds`: the process group that first adds partial sums; its members all have the same number of tokens."""

    def send_pieces() -> None:
        tensor, cell.tensor = cell.tensor, None
        out = settled.now
        assert tensor is not None and tuple(tensor.shape) == out.shape, (tensor, out.shape)
        if adds is not None and tensor.numel():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(tensor, group=adds)
        works, parts = [], []
        for piece in out.pieces:
            group, peer, tag = channel(piece.peer)
            part = (tensor if piece.whole else tensor[_box_slices(piece.box)]).contiguous()
            works.append(group.send([part], peer, tag))
            parts.append(part)
        queue.append((JointMessage(works), parts))
        if len(queue) > window:
            queue.popleft()[0].wait()

    return send_pieces


def packed_receive(
    cell: TensorCell,
    settled: SettledTransfer[IncomingPieces],
    channel: Callable[[int], Channel],
    dtype: torch.dtype,
    device: torch.device,
) -> Operation:
    """Return the operation that receives into a view of a buffer with the size of the longest."""

    def receive_pieces() -> None:
        got = settled.now
        flat = torch.empty(settled.longest.elements, dtype=dtype, device=device)
        buffer = flat[: math.prod(got.shape)].view(got.shape)
        if got.zero:
            buffer.zero_()
        works, copies = [], []
        for piece in got.pieces:
            group, peer, tag = channel(piece.peer)
            part = buffer[_box_slices(piece.box)]
            if not part.is_contiguous():
                scratch = torch.empty(part.shape, dtype=dtype, device=device)
                copies.append((part, scratch))
                part = scratch
            works.append(group.recv([part], peer, tag))
        cell.work = JointMessage(works, copies) if works else None
        cell.tensor = buffer

    return receive_pieces


def exchange_pieces(
    cell: TensorCell,
    sends: SettledTransfer[OutgoingPieces],
    takes: SettledTransfer[IncomingPieces],
    own: int,
    channels: tuple[Callable[[int], Channel], Callable[[int], Channel]],
    adds: Any,
    dtype: torch.dtype,
    device: torch.device,
) -> Operation:
    """Return the operation that moves a cell's tensor between the devices of one lane, from one mesh to another. The
    cell then holds the part of device `own`, once it has arrived; local parts are copied. `channels` to and from a
    device; `adds` as for `packed_send`."""
    to, come = channels

    def replace_tensor() -> None:
        out, got = sends.now, takes.now
        tensor = cell.tensor
        assert tensor is not None and tuple(tensor.shape) == out.shape, (tensor, out.shape)
        if adds is not None and tensor.numel():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(tensor, group=adds)
        flat = torch.empty(takes.longest.elements, dtype=dtype, device=device)
        buffer = flat[: math.prod(got.shape)].view(got.shape)
        if got.zero:
            buffer.zero_()
        works, copies, sent_parts, here = [], [], [], None
        for piece in got.pieces:
            part = buffer[_box_slices(piece.box)]
            if piece.peer == own:
                here = part
                continue
            if not part.is_contiguous():
                scratch = torch.empty(part.shape, dtype=dtype, device=device)
                copies.append((part, scratch))
                part = scratch
            group, peer, tag = come(piece.peer)
            works.append(group.recv([part], peer, tag))
        for piece in out.pieces:
            part = tensor[_box_slices(piece.box)]
            if piece.peer == own:
                assert here is not None
                here.copy_(part)
                continue
            sent_parts.append(part.contiguous())
            group, peer, tag = to(piece.peer)
            works.append(group.send([sent_parts[-1]], peer, tag))
        cell.work = JointMessage(works, copies, sent_parts) if works else None
        cell.tensor = buffer

    return replace_tensor


def _box_slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
