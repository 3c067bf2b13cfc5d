"""The wires of one rank: for every transfer of its lane, buffers, channels and pieces, settled before the first step.

A `TensorCell` carries one tensor from the action that makes it to the action that uses it. Between stages on one device
that is all there is to a transfer, unless they hold it on the devices of their lane in different grids or forms: these
exchange what was made at once (`Wiring.exchange_operation`). Between devices a SEND empties the cell and a RECV fills
it. A receive buffer is made when its receive is posted and is the consumer's from then on that it takes it: what a
forward saves of its input is that buffer. What is received in several pieces is put together when the consumer takes
it. Tensors of packed spaces differ in length: what their transfers move follows from the step's counts (`begin_step`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.layout import Mesh
from pipefit.plan.types import Edge, Plan
from pipefit.run.transfers.cells import JointMessage, Operation, TensorCell
from pipefit.run.transfers.comms import Channel, CommGroups
from pipefit.run.transfers.packed import Counts, TokenRuns, packed_space
from pipefit.run.transfers.packed_wires import (
    LongestBuffer,
    SettledTransfer,
    exchange_pieces,
    packed_receive,
    packed_send,
)
from pipefit.run.transfers.pieces import IncomingPieces, OutgoingPieces, ReplicaRuns, incoming_pieces, outgoing_pieces
from pipefit.schedule.actions import Action
from pipefit.schedule.lowering.messages import channel_of, receive_windows


@dataclass(frozen=True, slots=True)
class EdgeDirection:
    """One edge in one direction: who sends it in which layouts, and where its channel is."""

    sender: Mesh
    receiver: Mesh
    sent: tuple[str, ...]
    wire: tuple[str, ...]
    received: tuple[str, ...]
    tag: int
    ends: tuple[int, int]
    "The stages that send and receive."
    space: str
    "The packed space of the tensor; '' where its shape is fixed."

    def pieces_sent(self, shape: Sequence[int], device: int, runs: ReplicaRuns | None = None) -> OutgoingPieces:
        return outgoing_pieces(shape, self.sender, self.sent, self.wire, self.receiver, self.received, device, runs)

    def pieces_received(self, shape: Sequence[int], device: int, runs: ReplicaRuns | None = None) -> IncomingPieces:
        return incoming_pieces(shape, self.sender, self.wire, self.receiver, self.received, device, runs)

    def packed_extent(
        self, shape: Sequence[int], tokens: TokenRuns, microbatch: int
    ) -> tuple[tuple[int, ...], ReplicaRuns]:
        """(global shape, runs of both sides' replicas) of a packed tensor in a microbatch."""
        one, two = (tokens.replica_runs(self.space, stage, microbatch) for stage in self.ends)
        return (shape[0], tokens.token_count(self.space, microbatch), *shape[2:]), (one, two)

    def pieces_in_any_step(
        self, shape: Sequence[int], tokens: TokenRuns, microbatch: int = 0
    ) -> Callable[[int], OutgoingPieces]:
        """device -> what it may send of a packed tensor in some step, in this microbatch: something to every replica
        that has one of its samples. Which of their shards meet, where these split tokens, the counts decide: so here
        the shards of each side split a dimension of their own, where any two meet; one dimension, where both sides
        always split alike."""
        one, two = self.sender, self.receiver
        alike = all(one.find_axis(name).shares == two.find_axis(name).shares for name in ("replica", "shard"))
        alike &= tokens.are_comparable(self.ends)
        own = {"sender": len(shape), "receiver": len(shape) + (not alike)}

        def keep_separate(group: Mesh, forms: Sequence[str], side: str) -> tuple[str, ...]:
            each = zip(group.axes, forms, strict=True)
            return tuple(f"G{own[side]}" if (axis.name, form) == ("shard", "G1") else form for axis, form in each)

        wire = keep_separate(one, self.wire, "sender")
        way = replace(self, sent=wire, wire=wire, received=keep_separate(two, self.received, "receiver"))
        splits = [sum(group.find_axis("shard").shares) for group in (one, two)]
        total, runs = tokens.runs_in_any_step(self.space, self.ends, microbatch)
        whole = (shape[0], total, *shape[2:], *splits)
        return lambda device: way.pieces_sent(whole, device, runs)


def edge_directions(plan: Plan) -> dict[tuple[int, int, str, str], EdgeDirection]:
    """(source stage, target stage, tensor, "F" or "B") -> how it crosses. Tags are 2 * edge, plus 1 for gradients."""
    result = {}
    for index, edge in enumerate(plan.edges):
        source, target = (plan.groups[plan.stages[s].group].to_mesh() for s in (edge.source, edge.target))
        f, b = edge.forward, edge.gradient
        key = (edge.source, edge.target, edge.tensor)
        ahead, back, space = (edge.source, edge.target), (edge.target, edge.source), packed_space(plan, edge)
        result[*key, "F"] = EdgeDirection(source, target, f.sent, f.wire, f.received, 2 * index, ahead, space)
        result[*key, "B"] = EdgeDirection(target, source, b.sent, b.wire, b.received, 2 * index + 1, back, space)
    return result


def transfer_key(action: Action) -> tuple[int, int, str, str]:
    """The key into `edge_directions` of a SEND or RECV: forward edges run from source to target, gradients back."""
    sends, forward = action.kind.startswith("SEND"), action.kind.endswith("F")
    one, two = (action.stage, action.peer) if sends == forward else (action.peer, action.stage)
    return (one, two, action.what, "F" if forward else "B")


def changes_grid(plan: Plan, edge: Edge) -> bool:
    """Whether two stages lie on one lane, but in different grids, with different numbers of microbatches together or
    one of them dividing images, or hold what one hands to the other in different forms: it changes places within the
    lane."""
    one, two = edge.source, edge.target
    if plan.order.placement[one] != plan.order.placement[two]:
        return False
    together = [(plan.stages[stage].microbatch_multiple, plan.stages[stage].divide) for stage in (one, two)]
    forms = any(wire.sent != wire.received for wire in (edge.forward, edge.gradient))
    return forms or together[0] != together[1] or plan.stage_mesh(one) != plan.stage_mesh(two)


def channel_pairs(plan: Plan, shape_of: Callable[[Edge], Sequence[int]]) -> list[tuple[int, int]]:
    """Every directed pair of devices that some edge uses in some step (device numbers, not ranks)."""
    edges = {(edge.source, edge.target, edge.tensor): edge for edge in plan.edges}
    tokens = TokenRuns(plan)
    pairs = []
    for (source, target, tensor, _), way in edge_directions(plan).items():
        edge = edges[source, target, tensor]
        if plan.order.placement[source] == plan.order.placement[target] and not changes_grid(plan, edge):
            continue
        shape = shape_of(edge)
        together = math.lcm(*(plan.stages[stage].microbatch_multiple for stage in (source, target)))
        for microbatch in range(together if way.space else 1):
            sends = way.pieces_in_any_step(shape, tokens, microbatch) if way.space else partial(way.pieces_sent, shape)
            for device in way.sender.devices:
                pairs += [(device, piece.peer) for piece in sends(device).pieces]
    return pairs


class TransferWiring:
    """Cells and channels of one rank, and the operations that move tensors through them.

    `shape_of(edge, slice)` is the global shape of a microbatch's slice on that edge; `ranks[device]` global ranks.
    """

    def __init__(
        self,
        plan: Plan,
        lane: int,
        device: int,
        comms: CommGroups,
        ranks: Mapping[int, int],
        torch_device: torch.device,
        dtype: torch.dtype,
        shape_of: Callable[[Edge, int], Sequence[int]],
    ) -> None:
        self.plan, self.lane, self.device = plan, lane, device
        self.comms, self.ranks = comms, ranks
        self.torch_device, self.dtype = torch_device, dtype
        self.cells: dict[tuple[object, ...], TensorCell] = {}
        self.queues: list[deque[tuple[Any, Tensor]]] = []
        self._shape_of = shape_of
        self._edges = {(edge.source, edge.target, edge.tensor): edge for edge in plan.edges}
        self._directions = edge_directions(plan)
        self._queues: dict[object, deque[tuple[Any, Tensor]]] = {}
        self._schedule = plan.to_schedule()
        self._windows: dict[int, Mapping[tuple[object, ...], int]] = {}
        self._tokens = TokenRuns(plan)
        self._longest: dict[object, LongestBuffer] = {}
        self._settled: list[SettledTransfer[Any]] = []

    def begin_step(self, counts: Counts) -> None:
        """Settle what the packed tensors of a step look like, before its first action."""
        if self._tokens.spaces:
            self._tokens.set_counts(counts)
        for settled in self._settled:
            settled.settle_again()

    def tensor_cell(self, key: tuple[int, int, str, str], microbatch: int, slice_: int) -> TensorCell:
        """The cell of one tensor of one edge in one direction."""
        return self.cells.setdefault((key, microbatch, slice_), TensorCell())

    def send_operation(self, action: Action) -> Operation:
        """The operation of a SEND."""
        key = transfer_key(action)
        way = self._directions[key]
        cell = self.tensor_cell(key, action.microbatch, action.slice)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
            self.queues.append(queue)
        own = self.ranks[self.device]
        if way.space:
            settled = self._settle_transfer(
                key, lambda: self._transfer_half(way.pieces_sent, way, key, action.microbatch, action.slice)
            )
            reach = partial(self._channel_to, way.tag)
            return packed_send(
                cell, queue, self._send_window(action), settled, reach, self._summing_group(way, settled.now)
            )
        out = way.pieces_sent(self._edge_shape(key, action.slice), self.device)
        pieces = []
        for piece in out.pieces:
            channel = self.comms.open_channel(own, self.ranks[piece.peer], way.tag)
            box = None if piece.whole else tuple(slice(start, stop) for start, stop in piece.box)
            pieces.append((channel[0].send, channel[1], channel[2], box))
        window = max(1, len(pieces)) * self._send_window(action)
        summed = self._summing_group(way, out)
        if summed is None and len(pieces) == 1 and pieces[0][3] is None:
            return _plain_send(cell, queue, window, *pieces[0][:3])
        return _general_send(cell, queue, window, pieces, summed)

    def receive_operation(self, action: Action) -> Operation:
        """The operation of a RECV into a buffer of its own."""
        key = transfer_key(action)
        way = self._directions[key]
        cell = self.tensor_cell(key, action.microbatch, action.slice)
        own = self.ranks[self.device]
        if way.space:
            settled = self._settle_transfer(
                key, lambda: self._transfer_half(way.pieces_received, way, key, action.microbatch, action.slice)
            )
            reach = partial(self._channel_from, way.tag)
            return packed_receive(cell, settled, reach, self.dtype, self.torch_device)
        got = way.pieces_received(self._edge_shape(key, action.slice), self.device)
        channels = [self.comms.open_channel(self.ranks[piece.peer], own, way.tag) for piece in got.pieces]
        if not got.zero and len(got.pieces) == 1 and got.pieces[0].whole:
            return self._plain_receive(cell, got.shape, *channels[0])
        return self._general_receive(cell, got, channels)

    def is_regridded(self, key: tuple[int, int, str, str]) -> bool:
        """Whether `exchange` must follow where the tensor is put into its cell."""
        return changes_grid(self.plan, self._edges[key[:3]])

    def exchange_operation(self, key: tuple[int, int, str, str], microbatch: int, slice_: int) -> Operation:
        """The operation that brings a tensor in its cell from the grid of the stage that made it to that of the stage
        that uses it, on the same devices. All devices of the lane come to it at the same place of their order."""
        way = self._directions[key]

        def settle_sends() -> OutgoingPieces:
            return self._transfer_half(way.pieces_sent, way, key, microbatch, slice_)

        def settle_receives() -> IncomingPieces:
            return self._transfer_half(way.pieces_received, way, key, microbatch, slice_)

        out, got = self._settle_transfer((*key, "sent"), settle_sends), self._settle_transfer(key, settle_receives)
        channels = partial(self._channel_to, way.tag), partial(self._channel_from, way.tag)
        cell, summed = self.tensor_cell(key, microbatch, slice_), self._summing_group(way, out.now)
        return exchange_pieces(cell, out, got, self.device, channels, summed, self.dtype, self.torch_device)

    def own_tokens(self, stage: int, microbatch: int) -> int:
        """How many tokens of a microbatch this device's replica of a stage in a packed space holds."""
        replica = self.plan.stage_mesh(stage).axis_position(self.device, "replica")
        start, stop = self._tokens.replica_runs(self.plan.stages[stage].space, stage, microbatch)[replica]
        return stop - start

    def _summing_group(self, way: EdgeDirection, out: OutgoingPieces) -> Any:
        """The process group that adds partial sums before they leave; None where there are none."""
        if not out.sum_over:
            return None
        return self.comms.find_group([self.ranks[d] for d in way.sender.devices_along(self.device, out.sum_over)])

    def wait_for_sends(self) -> None:
        """Wait for everything that was sent."""
        for queue in self.queues:
            for work, _ in queue:
                work.wait()
            queue.clear()

    def _plain_receive(self, cell: TensorCell, shape: Sequence[int], group: Any, peer: int, tag: int) -> Operation:
        call, empty, size, dtype, device = group.recv, torch.empty, tuple(shape), self.dtype, self.torch_device

        def receive_tensor() -> None:
            buffer = empty(size, dtype=dtype, device=device)
            cell.work = call([buffer], peer, tag)
            cell.tensor = buffer

        return receive_tensor

    def _general_receive(self, cell: TensorCell, got: IncomingPieces, channels: Sequence[Channel]) -> Operation:
        boxes = [tuple(slice(start, stop) for start, stop in piece.box) for piece in got.pieces]
        dtype, device = self.dtype, self.torch_device

        def receive_tensor() -> None:
            buffer = torch.zeros(got.shape, dtype=dtype, device=device)
            works, copies = [], []
            for box, (group, peer, tag) in zip(boxes, channels, strict=True):
                part = buffer[box]
                if not part.is_contiguous():
                    scratch = torch.empty(part.shape, dtype=dtype, device=device)
                    copies.append((part, scratch))
                    part = scratch
                works.append(group.recv([part], peer, tag))
            cell.work = JointMessage(works, copies) if works else None
            cell.tensor = buffer

        return receive_tensor

    def _settle_transfer(self, key: object, find: Callable[[], Any]) -> SettledTransfer[Any]:
        settled = SettledTransfer(find, self._longest.setdefault(key, LongestBuffer()))
        self._settled.append(settled)
        return settled

    def _transfer_half(
        self, half: Callable[..., Any], way: EdgeDirection, key: tuple[int, int, str, str], microbatch: int, slice_: int
    ) -> Any:
        """Our half of a transfer, of a packed tensor by the counts as they are now."""
        shape = self._edge_shape(key, slice_)
        if not way.space:
            return half(shape, self.device)
        shape, runs = way.packed_extent(shape, self._tokens, microbatch)
        return half(shape, self.device, runs)

    def _channel_to(self, tag: int, device: int) -> Channel:
        return self.comms.open_channel(self.ranks[self.device], self.ranks[device], tag)

    def _channel_from(self, tag: int, device: int) -> Channel:
        return self.comms.open_channel(self.ranks[device], self.ranks[self.device], tag)

    def _send_window(self, action: Action) -> int:
        """How many messages of a channel may be under way: as many as the receiver has open receives at once."""
        lane = self.plan.order.placement[action.peer]
        if lane not in self._windows:
            self._windows[lane] = receive_windows(self._schedule.lanes[lane], self._schedule.turns)
        return self._windows[lane][channel_of(action)]

    def _edge_shape(self, key: tuple[int, int, str, str], slice_: int) -> Sequence[int]:
        return self._shape_of(self._edges[key[:3]], slice_)


def _plain_send(cell: TensorCell, queue: deque[Any], window: int, call: Any, peer: int, tag: int) -> Operation:
    append, popleft = queue.append, queue.popleft

    def send_tensor() -> None:
        tensor = cell.tensor.contiguous()  # type: ignore[union-attr]
        cell.tensor = None
        append((call([tensor], peer, tag), tensor))
        if len(queue) > window:
            popleft()[0].wait()

    return send_tensor


def _general_send(cell: TensorCell, queue: deque[Any], window: int, pieces: Sequence[Any], summed: Any) -> Operation:
    def send_pieces() -> None:
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

    return send_pieces
