"""The wires of one rank: for every transfer of its lane, buffers, channels and pieces, settled before the first step.

A `Cell` carries one tensor from the action that makes it to the action that uses it. Between stages on one device
that is all there is to a transfer; between devices a SEND empties the cell and a RECV fills it. A receive buffer is
made when its receive is posted and is the consumer's from then on that it takes it: what a forward saves of its input
is that buffer. What is received in several pieces is put together when the consumer takes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.errors import PlanError
from pipefit.layout import Group
from pipefit.plan.types import Edge, Plan
from pipefit.run.comms import Channel, Comms
from pipefit.run.transfers import Incoming, Outgoing, incoming, outgoing
from pipefit.schedule.actions import Action
from pipefit.schedule.messages import channel, windows

Operation = Callable[[], None]


class Cell:
    """A place for one tensor on its way. `work` is the message that fills it, until somebody has waited for it."""

    __slots__ = ("tensor", "work")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.work: Any = None

    def arrive(self) -> None:
        """Wait for the message, if there is one."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def take(self) -> Tensor:
        """The tensor, once it has arrived; the cell lets go of it."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        tensor, self.tensor = self.tensor, None
        assert tensor is not None, "a tensor was used before it was made"
        return tensor


class _Joint:
    """Several messages that make up one tensor."""

    __slots__ = ("copies", "works")

    def __init__(self, works: list[Any], copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.works = works
        self.copies = copies

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for target, scratch in self.copies:
            target.copy_(scratch)


@dataclass(frozen=True, slots=True)
class Direction:
    """One edge in one direction: who sends it in which layouts, and where its channel is."""

    sender: Group
    receiver: Group
    sent: tuple[str, ...]
    wire: tuple[str, ...]
    received: tuple[str, ...]
    tag: int

    def sends(self, shape: Sequence[int], device: int) -> Outgoing:
        return outgoing(shape, self.sender, self.sent, self.wire, self.receiver, self.received, device)

    def receives(self, shape: Sequence[int], device: int) -> Incoming:
        return incoming(shape, self.sender, self.wire, self.receiver, self.received, device)


def directions(plan: Plan) -> dict[tuple[int, int, str, str], Direction]:
    """(source stage, target stage, tensor, "F" or "B") -> how it crosses. Tags are 2 * edge, plus 1 for gradients."""
    result = {}
    for index, edge in enumerate(plan.edges):
        source, target = (plan.groups[plan.stages[s].group].group() for s in (edge.source, edge.target))
        f, b = edge.forward, edge.gradient
        key = (edge.source, edge.target, edge.tensor)
        result[*key, "F"] = Direction(source, target, f.sent, f.wire, f.received, 2 * index)
        result[*key, "B"] = Direction(target, source, b.sent, b.wire, b.received, 2 * index + 1)
    return result


def transfer_key(action: Action) -> tuple[int, int, str, str]:
    """The key into `directions` of a SEND or RECV: forward edges run from source to target, gradients back."""
    sends, forward = action.kind.startswith("SEND"), action.kind.endswith("F")
    one, two = (action.stage, action.peer) if sends == forward else (action.peer, action.stage)
    return (one, two, action.what, "F" if forward else "B")


def channel_pairs(plan: Plan, shape_of: Callable[[Edge], Sequence[int]]) -> list[tuple[int, int]]:
    """Every directed pair of devices that some edge uses (device numbers, not ranks)."""
    edges = {(edge.source, edge.target, edge.tensor): edge for edge in plan.edges}
    pairs = []
    for (source, target, tensor, _), way in directions(plan).items():
        if plan.order.placement[source] == plan.order.placement[target]:
            continue
        shape = shape_of(edges[source, target, tensor])
        for device in way.sender.devices:
            pairs += [(device, piece.peer) for piece in way.sends(shape, device).pieces]
    return pairs


class Wiring:
    """Cells and channels of one rank, and the operations that move tensors through them.

    `shape_of(edge, slice)` is the global shape of a microbatch's slice on that edge; `ranks[device]` global ranks.
    """

    def __init__(
        self,
        plan: Plan,
        lane: int,
        device: int,
        comms: Comms,
        ranks: Mapping[int, int],
        torch_device: torch.device,
        dtype: torch.dtype,
        shape_of: Callable[[Edge, int], Sequence[int]],
    ) -> None:
        self.plan, self.lane, self.device = plan, lane, device
        self.comms, self.ranks = comms, ranks
        self.torch_device, self.dtype = torch_device, dtype
        self.cells: dict[tuple[object, ...], Cell] = {}
        self.queues: list[deque[tuple[Any, Tensor]]] = []
        self._shape_of = shape_of
        self._edges = {(edge.source, edge.target, edge.tensor): edge for edge in plan.edges}
        self._directions = directions(plan)
        self._queues: dict[object, deque[tuple[Any, Tensor]]] = {}
        self._lanes = plan.order.schedule().lanes
        self._windows: dict[int, Mapping[tuple[object, ...], int]] = {}
        self._check_local_edges()

    def cell(self, key: tuple[int, int, str, str], microbatch: int, slice_: int) -> Cell:
        """The cell of one tensor of one edge in one direction."""
        return self.cells.setdefault((key, microbatch, slice_), Cell())

    def send(self, action: Action) -> Operation:
        """The operation of a SEND."""
        key = transfer_key(action)
        way = self._directions[key]
        out = way.sends(self._shape(key, action.slice), self.device)
        cell = self.cell(key, action.microbatch, action.slice)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
            self.queues.append(queue)
        own = self.ranks[self.device]
        pieces = []
        for piece in out.pieces:
            channel = self.comms.channel(own, self.ranks[piece.peer], way.tag)
            box = None if piece.whole else tuple(slice(start, stop) for start, stop in piece.box)
            pieces.append((channel[0].send, channel[1], channel[2], box))
        window = max(1, len(pieces)) * self._window(action)
        summed = None
        if out.sum_over:
            members = way.sender.along(self.device, out.sum_over)
            summed = self.comms.group([self.ranks[d] for d in members])
        if summed is None and len(pieces) == 1 and pieces[0][3] is None:
            return _plain_send(cell, queue, window, *pieces[0][:3])
        return _general_send(cell, queue, window, pieces, summed)

    def receive(self, action: Action) -> Operation:
        """The operation of a RECV into a buffer of its own."""
        key = transfer_key(action)
        way = self._directions[key]
        got = way.receives(self._shape(key, action.slice), self.device)
        cell = self.cell(key, action.microbatch, action.slice)
        own = self.ranks[self.device]
        channels = [self.comms.channel(self.ranks[piece.peer], own, way.tag) for piece in got.pieces]
        if not got.zero and len(got.pieces) == 1 and got.pieces[0].whole:
            return self._plain_receive(cell, got.shape, *channels[0])
        return self._general_receive(cell, got, channels)

    def flush(self) -> None:
        """Wait for everything that was sent."""
        for queue in self.queues:
            for work, _ in queue:
                work.wait()
            queue.clear()

    def _plain_receive(self, cell: Cell, shape: Sequence[int], group: Any, peer: int, tag: int) -> Operation:
        call, empty, size, dtype, device = group.recv, torch.empty, tuple(shape), self.dtype, self.torch_device

        def receive() -> None:
            buffer = empty(size, dtype=dtype, device=device)
            cell.work = call([buffer], peer, tag)
            cell.tensor = buffer

        return receive

    def _general_receive(self, cell: Cell, got: Incoming, channels: Sequence[Channel]) -> Operation:
        boxes = [tuple(slice(start, stop) for start, stop in piece.box) for piece in got.pieces]
        dtype, device = self.dtype, self.torch_device

        def receive() -> None:
            buffer = torch.zeros(got.shape, dtype=dtype, device=device)
            works, copies = [], []
            for box, (group, peer, tag) in zip(boxes, channels, strict=True):
                part = buffer[box]
                if not part.is_contiguous():
                    scratch = torch.empty(part.shape, dtype=dtype, device=device)
                    copies.append((part, scratch))
                    part = scratch
                works.append(group.recv([part], peer, tag))
            cell.work = _Joint(works, copies) if works else None
            cell.tensor = buffer

        return receive

    def _window(self, action: Action) -> int:
        """How many messages of a channel may be under way: as many as the receiver has open receives at once."""
        lane = self.plan.order.placement[action.peer]
        if lane not in self._windows:
            self._windows[lane] = windows(self._lanes[lane])
        return self._windows[lane][channel(action)]

    def _shape(self, key: tuple[int, int, str, str], slice_: int) -> Sequence[int]:
        return self._shape_of(self._edges[key[:3]], slice_)

    def _check_local_edges(self) -> None:
        """Stages on the same devices hand tensors over as they are: their forms must agree."""
        placement = self.plan.order.placement
        for index, edge in enumerate(self.plan.edges):
            if placement[edge.source] == placement[edge.target]:
                for wire in (edge.forward, edge.gradient):
                    if wire.sent != wire.received:
                        raise PlanError(
                            "Two stages on the same devices hand a tensor over in different forms.",
                            where=f"edges[{index}], stages {edge.source} and {edge.target}",
                            seen=f"{','.join(wire.sent)} to {','.join(wire.received)}",
                            allowed="equal forms: nothing is moved between stages that share their devices",
                        )


def _plain_send(cell: Cell, queue: deque[Any], window: int, call: Any, peer: int, tag: int) -> Operation:
    append, popleft = queue.append, queue.popleft

    def send() -> None:
        tensor = cell.tensor.contiguous()  # type: ignore[union-attr]
        cell.tensor = None
        append((call([tensor], peer, tag), tensor))
        if len(queue) > window:
            popleft()[0].wait()

    return send


def _general_send(cell: Cell, queue: deque[Any], window: int, pieces: Sequence[Any], summed: Any) -> Operation:
    def send() -> None:
        tensor = cell.tensor
        cell.tensor = None
        assert tensor is not None
        if summed is not None:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(tensor, group=summed)
        for call, peer, tag, box in pieces:
            part = (tensor if box is None else tensor[box]).contiguous()
            queue.append((call([part], peer, tag), part))
        while len(queue) > window:
            queue.popleft()[0].wait()

    return send
