"""Faults of a distributed run, reported once and by name: a dead rank, memory exhaustion, ranks that disagree.

Every rank writes a heartbeat into the rendezvous store and watches its neighbour. The one rank that notices a death
writes it into the store for all. Whatever the fault, one rank prints the message (the first to claim it in the store)
and all exit with code 2. `PIPEFIT_FAULT` makes a chosen rank fail at a chosen step, for tests.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pipefit.errors import PipefitError, RunError
from pipefit.plan.types import Plan
from pipefit.units import format_bytes

EXIT_CODE = 2

_FAULT = "pipefit/fault"
_CLAIM = "pipefit/claimed"
_BEAT = "pipefit/beat/{}"
_STOPPED = "stopped"


class HeartbeatMonitor:
    """This rank's heartbeat, and its watch over the next rank.

    `store` is a torch.distributed store that nothing else in this process uses (a `clone()`). A neighbour whose
    heartbeat does not change for `timeout_s` is dead. If a fault is known and the main thread has not stopped within
    `grace_s` (it may hang in a transfer), this thread ends the process.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        timeout_s: float,
        *,
        grace_s: float = 3.0,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._store, self.rank, self.world = store, rank, world
        self.timeout_s, self.grace_s = timeout_s, grace_s
        self._leave = leave
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.fault: PipefitError | None = None
        self._thread = threading.Thread(target=self._watch_neighbour, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the heartbeat because the run is over on this rank; its neighbour must not report it dead."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * self._interval_s)
        _ignore_errors(lambda: self._store.set(_BEAT.format(self.rank), _STOPPED))

    def await_fault(self, wait_s: float) -> PipefitError | None:
        """Return the fault that stopped the run, or None if none becomes known within `wait_s`."""
        deadline = time.monotonic() + wait_s
        while self.fault is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.fault

    def announce_fault(self, error: PipefitError) -> None:
        """Tell all ranks that the run stops, and print the message unless another rank has: it appears once."""
        with self._lock:
            self.fault = self.fault or error
            say_once(self._store, error, self.grace_s)

    def wait_for_others(self) -> None:
        """Delay the exit of rank 0, which may host the store, until the other ranks have had time to read the fault."""
        if self.rank == 0 and self.world > 1:
            time.sleep(3 * self._interval_s)

    @property
    def _interval_s(self) -> float:
        return min(1.0, self.timeout_s / 10)

    def _watch_neighbour(self) -> None:
        beat, seen, since = 0, "", time.monotonic()
        neighbour = (self.rank + 1) % self.world
        while not self._stop.wait(self._interval_s):
            beat += 1
            try:
                self._store.set(_BEAT.format(self.rank), str(beat))
                if self._store.check([_FAULT]):
                    self._end_process(_read_fault(self._store))
                    return
                key = _BEAT.format(neighbour)
                value = self._store.get(key).decode() if self._store.check([key]) else ""
            except RuntimeError as error:  # DistNetworkError, DistStoreError: the store's host is gone
                fault = _store_lost(error)
                if not self._stop.is_set() and self.fault is None:
                    self.announce_fault(fault)
                self._end_process(fault)
                return
            if value != seen or value == _STOPPED or self.world == 1:
                seen, since = value, time.monotonic()
            elif time.monotonic() - since > self.timeout_s:
                fault = dead_rank(neighbour, self.timeout_s)
                self.announce_fault(fault)
                self._end_process(fault)
                return

    def _end_process(self, fault: PipefitError) -> None:
        """Give the main thread its grace period, then exit. The fault has been announced by then."""
        self.fault = self.fault or fault
        if not self._stop.wait(self.grace_s):
            self.wait_for_others()
            self._leave(EXIT_CODE)


def say_once(store: Any, error: PipefitError, wait_s: float) -> None:
    """Print the message unless another rank does: it appears once.

    A rank that is not the first waits up to `wait_s` until the first has printed it. A launcher stops all ranks when
    one ends: if the first were stopped before it printed, the user would see no message.
    """
    if not _ignore_errors(lambda: store.add(_CLAIM, 1) == 1, default=True):
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if _ignore_errors(lambda: store.check([_FAULT]), default=True):
                return
            time.sleep(0.05)
    print(f"pipefit: {error.full_text()}", file=sys.stderr, flush=True)
    _ignore_errors(lambda: store.set(_FAULT, json.dumps(error_record(error))))


def _ignore_errors(call: Callable[[], Any], default: Any = None) -> Any:
    try:
        return call()
    except RuntimeError:
        return default


def dead_rank(rank: int, timeout_s: float) -> RunError:
    """Return the error for a rank whose heartbeat stopped."""
    return RunError(
        f"Rank {rank} died or hangs: the run has stopped.",
        where=f"rank {rank}",
        seen=f"no heartbeat for {timeout_s:g} s",
        next_step="look at that rank's own log and host; continue with --resume RUN_DIR",
    )


def exited_rank(rank: int, code: int, log: str = "") -> RunError:
    """Return the error for a process that the launcher saw ending: `code` below 0 is a signal."""
    how = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
    return RunError(
        f"Rank {rank} died: the run has stopped.",
        where=f"rank {rank}",
        seen=f"{how}{': ' + log if log else ''}",
        next_step=f"{'SIGKILL often means that the system ran out of memory; ' if code == -signal.SIGKILL else ''}"
        "continue with --resume RUN_DIR",
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception means that memory ran out: CUDA's, Python's, or the CPU allocator's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in words or "out of memory" in words)


def is_connection_lost(error: BaseException) -> bool:
    """Return True if an exception means that another rank, or the connection to it, is gone."""
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError"):
        return True
    words = str(error).lower()
    signs = ("connection closed", "connection reset", "broken pipe", "timed out", "gloo", "nccl", "socket")
    return isinstance(error, RuntimeError) and any(sign in words for sign in signs)


def unexpected_error(rank: int, error: BaseException) -> RunError:
    """Return the error announced to other ranks when this one stops with an unexpected exception."""
    return RunError(
        f"Rank {rank} stopped with an unexpected error.",
        where=f"rank {rank}",
        seen=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        next_step="see its traceback above, and please report it",
    )


def out_of_memory(plan: Plan, device: int, lane: int, step: int, error: BaseException) -> RunError:
    """Return the out-of-memory error, with the memory that the plan predicted for this device."""
    if plan.prediction is None:
        predicted = "the plan has no prediction"
    else:
        lane_says = plan.prediction.lanes[lane]
        parts = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in sorted(lane_says.parts.items(), key=lambda item: -item[1])
        )
        on_device = lane_says.for_device(device)
        predicted = f"predicted peak {format_bytes(on_device.peak_bytes)} of {format_bytes(on_device.limit_bytes)}"
        predicted += f" ({parts})" if parts and on_device.kind == lane_says.kind else ""
    return RunError(
        f"Device {device} ran out of memory.",
        where=f"lane {lane}, step {step + 1}",
        seen=f"{str(error).splitlines()[0] if str(error) else type(error).__name__}; {predicted}",
        next_step="plan again with less memory in use: --fix recompute=full, smaller microbatches, more stages, "
        "or --fix sharded_state=optimizer",
    )


def compare_ranks(
    store: Any,
    name: str,
    rank: int,
    world: int,
    text: str,
    timeout_s: float,
    judge: Callable[[list[str]], PipefitError | None],
) -> None:
    """Compare one text per rank: rank 0 reads all and judges them; all ranks raise its verdict. A missing text is
    empty."""
    store.set(f"pipefit/{name}/{rank}", text)
    if rank == 0:
        texts = []
        for peer in range(world):
            try:
                store.wait([f"pipefit/{name}/{peer}"], timedelta(seconds=timeout_s))
            except RuntimeError:
                texts.append("")
                continue
            texts.append(store.get(f"pipefit/{name}/{peer}").decode())
        fault = judge(texts)
        store.set(f"pipefit/{name}/verdict", json.dumps(None if fault is None else error_record(fault)))
    store.wait([f"pipefit/{name}/verdict"], timedelta(seconds=2 * timeout_s))
    record = json.loads(store.get(f"pipefit/{name}/verdict").decode())
    if record is not None:
        raise RunError(record.pop("what"), **record)


def verify_ranks(store: Any, rank: int, world: int, token: str, timeout_s: float) -> None:
    """Check that all ranks have the same token (parts divided by ", "). RunError names the ranks and parts that differ.

    Every rank writes its token; rank 0 reads all and writes its verdict for everyone.
    """
    compare_ranks(store, "token", rank, world, token, timeout_s, lambda tokens: _judge_tokens(tokens, timeout_s))


def _judge_tokens(tokens: list[str], timeout_s: float) -> RunError | None:
    missing = [i for i, token in enumerate(tokens) if not token]
    if missing:
        return RunError(
            f"These ranks did not start: {name_ranks(missing)}.",
            where="start of the run",
            seen=f"{len(tokens) - len(missing)} of {len(tokens)} ranks within {timeout_s:g} s",
        )
    common = max(set(tokens), key=lambda value: (tokens.count(value), value == tokens[0]))
    differing = [i for i, token in enumerate(tokens) if token != common]
    if not differing:
        return None
    first, usual = tokens[differing[0]].split(", "), common.split(", ")
    odd = ", ".join(part for part in first if part not in usual) or "less"
    instead = ", ".join(part for part in usual if part not in first) or "less"
    return RunError(
        f"These ranks have another plan, options or software than the rest: {name_ranks(differing)}.",
        where="start of the run",
        seen=f"{odd} on rank {differing[0]}, {instead} on rank {tokens.index(common)}",
        allowed="the same plan file, options and package versions on all hosts; paths may differ",
        next_step="start all ranks with the same command, and the plan from a folder that they share",
    )


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault requested by a test: `PIPEFIT_FAULT=kind@rank,step` (kinds: oom, kill, stop, error, plan)."""

    kind: str
    rank: int
    step: int

    def raise_fault(self, rank: int, step: int) -> None:
        """Fail now if this is the requested rank and step."""
        if (rank, step) != (self.rank, self.step):
            return
        if self.kind == "oom":
            raise MemoryError("injected: out of memory")
        if self.kind == "error":
            raise RuntimeError("injected: an error that nobody foresaw")
        if self.kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


def injected_fault() -> InjectedFault | None:
    """Return the fault named by the environment, or None."""
    text = os.environ.get("PIPEFIT_FAULT", "")
    if not text:
        return None
    kind, _, target = text.partition("@")
    rank, _, step = target.partition(",")
    return InjectedFault(kind, int(rank), int(step or 0))


def error_record(error: PipefitError) -> dict[str, str | None]:
    """Return the parts of an error as plain JSON, to be raised on another rank."""
    seen = None if error.seen is None else str(error.seen)
    return {
        "what": error.what, "where": error.where, "seen": seen, "allowed": error.allowed, "next_step": error.next_step,
    }  # fmt: skip


def _read_fault(store: Any) -> PipefitError:
    record = json.loads(store.get(_FAULT).decode())
    return RunError(record.pop("what"), **record)


def _store_lost(error: RuntimeError) -> RunError:
    return RunError(
        "The rendezvous store is gone: the host that started the run died or left.",
        where="MASTER_ADDR",
        seen=str(error).splitlines()[0],
        next_step="look at that host's log; continue with --resume RUN_DIR",
    )


def name_ranks(ranks: list[int]) -> str:
    """Return `1, 2, 5`; the first eight of a longer list."""
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
