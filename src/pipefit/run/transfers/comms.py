"""Process groups and point-to-point channels of a run, made once in an order that all ranks agree on.

gloo: messages go over the default group, with a tag per channel, so each channel is a FIFO of its own. NCCL knows
no tags: every directed pair of ranks has a communicator of its own (PyTorch's `new_group` of the two). The plain
`send`/`recv`/`allreduce` methods of `ProcessGroup` are used, which skip argument checks that a plan has settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipefit.errors import PipefitError

Channel = tuple[Any, int, int]
"""(process group, the peer's rank in it, tag)."""


class CommGroups:
    """The process groups of this rank. Keep one per process: groups are costly and are shared between plans.

    `tagged` None: messages have tags unless the backend is NCCL. False makes a communicator for every directed pair,
    as NCCL needs them, with any backend (tests).
    """

    def __init__(self, device: torch.device | None = None, tagged: bool | None = None) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.device = device or torch.device("cpu")
        self.tagged = not dist.is_initialized() or dist.get_backend() != "nccl" if tagged is None else tagged
        self._groups: dict[tuple[object, ...], Any] = {}

    def create_groups(self, groups: Iterable[Sequence[int]]) -> None:
        """Make these groups, where they do not exist. *Every* rank of the world passes the same ones, member or not.

        Groups of one rank are not made. (PyTorch's local synchronisation would let only members take part, but it
        names a group by how many its members have made before, which differs from rank to rank.)
        """
        for ranks in sorted({tuple(sorted(group)) for group in groups}):
            if len(ranks) > 1 and ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks))
                if self.device.type == "cuda" and self.rank in ranks:
                    dist.all_reduce(torch.zeros(1, device=self.device), group=self._groups[ranks])

    def make_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make a communicator for every directed pair (source rank, target rank) where tags do not exist (NCCL)."""
        if self.tagged:
            return
        for pair in sorted(set(pairs)):
            key = ("pair", *pair)
            if key not in self._groups and pair[0] != pair[1]:
                self._groups[key] = dist.new_group(sorted(pair))
                self._first_message(*pair)

    def _first_message(self, source: int, target: int) -> None:
        """NCCL connects two ranks at their first message and blocks until both are there: now, in one global order."""
        if self.rank in (source, target):
            group, peer, tag = self.open_channel(source, target, 0)
            buffer = torch.zeros(1, device=self.device)
            (group.send if self.rank == source else group.recv)([buffer], peer, tag).wait()

    def find_group(self, ranks: Sequence[int]) -> Any | None:
        """The group of these ranks, or None when it is this rank alone."""
        return None if len(ranks) == 1 else self._groups[tuple(sorted(ranks))]

    def open_channel(self, source: int, target: int, tag: int) -> Channel:
        """How this rank, `source` or `target`, reaches the other for messages of the directed pair."""
        peer = target if source == self.rank else source
        if self.tagged:
            return dist.group.WORLD, peer, tag
        return self._groups["pair", source, target], int(peer > self.rank), 0


def backend_for(device: torch.device) -> str:
    """`nccl` for CUDA devices, `gloo` for everything else."""
    return "nccl" if device.type == "cuda" else "gloo"


def reduce_scatter(output: torch.Tensor, flat: torch.Tensor, group: Any) -> Any:
    """The sum over the group of `flat`, each rank its own even part, started; `output` may be that part of `flat`."""
    require_even(flat, output, group)
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    return call(output, flat, group=group, async_op=True)


def all_gather(flat: torch.Tensor, part: torch.Tensor, group: Any) -> Any:
    """Everyone's even part into `flat`, started; `part` may be this rank's part of `flat`."""
    require_even(flat, part, group)
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return call(flat, part, group=group, async_op=True)


def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
    """`sent[i]` to rank i of the group, whose `sent[own rank]` becomes `received[i]`."""
    require_even(received, sent[0], group)
    require_even(sent, received[0], group)
    exchange(received, sent, [1] * len(received), [1] * len(sent), group)


def exchange(
    received: torch.Tensor, sent: torch.Tensor, received_lengths: list[int], sent_lengths: list[int], group: Any
) -> None:
    """Pieces of `sent` along its first dimension to the ranks of the group, theirs into the pieces of `received`.

    Over gloo every rank asks for all that it wants before it sends anything. In gloo's own all-to-all what asks for a
    message may go behind one on its way, so that the two ways between two ranks take turns: up to twice as long.
    """
    if sent.is_cuda:
        dist.all_to_all_single(received, sent, received_lengths, sent_lengths, group=group)
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    places, pieces = received.split(received_lengths), sent.split(sent_lengths)
    places[rank].copy_(pieces[rank])
    peers = [(rank + step) % size for step in range(1, size)]
    works = [group.recv([places[peer]], peer, 0) for peer in reversed(peers) if places[peer].numel()]
    works += [group.send([pieces[peer]], peer, 0) for peer in peers if pieces[peer].numel()]
    for work in works:
        work.wait()


def require_even(whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    """Refuse what an even collective cannot take: unequal parts would hang, or end another rank."""
    size = dist.get_world_size(group)
    if whole.numel() != size * part.numel():
        raise PipefitError(
            "Uneven parts reached a collective that takes even ones only.",
            where=f"a group of {size} ranks",
            seen=f"{part.numel()} of {whole.numel()} elements",
            allowed=f"a whole of {size} equal parts",
            next_step="report this: a shard program pads or lowers uneven parts (run/sharded/parts.py)",
        )
