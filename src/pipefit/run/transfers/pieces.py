"""What this device sends and receives for every edge of a plan: one code path for all pairs of grids.

Pure: forms and boxes in, pieces out; the worker turns pieces into messages. A tensor crosses an edge in its wire
layout (`plan.types.Wire`); the messages are the overlaps that `layout.transfer_moves` gives, so equal grids, uneven
replicas and different shard counts all come from the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipefit.errors import PlanError
from pipefit.layout import AxisName, Box, Mesh, Run, TensorForm, held_box, parse_form, transfer_moves

ReplicaRuns = tuple[Sequence[Run], Sequence[Run]]
"""What the replicas of the sender and of the receiver hold of a tensor, where their shares do not tell."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """One message of a transfer, seen from one side."""

    peer: int
    "The other device."
    box: Box
    "The part of this device's own local tensor that is sent or filled."
    whole: bool
    "Whether the box is all of the local tensor."


@dataclass(frozen=True, slots=True)
class OutgoingPieces:
    """What a device sends of one tensor."""

    sum_over: tuple[AxisName, ...]
    "Axes of the sender's group over which partial sums are added before the tensor leaves."
    shape: tuple[int, ...]
    "Of the local tensor as the sender holds it."
    pieces: tuple[TensorPiece, ...]


@dataclass(frozen=True, slots=True)
class IncomingPieces:
    """What a device receives of one tensor."""

    shape: tuple[int, ...]
    "Of the local tensor as the receiver holds it."
    pieces: tuple[TensorPiece, ...]
    zero: bool
    "Whether nothing arrives and zeros stand for it: a partial sum that another position receives in full."


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
    """The messages that `device` of `source` sends of a tensor of global `shape`.

    `sent` is how the sender holds it, `wire` how it leaves: equal, or with partial sums added (P to I or G), or
    with a replicated tensor cut (I to G). Raises PlanError for any other conversion.
    """
    held, leaves = _parse_forms(sent), _parse_forms(wire)
    sum_over = _partial_axes(source, held, leaves)
    own = held_box(shape, source, held, device, None if runs is None else runs[0])
    found = transfer_moves(shape, source, leaves, target, _parse_forms(received), sender=device, replica_runs=runs)
    return OutgoingPieces(sum_over, _box_lengths(own), tuple(_make_piece(move.target, move.box, own) for move in found))


def incoming_pieces(
    shape: Sequence[int],
    source: Mesh,
    wire: Sequence[str],
    target: Mesh,
    received: Sequence[str],
    device: int,
    runs: ReplicaRuns | None = None,
) -> IncomingPieces:
    """The messages that `device` of `target` receives of a tensor of global `shape`."""
    leaves, wanted = _parse_forms(wire), _parse_forms(received)
    own = held_box(shape, target, wanted, device, None if runs is None else runs[1])
    found = transfer_moves(shape, source, leaves, target, wanted, receiver=device, replica_runs=runs)
    return IncomingPieces(
        _box_lengths(own), tuple(_make_piece(move.source, move.box, own) for move in found), not found
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
                next_step="let it leave in the form it has; the receivers take what they need of it",
            )
    return tuple(summed)


def _make_piece(peer: int, box: Box, own: Box) -> TensorPiece:
    local = tuple((start - low, stop - low) for (start, stop), (low, _) in zip(box, own, strict=True))
    return TensorPiece(peer, local, box == own)


def _parse_forms(texts: Sequence[str]) -> tuple[TensorForm, ...]:
    return tuple(map(parse_form, texts))


def _box_lengths(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
