"""Run a command on every device of a lab, as torchrun does on every host: environment, output, exit codes.

A rank that fails ends all ranks. Every line of output is printed with its device as prefix.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipefit.errors import LabError
from pipefit.lab import network
from pipefit.lab.lifecycle import Lab, available_bytes, scratch_folder
from pipefit.lab.pace import judge_counts, read_counts
from pipefit.lab.spec import require_memory

RENDEZVOUS_PORT = 29500
GRACE_S = 10.0
"""Seconds that ranks have to end by themselves after one has failed, and again after SIGTERM."""

DRAIN_S = 3.0
"""Seconds for which output is read after all ranks have ended. A process that still holds a pipe has left its rank's
session."""

PRELOAD = ("numpy", "torch", "torch.distributed")
"""Modules that are imported before the ranks of a Python command are forked."""


@dataclass(frozen=True, slots=True)
class LabRank:
    """One process of a run."""

    rank: int
    device: int
    host: int
    local: int
    "Index of the device on its host."
    name: str
    "Display name: host name and local index."


def ranks_of(lab: Lab, devices: Sequence[int] = ()) -> list[LabRank]:
    """Return one rank for every device, or for the given devices, in order. Raises LabError for a device that the
    cluster does not have."""
    places = [(h, host.name, local) for h, host in enumerate(lab.file.cluster.hosts) for local in range(host.devices)]
    wanted = sorted(set(devices)) or list(range(len(places)))
    if wanted[-1] >= len(places) or wanted[0] < 0:
        raise LabError(
            "The cluster has no such device.",
            where="--devices",
            seen=", ".join(str(device) for device in wanted if not 0 <= device < len(places)),
            allowed=f"0 to {len(places) - 1}",
        )
    return [
        LabRank(rank, device, places[device][0], places[device][2], f"{places[device][1]}.{places[device][2]}")
        for rank, device in enumerate(wanted)
    ]


def rank_environment(lab: Lab, ranks: Sequence[LabRank], rank: LabRank, counts: Path | None = None) -> dict[str, str]:
    """Return the environment of a rank: the variables that torchrun sets, plus host, device kind, gloo's interface and
    the lab file."""
    hosts = list(dict.fromkeys(peer.host for peer in ranks))
    beside = [peer.rank for peer in ranks if peer.host == rank.host]
    host = lab.file.cluster.hosts[rank.host]
    group, first = str(hosts.index(rank.host)), ranks[0]
    result = {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(len(ranks)),
        "LOCAL_RANK": str(beside.index(rank.rank)),
        "LOCAL_WORLD_SIZE": str(len(beside)),
        "GROUP_RANK": group,
        "NODE_RANK": group,
        "GROUP_WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": network.device_address(first.host, first.local),
        "MASTER_PORT": str(RENDEZVOUS_PORT),
        "GLOO_SOCKET_IFNAME": network.device_interface(rank.local),
        "PIPEFIT_HOST": host.name,
        "PIPEFIT_DEVICE_KIND": host.kind,
        "PIPEFIT_LAB": str(lab.path),
        "PIPEFIT_LAB_DEVICE": str(rank.device),
    }
    return result | ({"PIPEFIT_LAB_COUNTS": str(counts)} if counts is not None else {})


def run_command(
    lab: Lab,
    command: Sequence[str],
    *,
    devices: Sequence[int] = (),
    counts: Path | None = None,
    say: Callable[[str], None] = print,
    preload: Sequence[str] = PRELOAD,
    grace_s: float = GRACE_S,
) -> int:
    """Run a command on the devices of a running lab. Returns the exit code of the rank that failed first, or 0.

    `counts` is a folder into which paced ranks write their counts. All ranks are killed on return, also after an
    exception.
    """
    if not command:
        raise LabError(
            "There is no command to run.", where="pipefit lab run", next_step="pipefit lab run FILE -- COMMAND"
        )
    ranks = ranks_of(lab, devices)
    require_memory(len(ranks), available_bytes(), str(lab.path))
    python = os.path.basename(command[0]) in ("pipefit", "python", "python3") or command[0] == sys.executable
    pipes = [os.pipe() for _ in ranks]
    orders = {
        "parent": os.getpid(),
        "preload": list(preload) if python else [],
        "first": bool(lab.file.devices),
        "ranks": [
            {
                "namespace": lab.namespace_of(rank.host),
                "environment": rank_environment(lab, ranks, rank, counts),
                "output": pipe[1],
                "command": list(command),
            }
            for rank, pipe in zip(ranks, pipes, strict=True)
        ],
    }
    group = _RankGroup(ranks, [pipe[0] for pipe in pipes], say, grace_s)
    try:
        group.start_all(orders, [pipe[1] for pipe in pipes])
        return group.wait_all()
    finally:
        group.end_all()


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """Exit code and validity of a run."""

    code: int
    "Exit code of the command; 2 if it succeeded but the run is invalid."
    valid: bool
    "True if the real work kept to the pace of the emulated devices."
    pace: str
    "Summary for people; '' if no device was paced."


def run_judged(lab: Lab, command: Sequence[str], **options: Any) -> JudgedRun:
    """Call `run_command` and judge the pace of all ranks. An invalid run has exit code 2."""
    with scratch_folder(lab) as folder:
        code = run_command(lab, command, counts=folder, **options)
        counts = list(read_counts(folder).values())
    valid, words = judge_counts(counts) if counts else (True, "")
    return JudgedRun(code or (0 if valid else 2), valid, words)


class _RankGroup:
    """The running ranks of a command."""

    def __init__(
        self, ranks: Sequence[LabRank], outputs: Sequence[int], say: Callable[[str], None], grace_s: float
    ) -> None:
        self.ranks, self.say, self.grace_s = ranks, say, grace_s
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.failed: int | None = None
        "Exit code of the rank that failed first."
        self._nursery: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._texts: dict[int, bytes] = {}
        for rank, output in zip(ranks, outputs, strict=True):
            self._selector.register(output, selectors.EVENT_READ, rank)

    def start_all(self, orders: Mapping[str, Any], inherited: Sequence[int]) -> None:
        words = {
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
        }
        try:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "pipefit.lab.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=words | dict(os.environ),
                pass_fds=inherited,
                start_new_session=True,
            )
        finally:
            for handle in inherited:
                os.close(handle)
        assert self._nursery.stdin is not None and self._nursery.stdout is not None
        self._nursery.stdin.write(json.dumps(orders).encode() + b"\n")
        self._nursery.stdin.close()
        self._selector.register(self._nursery.stdout.fileno(), selectors.EVENT_READ, None)

    def wait_all(self) -> int:
        """Wait until all ranks have ended and their output is read. After a failure the other ranks get `grace_s`
        seconds to end."""
        deadline, steps = float("inf"), [signal.SIGTERM, signal.SIGKILL]
        drained = float("inf")
        while self._selector.get_map() and time.monotonic() < drained:
            for key, _ in self._selector.select(timeout=min(1.0, max(0.0, deadline - time.monotonic()))):
                self._read_output(key.fd, key.data)
            if len(self.codes) == len(self.ranks) and drained == float("inf"):
                drained = time.monotonic() + DRAIN_S
            if self.failed is not None and deadline == float("inf"):
                deadline = time.monotonic() + self.grace_s
            if time.monotonic() > deadline and steps:
                self._signal_ranks(steps.pop(0))
                deadline = time.monotonic() + self.grace_s
        if len(self.codes) < len(self.ranks) and self.failed is None:
            return 1  # the nursery died, and its ranks with it
        return self.failed or 0

    def end_all(self) -> None:
        """Kill the ranks, all processes in their sessions, and the nursery."""
        self._signal_ranks(signal.SIGKILL)
        if self._nursery is not None:
            self._nursery.kill()
            self._nursery.wait()
            assert self._nursery.stdout is not None
            self._nursery.stdout.close()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self._selector.close()

    def _signal_ranks(self, number: int) -> None:
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, number)

    def _read_output(self, handle: int, rank: LabRank | None) -> None:
        data = os.read(handle, 65536)
        *lines, rest = (self._texts.pop(handle, b"") + data).split(b"\n")
        if not data:
            self._selector.unregister(handle)
            if rank is not None:
                os.close(handle)
            lines, rest = ([rest] if rest else []), b""
        if rest:
            self._texts[handle] = rest
        for line in lines:
            text = line.decode(errors="replace")
            if rank is not None:
                self.say(f"[{rank.name}] {text}")
            else:
                self._read_report(text)

    def _read_report(self, text: str) -> None:
        what, rank, value = text.split()
        if what == "start":
            self.pids[int(rank)] = int(value)
            return
        code = int(value)
        self.codes[int(rank)] = code
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pids[int(rank)], signal.SIGKILL)  # processes that it left in its session
        if code and self.failed is None:
            self.failed = 128 - code if code < 0 else code
