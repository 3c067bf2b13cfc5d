"""Sum of the gradients of a parameter that stages on different devices use (tied embeddings).

Each lane sends its own reduced gradient to the other lanes and adds theirs, in the order of the stages, so that all of
them hold the same bits. `layout.transfer_moves` decides the messages: the lanes may have different meshes and different
shardings of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipefit.layout import Mesh
from pipefit.run.transfers.comms import CommGroups, PeerChannel
from pipefit.run.transfers.pieces import TensorPiece, incoming_pieces, outgoing_pieces


@dataclass(frozen=True, slots=True)
class TiedUse:
    """The stage, mesh and forms with which one lane holds the parameter."""

    stage: int
    group: Mesh
    forms: tuple[str, ...]


def tied_pairs(shape: Sequence[int], uses: Sequence[TiedUse]) -> list[tuple[int, int]]:
    """Return the directed pairs of devices that exchange messages, for creating channels."""
    pairs = []
    for sender in uses:
        for receiver in uses:
            if sender is not receiver:
                for device in sender.group.devices:
                    out = outgoing_pieces(
                        shape, sender.group, sender.forms, sender.forms, receiver.group, receiver.forms, device
                    )
                    pairs += [(device, piece.peer) for piece in out.pieces]
    return pairs


class TiedSum:
    """The exchange of one parameter on one device."""

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        uses: Sequence[TiedUse],
        device: int,
        ranks: Mapping[int, int],
        comms: CommGroups,
        tag: int,
        like: Tensor,
    ) -> None:
        self.name = name
        self._sends: list[tuple[PeerChannel, tuple[slice, ...]]] = []
        self._receives: list[tuple[PeerChannel, Tensor]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._terms: list[Tensor | None] = []
        self._works: list[Any] = []
        local_use = next(use for use in uses if device in use.group.devices)
        for use in sorted(uses, key=lambda use: use.stage):
            if use is local_use:
                self._terms.append(None)
                continue
            sent = outgoing_pieces(
                shape, local_use.group, local_use.forms, local_use.forms, use.group, use.forms, device
            )
            for piece in sent.pieces:
                self._sends.append((comms.open_channel(ranks[device], ranks[piece.peer], tag), _piece_slices(piece)))
            got = incoming_pieces(shape, use.group, use.forms, local_use.group, local_use.forms, device)
            term = torch.zeros_like(like)
            self._terms.append(term)
            for piece in got.pieces:
                channel = comms.open_channel(ranks[piece.peer], ranks[device], tag)
                target = term[_piece_slices(piece)]
                buffer = (
                    target
                    if target.is_contiguous()
                    else torch.empty_like(target, memory_format=torch.contiguous_format)
                )
                if buffer is not target:
                    self._copies.append((target, buffer))
                self._receives.append((channel, buffer))

    def start_exchange(self, gradient: Tensor) -> None:
        """Post the messages; `gradient` is this lane's own sum."""
        self._works = [group.recv([buffer], peer, tag) for (group, peer, tag), buffer in self._receives]
        for (group, peer, tag), box in self._sends:
            part = gradient[box].clone(memory_format=torch.contiguous_format)
            self._works.append((group.send([part], peer, tag), part))

    def finish_exchange(self, gradient: Tensor) -> None:
        """Wait, and leave the sum over all lanes in `gradient`."""
        for work in self._works:
            (work[0] if isinstance(work, tuple) else work).wait()
        self._works = []
        for target, buffer in self._copies:
            target.copy_(buffer)
        local_sum = gradient.clone()
        terms = [local_sum if term is None else term for term in self._terms]
        torch.add(terms[0], terms[1], out=gradient)
        for term in terms[2:]:
            gradient.add_(term)


def _piece_slices(piece: TensorPiece) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in piece.box)
