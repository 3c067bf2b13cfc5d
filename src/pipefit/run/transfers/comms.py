"""Process groups and point-to-point channels of a run, created once in an order that all ranks agree on.

gloo: messages use the default group, with a tag per channel, so each channel is a separate FIFO. NCCL has no tags:
every directed pair of ranks has its own communicator (PyTorch's `new_group` of the two). The plain
`send`/`recv`/`allreduce` methods of `ProcessGroup` are used: they skip argument checks that the plan makes redundant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipefit.errors import PipefitError

PeerChannel = tuple[Any, int, int]
"""(process group, the peer's rank in it, tag)."""


class CommGroups:
    """The process groups of this rank. Keep one per process: groups are costly and are shared between plans.

    `tagged` None: messages have tags unless the backend is NCCL. False makes a communicator for every directed pair, as
    NCCL needs them, with any backend (tests).
    """

    def __init__(self, device: torch.device | None = None, tagged: bool | None = None) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.device = device or torch.device("cpu")
        self.tagged = not dist.is_initialized() or dist.get_backend() != "nccl" if tagged is None else tagged
        self._groups: dict[tuple[object, ...], Any] = {}

    def create_groups(self, groups: Iterable[Sequence[int]]) -> None:
        """Create the groups that do not exist yet. *Every* rank of the world passes the same list, member or not.

        Groups of one rank are skipped. (PyTorch's local synchronisation would let only members take part, but it names
        a group by the number of groups its members have made before, which differs between ranks.)
        """
        for ranks in sorted({tuple(sorted(group)) for group in groups}):
            if len(ranks) > 1 and ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks))
                if self.device.type == "cuda" and self.rank in ranks:
                    dist.all_reduce(torch.zeros(1, device=self.device), group=self._groups[ranks])

    def make_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Create a communicator for every directed pair (source rank, target rank) if there are no tags (NCCL)."""
        if self.tagged:
            return
        for pair in sorted(set(pairs)):
            key = ("pair", *pair)
            if key not in self._groups and pair[0] != pair[1]:
                self._groups[key] = dist.new_group(sorted(pair))
                self._first_message(*pair)

    def _first_message(self, source: int, target: int) -> None:
        """Connect two ranks now, in one global order: NCCL connects at the first message and blocks until both are
        there."""
        if self.rank in (source, target):
            group, peer, tag = self.open_channel(source, target, 0)
            buffer = torch.zeros(1, device=self.device)
            (group.send if self.rank == source else group.recv)([buffer], peer, tag).wait()

    def find_group(self, ranks: Sequence[int]) -> Any | None:
        """Return the group of these ranks, or None for this rank alone."""
        return None if len(ranks) == 1 else self._groups[tuple(sorted(ranks))]

    def open_channel(self, source: int, target: int, tag: int) -> PeerChannel:
        """Return this rank's channel to the other one of `source` and `target`, for messages of the directed pair."""
        peer = target if source == self.rank else source
        if self.tagged:
            return dist.group.WORLD, peer, tag
        return self._groups["pair", source, target], int(peer > self.rank), 0


def backend_for(device: torch.device) -> str:
    """Return `nccl` for CUDA devices, `gloo` for everything else."""
    return "nccl" if device.type == "cuda" else "gloo"


def reduce_scatter(output: torch.Tensor, flat: torch.Tensor, group: Any) -> Any:
    """Start an even reduce-scatter of `flat` into `output`, which may be this rank's part of `flat`; return its
    work."""
    require_even(flat, output, group)
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    return call(output, flat, group=group, async_op=True)


def all_gather(flat: torch.Tensor, part: torch.Tensor, group: Any) -> Any:
    """Start an even all-gather of `part` into `flat`; `part` may be this rank's part of `flat`. Returns its work."""
    require_even(flat, part, group)
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return call(flat, part, group=group, async_op=True)


def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
    """Send `sent[i]` to rank i of the group and receive its piece for this rank into `received[i]`."""
    require_even(received, sent[0], group)
    require_even(sent, received[0], group)
    exchange(received, sent, [1] * len(received), [1] * len(sent), group)


def exchange(
    received: torch.Tensor, sent: torch.Tensor, received_lengths: list[int], sent_lengths: list[int], group: Any
) -> None:
    """All-to-all with split sizes along the first dimension: pieces of `sent` to the ranks, theirs into `received`.

    Over gloo every rank posts all receives before it sends. In gloo's own all-to-all a receive request can queue behind
    a message in transit, so that the two directions between two ranks alternate: up to twice as long.
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
    """Raise PipefitError for unequal parts in an even collective: they would hang, or end another rank."""
    size = dist.get_world_size(group)
    if whole.numel() != size * part.numel():
        raise PipefitError(
            "Uneven parts reached a collective that takes even ones only.",
            where=f"a group of {size} ranks",
            seen=f"{part.numel()} of {whole.numel()} elements",
            allowed=f"a whole of {size} equal parts",
            next_step="report this: a shard program pads or lowers uneven parts (run/sharded/parts.py)",
        )
