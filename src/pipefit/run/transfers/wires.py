"""Send and receive of tensors between devices: one code path for tensors of fixed shape and of packed spaces.

The pieces of a transfer and their channels are settled before they are used: those of a fixed shape once, those of a
packed space before the first action of every step, from the step's counts. All receive buffers of a packed edge have
the size of the longest so far, and the consumer takes a view of one: blocks of equal size are reused without
fragmentation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.run.transfers.cells import JointMessage, Operation, TensorCell
from pipefit.run.transfers.comms import PeerChannel
from pipefit.run.transfers.pieces import IncomingPieces, OutgoingPieces, TensorPiece

T = TypeVar("T", IncomingPieces, OutgoingPieces)

Wire = tuple[PeerChannel | None, tuple[slice, ...] | None]
"""The channel of a piece, None for a piece that stays on this device, and its part of the local tensor, None for all
of it."""


@dataclass(slots=True)
class LongestBuffer:
    """The largest number of elements in a receive buffer of an edge so far."""

    elements: int = 0


@dataclass(slots=True)
class SettledTransfer(Generic[T]):
    """One transfer of one microbatch, with its pieces and their channels."""

    find: Callable[[], T]
    "Returns the pieces for the current counts."
    channel: Callable[[int], PeerChannel | None]
    "Returns the channel to or from a device."
    longest: LongestBuffer = field(default_factory=LongestBuffer)
    now: T = field(init=False)
    wires: list[Wire] = field(init=False)

    def __post_init__(self) -> None:
        self.settle_again()

    def settle_again(self) -> None:
        """Find the pieces again, for the counts of another step."""
        self.now = self.find()
        self.wires = [(self.channel(piece.peer), _part_of(piece)) for piece in self.now.pieces]
        self.longest.elements = max(self.longest.elements, math.prod(self.now.shape))


@dataclass(frozen=True, slots=True)
class BufferKind:
    """The dtype and the device of receive buffers."""

    dtype: torch.dtype
    device: torch.device

    def make_buffer(self, settled: SettledTransfer[IncomingPieces]) -> Tensor:
        """Return a buffer for the tensor of a transfer; zero if nothing arrives."""
        shape, longest = settled.now.shape, settled.longest.elements
        make = torch.zeros if settled.now.zero else torch.empty
        if math.prod(shape) == longest:
            return make(shape, dtype=self.dtype, device=self.device)
        return make(longest, dtype=self.dtype, device=self.device)[: math.prod(shape)].view(shape)


def send_tensor(
    cell: TensorCell, queue: deque[Any], window: int, settled: SettledTransfer[OutgoingPieces], adds: Any
) -> Operation:
    """Return the operation that sends the receivers' pieces of the cell's tensor; a replica without tokens sends
    nothing.

    `window` is the number of sent tensors that may be in flight. `adds`: the process group that first adds partial
    sums; its members all have the same number of tokens.
    """

    def send_pieces() -> None:
        tensor = _summed_tensor(cell, settled, adds)
        cell.tensor = None
        works: list[Any] = []
        parts = _send_parts(tensor, settled.wires, works)
        queue.append((_joint_work(works), parts))
        if len(queue) > window:
            queue.popleft()[0].wait()

    return send_pieces


def receive_tensor(cell: TensorCell, settled: SettledTransfer[IncomingPieces], kind: BufferKind) -> Operation:
    """Return the operation that receives into a buffer of its own."""

    def receive_pieces() -> None:
        buffer = kind.make_buffer(settled)
        works: list[Any] = []
        copies = _receive_parts(buffer, settled.wires, works, kind)
        cell.work = _joint_work(works, copies) if works else None
        cell.tensor = buffer

    return receive_pieces


def exchange_tensor(
    cell: TensorCell,
    sends: SettledTransfer[OutgoingPieces],
    takes: SettledTransfer[IncomingPieces],
    adds: Any,
    kind: BufferKind,
) -> Operation:
    """Return the operation that moves a cell's tensor between the devices of one lane, from one mesh to another. The
    cell then holds this device's part, once it has arrived; the part that stays here is copied. `adds`: see
    `send_tensor`."""

    def replace_tensor() -> None:
        tensor = _summed_tensor(cell, sends, adds)
        buffer = kind.make_buffer(takes)
        works: list[Any] = []
        copies = _receive_parts(buffer, takes.wires, works, kind)
        here = [_slice_part(buffer, part) for channel, part in takes.wires if channel is None]
        leaves = [_slice_part(tensor, part) for channel, part in sends.wires if channel is None]
        for target, source in zip(here, leaves, strict=True):
            target.copy_(source)
        sent_parts = _send_parts(tensor, sends.wires, works)
        cell.work = JointMessage(works, copies, sent_parts) if works else None
        cell.tensor = buffer

    return replace_tensor


def _summed_tensor(cell: TensorCell, settled: SettledTransfer[OutgoingPieces], adds: Any) -> Tensor:
    """Return the cell's tensor, with its partial sums added by the group `adds`, if any."""
    tensor = cell.tensor
    assert tensor is not None and tuple(tensor.shape) == settled.now.shape, (tensor, settled.now.shape)
    if adds is not None and tensor.numel():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(tensor, group=adds)
    return tensor


def _send_parts(tensor: Tensor, wires: Sequence[Wire], works: list[Any]) -> list[Tensor]:
    """Send the parts of a tensor, add the messages to `works`, and return the parts, which must live until then."""
    parts = []
    for channel, part in wires:
        if channel is not None:
            group, peer, tag = channel
            parts.append(_slice_part(tensor, part).contiguous())
            works.append(group.send([parts[-1]], peer, tag))
    return parts


def _receive_parts(
    buffer: Tensor, wires: Sequence[Wire], works: list[Any], kind: BufferKind
) -> list[tuple[Tensor, Tensor]]:
    """Post the receives into the parts of a buffer, add the messages to `works`, and return the (part, scratch) to be
    copied when all have arrived."""
    copies = []
    for channel, slices in wires:
        if channel is None:
            continue
        part = _slice_part(buffer, slices)
        if not part.is_contiguous():
            scratch = torch.empty(part.shape, dtype=kind.dtype, device=kind.device)
            copies.append((part, scratch))
            part = scratch
        group, peer, tag = channel
        works.append(group.recv([part], peer, tag))
    return copies


def _joint_work(works: list[Any], copies: Sequence[tuple[Tensor, Tensor]] = ()) -> Any:
    """Return the messages as one; a single one is returned as it is."""
    return works[0] if len(works) == 1 and not copies else JointMessage(works, copies)


def _slice_part(tensor: Tensor, part: tuple[slice, ...] | None) -> Tensor:
    return tensor if part is None else tensor[part]


def _part_of(piece: TensorPiece) -> tuple[slice, ...] | None:
    return None if piece.whole else tuple(slice(start, stop) for start, stop in piece.box)
