"""Transfers of one rank: buffers, channels and pieces for every transfer of its lane, settled before the first step.

A `TensorCell` carries one tensor from the action that makes it to the action that uses it. Between stages on one device
no further transfer is needed, unless they hold it in different meshes or forms on the devices of their lane: then the
devices exchange it at once (`TransferWiring.exchange_operation`). Between devices a SEND empties the cell and a RECV
fills it. A receive buffer is made when its receive is posted and then belongs to the consumer: a forward saves that
buffer as its input. A tensor received in several pieces is assembled when the consumer takes it. Tensors of packed
spaces differ in length: their pieces follow from the step's counts (`begin_step`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipefit.layout import Mesh
from pipefit.plan.types import Edge, Plan
from pipefit.run.transfers.cells import Operation, TensorCell
from pipefit.run.transfers.comms import CommGroups, PeerChannel
from pipefit.run.transfers.packed import Counts, TokenRuns, packed_space
from pipefit.run.transfers.pieces import IncomingPieces, OutgoingPieces, ReplicaRuns, incoming_pieces, outgoing_pieces
from pipefit.run.transfers.wires import (
    BufferKind,
    LongestBuffer,
    SettledTransfer,
    exchange_tensor,
    receive_tensor,
    send_tensor,
)
from pipefit.schedule.actions import Action
from pipefit.schedule.lowering.messages import channel_of, receive_windows

TransferKey = tuple[int, int, str, str]
"""Source stage, target stage, tensor, and "F" or "B"."""


@dataclass(frozen=True, slots=True)
class EdgeDirection:
    """One edge in one direction: meshes and forms of sender and receiver, and the tag of its channel."""

    sender: Mesh
    receiver: Mesh
    sent: tuple[str, ...]
    wire: tuple[str, ...]
    received: tuple[str, ...]
    tag: int
    ends: tuple[int, int]
    "The stages that send and receive."
    space: str
    "The packed space of the tensor; '' if its shape is fixed."

    def pieces_sent(self, shape: Sequence[int], device: int, runs: ReplicaRuns | None = None) -> OutgoingPieces:
        return outgoing_pieces(shape, self.sender, self.sent, self.wire, self.receiver, self.received, device, runs)

    def pieces_received(self, shape: Sequence[int], device: int, runs: ReplicaRuns | None = None) -> IncomingPieces:
        return incoming_pieces(shape, self.sender, self.wire, self.receiver, self.received, device, runs)

    def packed_extent(
        self, shape: Sequence[int], tokens: TokenRuns, microbatch: int
    ) -> tuple[tuple[int, ...], ReplicaRuns]:
        """Return (global shape, runs of both sides' replicas) of a packed tensor in a microbatch."""
        sender_runs, receiver_runs = (tokens.replica_runs(self.space, stage, microbatch) for stage in self.ends)
        return (shape[0], tokens.token_count(self.space, microbatch), *shape[2:]), (sender_runs, receiver_runs)

    def pieces_in_any_step(
        self, shape: Sequence[int], tokens: TokenRuns, microbatch: int = 0
    ) -> Callable[[int], OutgoingPieces]:
        """Return device -> pieces of a packed tensor that it may send in some step, in this microbatch.

        It sends to every replica that has one of its samples. If shards split tokens, the counts decide which shards
        overlap. Here the shards of each side therefore split an extra dimension of their own, so that every pair
        overlaps; both sides share one extra dimension if they always split in the same way.
        """
        sender_mesh, receiver_mesh = self.sender, self.receiver
        equal_splits = all(
            sender_mesh.find_axis(name).shares == receiver_mesh.find_axis(name).shares for name in ("replica", "shard")
        )
        equal_splits &= tokens.are_comparable(self.ends)
        split_dims = {"sender": len(shape), "receiver": len(shape) + (not equal_splits)}

        def keep_separate(group: Mesh, forms: Sequence[str], side: str) -> tuple[str, ...]:
            axis_forms = zip(group.axes, forms, strict=True)
            return tuple(
                f"G{split_dims[side]}" if (axis.name, form) == ("shard", "G1") else form for axis, form in axis_forms
            )

        wire = keep_separate(sender_mesh, self.wire, "sender")
        direction = replace(
            self, sent=wire, wire=wire, received=keep_separate(receiver_mesh, self.received, "receiver")
        )
        splits = [sum(group.find_axis("shard").shares) for group in (sender_mesh, receiver_mesh)]
        total, runs = tokens.runs_in_any_step(self.space, self.ends, microbatch)
        full_shape = (shape[0], total, *shape[2:], *splits)
        return lambda device: direction.pieces_sent(full_shape, device, runs)


def edge_directions(plan: Plan) -> dict[TransferKey, EdgeDirection]:
    """Return (source stage, target stage, tensor, "F" or "B") -> direction. Tags are 2 * edge, plus 1 for gradients."""
    result = {}
    for index, edge in enumerate(plan.edges):
        source, target = (plan.groups[plan.stages[s].group].to_mesh() for s in (edge.source, edge.target))
        f, b = edge.forward, edge.gradient
        key = (edge.source, edge.target, edge.tensor)
        ahead, back, space = (edge.source, edge.target), (edge.target, edge.source), packed_space(plan, edge)
        result[*key, "F"] = EdgeDirection(source, target, f.sent, f.wire, f.received, 2 * index, ahead, space)
        result[*key, "B"] = EdgeDirection(target, source, b.sent, b.wire, b.received, 2 * index + 1, back, space)
    return result


def transfer_key(action: Action) -> TransferKey:
    """Return the key into `edge_directions` of a SEND or RECV: forward edges run from source to target, gradients
    back."""
    sends, forward = action.kind.startswith("SEND"), action.kind.endswith("F")
    source, target = (action.stage, action.peer) if sends == forward else (action.peer, action.stage)
    return (source, target, action.what, "F" if forward else "B")


def changes_grid(plan: Plan, edge: Edge) -> bool:
    """Return True if a tensor changes its distribution between two stages of one lane. They may differ in the mesh, in
    the microbatches taken together, in dividing images, or in the tensor's forms."""
    source, target = edge.source, edge.target
    if plan.order.placement[source] != plan.order.placement[target]:
        return False
    together = [(plan.stages[stage].microbatch_multiple, plan.stages[stage].divide) for stage in (source, target)]
    forms = any(wire.sent != wire.received for wire in (edge.forward, edge.gradient))
    return forms or together[0] != together[1] or plan.stage_mesh(source) != plan.stage_mesh(target)


def channel_pairs(plan: Plan, shape_of: Callable[[Edge], Sequence[int]]) -> list[tuple[int, int]]:
    """Return every directed pair of devices that some edge uses in some step (device numbers, not ranks)."""
    edges = {(edge.source, edge.target, edge.tensor): edge for edge in plan.edges}
    tokens = TokenRuns(plan)
    pairs = []
    for (source, target, tensor, _), direction in edge_directions(plan).items():
        edge = edges[source, target, tensor]
        if plan.order.placement[source] == plan.order.placement[target] and not changes_grid(plan, edge):
            continue
        shape = shape_of(edge)
        together = math.lcm(*(plan.stages[stage].microbatch_multiple for stage in (source, target)))
        for microbatch in range(together if direction.space else 1):
            sends = (
                direction.pieces_in_any_step(shape, tokens, microbatch)
                if direction.space
                else partial(direction.pieces_sent, shape)
            )
            for device in direction.sender.devices:
                pairs += [(device, piece.peer) for piece in sends(device).pieces]
    return pairs


class TransferWiring:
    """Cells and channels of one rank, and the operations that move tensors through them.

    `shape_of(edge, slice)` is the global shape of a microbatch's slice on that edge; `ranks[device]` are global ranks.
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
        self.buffers = BufferKind(dtype, torch_device)
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
        """Settle the pieces of a step's packed tensors, before its first action."""
        if self._tokens.spaces:
            self._tokens.set_counts(counts)
        for settled in self._settled:
            settled.settle_again()

    def tensor_cell(self, key: TransferKey, microbatch: int, slice_: int) -> TensorCell:
        """Return the cell of one tensor of one edge in one direction."""
        return self.cells.setdefault((key, microbatch, slice_), TensorCell())

    def send_operation(self, action: Action) -> Operation:
        """Return the operation of a SEND."""
        key = transfer_key(action)
        direction = self._directions[key]
        cell = self.tensor_cell(key, action.microbatch, action.slice)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
            self.queues.append(queue)
        settled = self._settle_sends(key, action.microbatch, action.slice)
        summed = self._summing_group(direction, settled.now)
        return send_tensor(cell, queue, self._send_window(action), settled, summed)

    def receive_operation(self, action: Action) -> Operation:
        """Return the operation of a RECV into a buffer of its own."""
        key = transfer_key(action)
        cell = self.tensor_cell(key, action.microbatch, action.slice)
        return receive_tensor(cell, self._settle_receives(key, action.microbatch, action.slice), self.buffers)

    def is_regridded(self, key: TransferKey) -> bool:
        """Return True if `exchange_operation` must follow when the tensor is put into its cell."""
        return changes_grid(self.plan, self._edges[key[:3]])

    def exchange_operation(self, key: TransferKey, microbatch: int, slice_: int) -> Operation:
        """Return the operation that moves a tensor in its cell from the mesh of the producing stage to that of the
        consuming stage, on the same devices. All devices of the lane run it at the same position of their order."""
        out, got = self._settle_sends(key, microbatch, slice_), self._settle_receives(key, microbatch, slice_)
        cell, summed = self.tensor_cell(key, microbatch, slice_), self._summing_group(self._directions[key], out.now)
        return exchange_tensor(cell, out, got, summed, self.buffers)

    def own_tokens(self, stage: int, microbatch: int) -> int:
        """Return the number of a microbatch's tokens on this device's replica of a stage in a packed space."""
        replica = self.plan.stage_mesh(stage).axis_position(self.device, "replica")
        start, stop = self._tokens.replica_runs(self.plan.stages[stage].space, stage, microbatch)[replica]
        return stop - start

    def _summing_group(self, way: EdgeDirection, out: OutgoingPieces) -> Any:
        """Return the process group that adds partial sums before they are sent; None if there are none."""
        if not out.sum_over:
            return None
        return self.comms.find_group([self.ranks[d] for d in way.sender.devices_along(self.device, out.sum_over)])

    def wait_for_sends(self) -> None:
        """Wait for all sent messages."""
        for queue in self.queues:
            for work, _ in queue:
                work.wait()
            queue.clear()

    def _settle_sends(self, key: TransferKey, microbatch: int, slice_: int) -> SettledTransfer[OutgoingPieces]:
        direction = self._directions[key]
        find = partial(self._transfer_half, direction.pieces_sent, key, microbatch, slice_)
        return self._keep_settled(direction, SettledTransfer(find, partial(self._channel_to, direction.tag)))

    def _settle_receives(self, key: TransferKey, microbatch: int, slice_: int) -> SettledTransfer[IncomingPieces]:
        direction = self._directions[key]
        find = partial(self._transfer_half, direction.pieces_received, key, microbatch, slice_)
        longest = self._longest.setdefault(key, LongestBuffer()) if direction.space else LongestBuffer()
        return self._keep_settled(direction, SettledTransfer(find, partial(self._channel_from, direction.tag), longest))

    def _keep_settled(self, direction: EdgeDirection, settled: Any) -> Any:
        """Keep a transfer whose pieces change with the step's counts, and return it."""
        if direction.space:
            self._settled.append(settled)
        return settled

    def _transfer_half(self, half: Callable[..., Any], key: TransferKey, microbatch: int, slice_: int) -> Any:
        """Return this device's half of a transfer; for a packed tensor by the current counts."""
        shape, direction = self._edge_shape(key, slice_), self._directions[key]
        if not direction.space:
            return half(shape, self.device)
        shape, runs = direction.packed_extent(shape, self._tokens, microbatch)
        return half(shape, self.device, runs)

    def _channel_to(self, tag: int, device: int) -> PeerChannel | None:
        """Return the channel to a device; None to this one."""
        if device == self.device:
            return None
        return self.comms.open_channel(self.ranks[self.device], self.ranks[device], tag)

    def _channel_from(self, tag: int, device: int) -> PeerChannel | None:
        if device == self.device:
            return None
        return self.comms.open_channel(self.ranks[device], self.ranks[self.device], tag)

    def _send_window(self, action: Action) -> int:
        """Return the number of messages of a channel that may be in flight: the receives that the receiver has open at
        once."""
        lane = self.plan.order.placement[action.peer]
        if lane not in self._windows:
            self._windows[lane] = receive_windows(self._schedule.lanes[lane], self._schedule.turns)
        return self._windows[lane][channel_of(action)]

    def _edge_shape(self, key: TransferKey, slice_: int) -> Sequence[int]:
        return self._shape_of(self._edges[key[:3]], slice_)
