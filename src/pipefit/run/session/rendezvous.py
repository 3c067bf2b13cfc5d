"""Rendezvous of the ranks of a run: store, process group, device, heartbeat, and results shared between ranks."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipefit.errors import PipefitError, RunError
from pipefit.run.session.faults import HeartbeatMonitor, compare_ranks, error_record
from pipefit.run.transfers.comms import backend_for

T = TypeVar("T")

_SHARED = "pipefit/shared/{}"
_PREPARE_S = 6 * 3600.0
"""Time that ranks wait for another rank's preparation: tokenising a large corpus takes hours."""


class World:
    """This rank and its connections to all ranks of a run. A single process needs no store and no process group."""

    def __init__(self, device: torch.device) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.device = device
        self.store: Any = None
        self.monitor: HeartbeatMonitor | None = None
        self.cpu_group: Any = None
        "A gloo group of all ranks for CPU tensors and objects; None is the default group (or one process alone)."

    def open_store(self) -> None:
        """Open the rendezvous store (torchrun's environment variables)."""
        if self.size > 1:
            self.store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=300))))

    def start_group(self, timeout_s: float, transfer_timeout_s: float) -> None:
        """Create the process group and start the heartbeat."""
        if self.size == 1:
            return
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            backend_for(self.device),
            store=dist.PrefixStore("pipefit/group", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=transfer_timeout_s),
        )
        if self.device.type == "cuda":
            self.cpu_group = dist.new_group(backend="gloo")
        self.monitor = HeartbeatMonitor(self.store.clone(), self.rank, self.size, timeout_s)
        self.monitor.start()

    def own_group(self) -> Any:
        """Return a gloo group of all ranks for the use of one thread; None for a single process. All ranks call
        together."""
        return dist.new_group(backend="gloo") if self.size > 1 else None

    def share_text(self, name: str, make: Callable[[], str]) -> str:
        """Return the text made by rank 0; if that fails, every rank raises rank 0's PipefitError."""
        return self._share_result(name, self.rank == 0, make)

    def run_once_per_host(self, work: Callable[[], object]) -> None:
        """Run `work` once per host while the host's other ranks wait for it."""
        host = self.rank - self.local_rank
        self._share_result(f"host/{host}", self.local_rank == 0, lambda: str(bool(work() or True)))

    def require_agreement(self, name: str, text: str, differ: Callable[[list[int], str], PipefitError]) -> None:
        """Check that every rank has the text of rank 0. Otherwise all raise `differ(ranks, the texts of both
        sides)`."""
        if self.size == 1:
            return

        def judge_texts(texts: list[str]) -> PipefitError | None:
            odd = [rank for rank, rank_text in enumerate(texts) if rank_text != texts[0]]
            return differ(odd, f"{texts[odd[0]]} on rank {odd[0]}, {texts[0]} on rank 0") if odd else None

        compare_ranks(self.store, name, self.rank, self.size, text, _PREPARE_S, judge_texts)

    def sum_over_ranks(self, number: int) -> int:
        """Return the sum of all ranks' numbers, on the CPU. All ranks call together."""
        if self.size == 1:
            return number
        added = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(added, group=self.cpu_group)
        return int(added)

    def gather_lists(self, mine: Sequence[T]) -> list[T]:
        """Return all ranks' items in the order of ranks; nearly free if no rank has any. All ranks call together."""
        if not self.sum_over_ranks(len(mine)):
            return []
        if self.size == 1:
            return list(mine)
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, list(mine), group=self.cpu_group)
        return [item for of_rank in everyone for item in of_rank]

    def stop_group(self) -> None:
        """End the heartbeat and destroy the process group."""
        if self.monitor is not None:
            self.monitor.stop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _share_result(self, name: str, mine: bool, make: Callable[[], str]) -> str:
        if self.size == 1:
            return make()
        key = _SHARED.format(name)
        if mine:
            try:
                self.store.set(key, json.dumps({"good": make()}))
            except PipefitError as error:
                self.store.set(key, json.dumps({"bad": error_record(error)}))
                raise
            except BaseException as error:
                self.store.set(key, json.dumps({"bad": {"what": f"Rank {self.rank} failed: {error!r}"}}))
                raise
        self.store.wait([key], timedelta(seconds=_PREPARE_S))
        answer = json.loads(self.store.get(key).decode())
        if "bad" in answer:
            raise RunError(answer["bad"].pop("what"), **answer["bad"])
        return str(answer["good"])


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of this rank: a GPU if available, else the CPU. RunError if `cuda` is wanted but not
    available."""
    if wanted == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise RunError(
                "There are more ranks on this host than GPUs.",
                where=f"local rank {local_rank}",
                seen=f"{count} GPUs",
                next_step="start fewer ranks per host, or use --device cpu",
            )
        return torch.device("cuda", local_rank)
    if wanted == "cuda":
        raise RunError("No CUDA device can be used here.", where="--device", seen="cuda", allowed="cpu, auto")
    return torch.device("cpu")


def under_torchrun() -> bool:
    """Return True if a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_id() -> str:
    """Return a rendezvous name that no other run uses."""
    return f"pipefit-{uuid.uuid4().hex[:12]}"
