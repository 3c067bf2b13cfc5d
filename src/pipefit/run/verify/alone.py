"""A world of many ranks of which only one is there: the others' part of every message and collective is made up here.

`pipefit verify` runs a rank of a plan in it. Everything above PyTorch's process groups is the code of a real run; what
would come over the wire is filled with numbers of a plausible size, so that nothing overflows and every branch that
looks at values (the routing of experts) sees what it might see. Where a real backend takes memory of its own beside a
collective, this one takes it too: what gloo takes is measured by `tests/run/test_verify_real.py`.

The idea is that of PyTorch's own `fake_pg`, which leaves receive buffers and gathered parts as they happen to be.
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
"""Standard deviation of the numbers that stand for what other ranks send: hidden states and gradients alike."""


@contextmanager
def alone_world(rank: int, size: int) -> Iterator[None]:
    """`torch.distributed` as rank `rank` of `size` sees it, with nobody else there; given up on leaving."""
    if BACKEND.upper() not in dist.Backend.backend_list and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu", "cuda"])
    assert not dist.is_initialized(), "a process is one rank of one world"
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class AloneGroup(dist.ProcessGroup):
    """The process group of a rank that is alone. Beside collectives of CPU tensors it allocates what gloo does."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._place, self._size = rank, size
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
        """As if it had left."""
        return _finished_work(tensors)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        """Numbers of a plausible size arrive at once."""
        for tensor in tensors:
            self._fill_received(tensor)
        return _finished_work(tensors)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        """As if everyone else had nothing to add."""
        return _finished_work(tensors)

    def all_gather_single(self, whole: Tensor, part: Tensor, options: Any = None) -> Any:
        """Everyone holds what this rank holds. gloo gathers into a flat tensor of its own first."""
        taken = torch.empty_like(whole) if whole.device.type == "cpu" else None
        for place in whole.view(self._size, -1):
            if place.data_ptr() != part.data_ptr():
                place.copy_(part.view(-1))
        return _finished_work([whole], taken)

    def reduce_scatter_single(self, part: Tensor, whole: Tensor, options: Any = None) -> Any:
        """This rank's own part of what it has itself. gloo sums a copy of the whole."""
        taken = whole.clone() if whole.device.type == "cpu" else None
        own = whole.view(self._size, -1)[self._place]
        if own.data_ptr() != part.data_ptr():
            part.copy_(own.view(part.shape))
        return _finished_work([part], taken)

    _allgather_base = all_gather_single  # its name before torch 2.13
    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, options: Any = None) -> Any:
        """Nobody is waited for."""
        return _finished_work([])

    def _fill_received(self, tensor: Tensor) -> None:
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(self._place)
        if tensor.is_floating_point():
            tensor.normal_(0.0, RECEIVED_STD, generator=generator)
        else:
            tensor.zero_()


class _FinishedWork:
    """A collective that is over; what it took beside its tensors lives until somebody has waited for it."""

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
