"""Sending and receiving for real: the `measure` of links, and collectives on groups, over torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipefit.profile.board import Board
from pipefit.profile.links import TINY, Outcome
from pipefit.profile.tournament import Pair
from pipefit.run.comms import all_gather, reduce_scatter

MOST_BYTES = 8 * 2**20
"""A measurement repeats its message until about so many bytes have gone, 3 to 40 times."""


class Wire:
    """This rank's end of every link, over the default process group."""

    def __init__(self, board: Board, device: torch.device) -> None:
        self.board, self.device = board, device
        self._tiny = torch.zeros(TINY, dtype=torch.uint8, device=device)
        self._big = self._tiny

    def measure(self, pairs: Sequence[Pair], size: int) -> Outcome:
        """One round: this rank plays its own pair, and all learn the results of all. See `links.Measure`."""
        known = set(self.board.lost)
        mine = [pair for pair in pairs if self.board.rank in pair]
        value: dict[str, Any] = {}
        for source, target in mine:
            try:
                time_s = self._play(source, target, size)
                if self.board.rank == source:
                    value = {"pair": [source, target], "s": time_s}
            except RuntimeError as error:
                value = {"failed": str(error).splitlines()[0][:200]}
        found = self.board.gather(value)
        times = {(a["pair"][0], a["pair"][1]): float(a["s"]) for a in found.values() if a and "pair" in a}
        lost = {rank: why for rank, why in self.board.lost.items() if rank not in known}
        return Outcome(times, lost)

    def _play(self, source: int, target: int, size: int) -> float:
        """Seconds (`calm`, the first left out) from the start of a message until its tiny answer is here."""
        if self._big.numel() < size:
            self._big = torch.zeros(size, dtype=torch.uint8, device=self.device)
        big, group = self._big[:size], dist.group.WORLD
        count = repeats_of(size)
        trips = []
        for _ in range(count + 1):
            start = time.perf_counter()
            if self.board.rank == source:
                group.send([big], target, 0).wait()
                group.recv([self._tiny], target, 0).wait()
            else:
                group.recv([big], source, 0).wait()
                group.send([self._tiny], source, 0).wait()
            self._settle()
            trips.append(time.perf_counter() - start)
        return calm(trips[1:])

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def collective_s(self, operation: str, group: Any, members: int, size: int) -> float:
        """Seconds (`calm`) of one collective over `group` on this rank; `size` is the whole tensor on one device."""
        call, warm = self._collective(operation, group, members, size), True
        times: list[float] = []
        for _ in range(repeats_of(size) + 1):
            start = time.perf_counter()
            call()
            self._settle()
            if not warm:
                times.append(time.perf_counter() - start)
            warm = False
        return calm(times)

    def _collective(self, operation: str, group: Any, members: int, size: int) -> Callable[[], object]:
        count = max(members, size // 4 // members * members)
        whole = torch.zeros(count, device=self.device)
        part = torch.zeros(count // members, device=self.device)
        other = torch.zeros_like(whole) if operation == "all_to_all" else whole
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: all_gather(whole, part, group).wait(),
            "reduce_scatter": lambda: reduce_scatter(part, whole, group).wait(),
            "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        }
        return calls[operation]


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def calm(times: Sequence[float]) -> float:
    """The lower quartile: other work on the machines disturbs some of the repetitions, and only ever adds."""
    return sorted(times)[(len(times) - 1) // 4]


def repeats_of(size: int) -> int:
    """How often a message of this size is sent for one measurement."""
    return max(3, min(40, MOST_BYTES // max(1, size)))
