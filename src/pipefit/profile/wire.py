"""Send and receive over torch.distributed: the `measure` function of links, and collectives on groups."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipefit.cost.comm.lowerings import DIRECT
from pipefit.profile.board import StoreExchange
from pipefit.profile.config import TINY
from pipefit.profile.links import RoundOutcome
from pipefit.profile.tournament import HostPair
from pipefit.run.sharded.parts import GATHERS, SCATTERS, ShardContext
from pipefit.run.transfers.comms import all_gather, exchange, reduce_scatter

MOST_BYTES = 8 * 2**20
"""A measurement repeats its message, 3 to 40 times, until it has sent about this many bytes."""


class LinkEndpoint:
    """This rank's end of every link, over the default process group."""

    def __init__(self, board: StoreExchange, device: torch.device) -> None:
        self.board, self.device = board, device
        self._tiny = torch.zeros(TINY, dtype=torch.uint8, device=device)
        self._big: list[torch.Tensor] = []
        self.most_bytes = MOST_BYTES
        "See `message_repeats`; must be equal on all ranks."
        self.bytes_per_s = float("inf")
        "Of the median link, roughly."

    def measure(self, pairs: Sequence[HostPair], size: int) -> RoundOutcome:
        """Measure one round: this rank runs its own pairs, all at once, and every rank gets all results. See
        `links.Measure`.

        If some rank both sends and receives, messages follow each other without answers, and the receivers' clocks
        count.
        """
        known = set(self.board.lost)
        mine = [pair for pair in pairs if self.board.rank in pair]
        both = {source for source, _ in pairs} & {target for _, target in pairs}
        value: dict[str, Any] = {}
        if mine:
            try:
                found_s = self._flood_pairs(mine, size) if both else self._play_pairs(mine, size)
                value = {"times": [[*pair, time_s] for pair, time_s in found_s.items()]}
            except RuntimeError as error:
                value = {"failed": str(error).splitlines()[0][:200]}
        answers = self.board.gather(value)
        times = {
            (source, target): float(time_s)
            for answer in answers.values()
            for source, target, time_s in (answer or {}).get("times", [])
        }
        lost = {rank: why for rank, why in self.board.lost.items() if rank not in known}
        return RoundOutcome(times, lost)

    def _play_pairs(self, mine: Sequence[HostPair], size: int) -> dict[HostPair, float]:
        """Return the seconds from the start of a message until its tiny answer, for the pairs in which this rank sends.

        Each is the `lower_quartile` of the repetitions without the first.
        """
        rank, group = self.board.rank, dist.group.WORLD
        sources = [source for source, target in mine if target == rank]
        targets = [target for source, target in mine if source == rank]
        self._reserve_buffers(size, len(sources))
        trips: dict[HostPair, list[float]] = {(rank, target): [] for target in targets}
        for _ in range(message_repeats(size, self.most_bytes) + 1):
            start = time.perf_counter()
            sent = [group.send([self._big[0][:size]], target, 0) for target in targets]
            coming = [group.recv([big[:size]], source, 0) for source, big in zip(sources, self._big, strict=False)]
            for work, target in zip(sent, targets, strict=True):
                work.wait()
                group.recv([self._tiny], target, 0).wait()
                self._synchronize_device()
                trips[rank, target].append(time.perf_counter() - start)
            for work, source in zip(coming, sources, strict=True):
                work.wait()
                group.send([self._tiny], source, 0).wait()
            self._synchronize_device()
        return {pair: lower_quartile(times[1:]) for pair, times in trips.items()}

    def _flood_pairs(self, mine: Sequence[HostPair], size: int) -> dict[HostPair, float]:
        """Return the seconds per message, for the pairs in which this rank receives; all messages are sent at the
        start."""
        rank, group, count = self.board.rank, dist.group.WORLD, message_repeats(size, self.most_bytes)
        sources = [source for source, target in mine if target == rank]
        self._reserve_buffers(size, 1 + len(sources))
        start = time.perf_counter()
        coming = [
            [group.recv([big[:size]], source, 0) for _ in range(count)]
            for source, big in zip(sources, self._big[1:], strict=False)
        ]
        sent = [
            group.send([self._big[0][:size]], target, 0) for _, target in mine if target != rank for _ in range(count)
        ]
        seconds = {}
        for source, works in zip(sources, coming, strict=True):
            for work in works:
                work.wait()
            self._synchronize_device()
            seconds[source, rank] = (time.perf_counter() - start) / count
        for work in sent:
            work.wait()
        return seconds

    def _reserve_buffers(self, size: int, count: int) -> None:
        """Allocate at least one, and `count`, buffers of at least `size` bytes."""
        while len(self._big) < max(1, count) or self._big[0].numel() < size:
            length = max(size, self._big[0].numel() if self._big else 0)
            self._big = [torch.zeros(length, dtype=torch.uint8, device=self.device) for _ in range(max(1, count))]

    def _synchronize_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def collective_times(self, operation: str, group: Any, members: int, size: int) -> list[float]:
        """Return the seconds of each repetition of one collective over `group` on this rank, without the first.

        `size` is the bytes of the complete tensor on one device.
        """
        call = self._collective_call(operation, group, members, size)
        times: list[float] = []
        for _ in range(message_repeats(size, self.most_bytes) + 1):
            if operation in DIRECT:
                dist.barrier(group)  # else ranks run ahead, and messages collide that would not in a program
            start = time.perf_counter()
            call()
            self._synchronize_device()
            times.append(time.perf_counter() - start)
        return times[1:]

    def _collective_call(self, operation: str, group: Any, members: int, size: int) -> Callable[[], object]:
        count = max(members, size // 4 // members * members)
        full = torch.zeros(count, device=self.device)
        part = torch.zeros(count // members, device=self.device)
        output = torch.zeros_like(full) if operation == "all_to_all" else full
        context = ShardContext(group=group, shares=(1,) * members, position=dist.get_rank(group))
        lengths = [len(part)] * members
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(full, group=group),
            "all_gather": lambda: all_gather(full, part, group).wait(),
            "reduce_scatter": lambda: reduce_scatter(part, full, group).wait(),
            "all_to_all": lambda: exchange(output, full, lengths, lengths, group),
            "broadcasts": lambda: GATHERS["grouped"](part, lengths, context),
            "reduces": lambda: SCATTERS["grouped"](full, lengths, context),
        }
        return calls[operation]


def typical_collective_time(operation: str, ranks: Sequence[Sequence[float]]) -> float:
    """Return the seconds of a collective from the times of each repetition on every rank.

    It is the `lower_quartile` on the slowest rank. For a direct collective, which all ranks start together, it is the
    median over repetitions of the slowest rank's time. Its messages collide differently in every repetition, so a fast
    repetition is not typical.
    """
    if operation in DIRECT:
        return statistics.median(max(times) for times in zip(*ranks, strict=True))
    return max(map(lower_quartile, ranks))


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcasts", "reduces")


def lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile: other work on the machines disturbs some of the repetitions, and only ever adds."""
    return sorted(times)[(len(times) - 1) // 4]


def message_repeats(size: int, most_bytes: int = MOST_BYTES) -> int:
    """Return the number of messages of this size in one measurement."""
    return max(3, min(40, most_bytes // max(1, size)))
