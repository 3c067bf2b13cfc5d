"""Runs a function on the first devices of one pool of gloo processes that all shard tests share."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from tests.support.pool import Pool

_POOLS: list[Pool] = []
_GROUPS: dict[int, Any] = {}
"Of a process of the pool: size -> group of its first ranks."


def run_processes(function: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """[function(group, rank, *arguments) of every rank]; at most 4 of them. Raises what a rank raised, as text."""
    if not _POOLS or not _POOLS[-1].alive:
        _POOLS.append(Pool(4))
        atexit.register(_POOLS[-1].close)
        _POOLS[-1].run(_make_groups, ranks=4)
    return _POOLS[-1].run(_enter, function, count, arguments, ranks=count)


def _make_groups() -> None:
    """All ranks make all groups, in one order: a rank that missed one would wait for ever at the next."""
    for count in (1, 2, 3, 4):
        _GROUPS[count] = dist.new_group(list(range(count)))


def _enter(function: Callable[..., Any], count: int, arguments: tuple[Any, ...]) -> Any:
    return function(_GROUPS[count], dist.get_rank(), *arguments)
