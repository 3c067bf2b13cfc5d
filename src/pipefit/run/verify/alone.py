"""A simulated world for a single rank: the other ranks' part of every message and collective is synthetic.

`pipefit verify` runs one rank of a plan in it. All code above PyTorch's process groups is that of a real run. Received
data are filled with numbers of a plausible size, so that nothing overflows and data-dependent branches (the routing of
experts) see plausible values. The ranks exchange equal numbers of tokens. If a real backend allocates memory for a
collective, so does this one; `tests/run/verify/test_alone.py` measures gloo's allocations.

The idea is that of PyTorch's own `fake_pg`, which leaves receive buffers and gathered parts uninitialised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "pipefit-alone"

RECEIVED_STD = 0.02
"""Standard deviation of the numbers that replace received hidden states and gradients."""


@contextmanager
def alone_world(rank: int, size: int) -> Iterator[None]:
    """Initialise `torch.distributed` as rank `rank` of `size` without any other rank; destroyed at the end of the
    block."""
    if BACKEND.upper() not in dist.Backend.backend_list and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu", "cuda"])
    assert not dist.is_initialized(), "a process is one rank of one world"
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class AloneGroup(dist.ProcessGroup):
    """The process group of a rank that is alone. Collectives of CPU tensors allocate the same memory as gloo's."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._place, self._size = rank, size
        self._expected: dict[int, list[Tensor]] = {}
        "Peer -> tensors of counts that it owes."
        self._generators: dict[torch.device, torch.Generator] = {}

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        """Return finished work: the message counts as sent. The peer owes the same sum of counts."""
        for tensor in tensors:
            if not tensor.is_floating_point() and self._expected.get(peer):
                _spread_sum(self._expected[peer].pop(0), tensor)
        return _finished_work(tensors)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        """Fill the tensors with numbers of a plausible size, and counts when the same peer is sent its own."""
        for tensor in tensors:
            self._fill_received(tensor)
            if not tensor.is_floating_point():
                self._expected.setdefault(peer, []).append(tensor)
        return _finished_work(tensors)

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int], options: Any = None
    ) -> Any:
        """Exchange as `recv` and `send` do with every peer."""
        places, pieces = (
            tensor.split(sizes or tensor.shape[0] // self._size)
            for tensor, sizes in ((received, received_sizes), (sent, sent_sizes))
        )
        for peer, (came, went) in enumerate(zip(places, pieces, strict=True)):
            if peer == self._place:
                came.copy_(went)
                continue
            self._fill_received(came)
            if not came.is_floating_point():
                _spread_sum(came, went)
        return _finished_work([received])

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        """Leave the tensors unchanged: the other ranks add nothing."""
        return _finished_work(tensors)

    def all_gather_single(self, whole: Tensor, part: Tensor, options: Any = None) -> Any:
        """Gather as if all ranks held this rank's part. gloo gathers into a flat tensor of its own first."""
        scratch = torch.empty_like(whole) if whole.device.type == "cpu" else None
        for slot in whole.view(self._size, -1):
            if slot.data_ptr() != part.data_ptr():
                slot.copy_(part.view(-1))
        return _finished_work([whole], scratch)

    def reduce_scatter_single(self, part: Tensor, whole: Tensor, options: Any = None) -> Any:
        """Return this rank's own part of its own tensor. gloo sums a copy of the full tensor."""
        scratch = whole.clone() if whole.device.type == "cpu" else None
        local_part = whole.view(self._size, -1)[self._place]
        if local_part.data_ptr() != part.data_ptr():
            part.copy_(local_part.view(part.shape))
        return _finished_work([part], scratch)

    _allgather_base = all_gather_single  # its name before torch 2.13
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, options: Any = None) -> Any:
        """Return at once."""
        return _finished_work([])

    def _fill_received(self, tensor: Tensor) -> None:
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(self._place)
        if tensor.is_floating_point():
            tensor.normal_(0.0, RECEIVED_STD, generator=generator)
        else:
            tensor.zero_()


def _spread_sum(counts: Tensor, like: Tensor) -> None:
    """Fill `counts` evenly with the sum of other counts."""
    if counts.numel():
        total, number = int(like.sum()), counts.numel()
        counts.copy_(
            torch.tensor([total // number + (index < total % number) for index in range(number)]).view_as(counts)
        )


class _FinishedWork:
    """A finished collective; its scratch memory is freed when it is waited for."""

    __slots__ = ("taken", "tensors")

    def __init__(self, tensors: Sequence[Tensor], taken: Tensor | None) -> None:
        self.tensors, self.taken = tensors, taken

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.taken = None
        return True

    def is_completed(self) -> bool:
        return True


def _finished_work(tensors: Sequence[Tensor], taken: Tensor | None = None) -> Any:
    return _FinishedWork(list(tensors), taken)


def _make_group(store: Any, rank: int, size: int, timeout: timedelta) -> AloneGroup:
    return AloneGroup(rank, size)
