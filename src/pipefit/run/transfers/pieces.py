"""Pieces that this device sends and receives for every edge of a plan: one code path for all pairs of meshes.

Pure functions: forms and boxes in, pieces out; the worker turns pieces into messages. A tensor crosses an edge in its
wire layout (`plan.types.Wire`). The messages are the overlaps returned by `layout.transfer_moves`, so equal meshes,
uneven replicas and different shard counts need no special cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipefit.errors import PlanError
from pipefit.layout import AxisName, Box, Mesh, Run, TensorForm, held_box, parse_form, transfer_moves

ReplicaRuns = tuple[Sequence[Run], Sequence[Run]]
"""Runs of a tensor on the replicas of the sender and of the receiver, if they do not follow from shares."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """One message of a transfer, seen from one side."""

    peer: int
    "The other device."
    box: Box
    "The sent or received part of this device's local tensor."
    whole: bool
    "True if the box is all of the local tensor."


@dataclass(frozen=True, slots=True)
class OutgoingPieces:
    """All messages that a device sends of one tensor."""

    sum_over: tuple[AxisName, ...]
    "Axes of the sender's mesh over which partial sums are added before the tensor is sent."
    shape: tuple[int, ...]
    "Shape of the sender's local tensor."
    pieces: tuple[TensorPiece, ...]


@dataclass(frozen=True, slots=True)
class IncomingPieces:
    """All messages that a device receives of one tensor."""

    shape: tuple[int, ...]
    "Shape of the receiver's local tensor."
    pieces: tuple[TensorPiece, ...]
    zero: bool
    "True if nothing arrives and the tensor is zero: a partial sum that another position receives in full."


def outgoing_pieces(
    shape: Sequence[int],
    source: Mesh,
    sent: Sequence[str],
    wire: Sequence[str],
    target: Mesh,
    received: Sequence[str],
    device: int,
    runs: ReplicaRuns | None = None,
) -> OutgoingPieces:
    """Return the messages that `device` of `source` sends of a tensor of global `shape`.

    `sent` are the sender's forms, `wire` the forms in which it sends: equal, or with partial sums added (P to I or G),
    or with a replicated tensor cut (I to G). Raises PlanError for any other conversion.
    """
    held, leaves = _parse_forms(sent), _parse_forms(wire)
    sum_over = _partial_axes(source, held, leaves)
    local_box = held_box(shape, source, held, device, None if runs is None else runs[0])
    moves = transfer_moves(shape, source, leaves, target, _parse_forms(received), sender=device, replica_runs=runs)
    return OutgoingPieces(
        sum_over, _box_lengths(local_box), tuple(_make_piece(move.target, move.box, local_box) for move in moves)
    )


def incoming_pieces(
    shape: Sequence[int],
    source: Mesh,
    wire: Sequence[str],
    target: Mesh,
    received: Sequence[str],
    device: int,
    runs: ReplicaRuns | None = None,
) -> IncomingPieces:
    """Return the messages that `device` of `target` receives of a tensor of global `shape`."""
    leaves, wanted = _parse_forms(wire), _parse_forms(received)
    local_box = held_box(shape, target, wanted, device, None if runs is None else runs[1])
    moves = transfer_moves(shape, source, leaves, target, wanted, receiver=device, replica_runs=runs)
    return IncomingPieces(
        _box_lengths(local_box), tuple(_make_piece(move.source, move.box, local_box) for move in moves), not moves
    )


def _partial_axes(source: Mesh, sent: Sequence[TensorForm], wire: Sequence[TensorForm]) -> tuple[AxisName, ...]:
    summed: list[AxisName] = []
    for axis, before, after in zip(source.axes, sent, wire, strict=True):
        if before == after or axis.size == 1:
            continue
        if before.kind == "P":
            summed.append(axis.name)
        elif before.kind != "I" or after.kind != "G":
            raise PlanError(
                f"A tensor in form {before} cannot leave as {after}.",
                where=f"axis {axis.name!r} of the sender's group",
                seen=f"{before} to {after}",
                allowed="the same form, P to I or G (adds the partial sums), I to G (cuts)",
                next_step="let it leave in the form it has; the receivers take the parts that they need",
            )
    return tuple(summed)


def _make_piece(peer: int, box: Box, own: Box) -> TensorPiece:
    local = tuple((start - low, stop - low) for (start, stop), (low, _) in zip(box, own, strict=True))
    return TensorPiece(peer, local, box == own)


def _parse_forms(texts: Sequence[str]) -> tuple[TensorForm, ...]:
    return tuple(map(parse_form, texts))


def _box_lengths(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
