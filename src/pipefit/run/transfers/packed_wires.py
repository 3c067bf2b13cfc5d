"""Sending and receiving tensors of packed spaces: the same operations in every step, of other pieces in each.

What a transfer moves follows from the step's counts and is settled before the first action of the step. Receive
buffers of an edge are all as long as the longest so far, and the consumer takes a view of one: memory in equal blocks
is used again without being broken up.
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
    """The most elements that a receive buffer of an edge had to hold so far."""

    elements: int = 0


@dataclass(slots=True)
class SettledTransfer(Generic[T]):
    """One transfer of one microbatch, as the present step has it."""

    find: Callable[[], T]
    longest: LongestBuffer = field(default_factory=LongestBuffer)
    now: T = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.find()

    def settle_again(self) -> None:
        """Look again: the counts of another step are known."""
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
    """Send what the receivers need of the cell's tensor; a replica without tokens sends nothing. `adds`: the process
    group over which partial sums are added before, whose members all have equally many tokens."""

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
    """Receive into a view of a buffer that is as long as the longest."""

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
    """Between the devices of one lane, from one grid to another: the tensor in the cell is replaced by what device
    `own` is to have of it, once that has arrived. What it has already is copied. `channels` to and from a device;
    `adds` as of `packed_send`."""
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
        works, copies, kept, here = [], [], [], None
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
            kept.append(part.contiguous())
            group, peer, tag = to(piece.peer)
            works.append(group.send([kept[-1]], peer, tag))
        cell.work = JointMessage(works, copies, kept) if works else None
        cell.tensor = buffer

    return replace_tensor


def _box_slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
