"""The process that starts the ranks: it imports their modules once and forks each rank into its own namespace.

Thirty-two separate imports of torch would take a minute of two cores and 32 copies in memory. `launch` starts it as
`python -m pipefit.lab.nursery`. It reads one JSON object from standard input and writes a line `RANK PID` for every
start and `RANK CODE` for every end to standard output. The kernel kills the ranks if the nursery dies, and the nursery
if `launch` dies, so that no process outlives a killed lab. Ranks of emulated devices get priority over other work on
the machine, if the user has the right. They sleep most of the time, and delay only each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
from typing import Any

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read the orders, start the ranks, and report until all have ended."""
    orders = json.loads(sys.stdin.readline())
    die_with_parent(orders["parent"])
    for name in orders["preload"]:
        importlib.import_module(name)
    report = os.dup(sys.stdout.fileno())
    pids: dict[int, int] = {}
    for rank, order in enumerate(orders["ranks"]):
        sys.stdout.flush()
        nursery_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(report)
            enter_rank(order, [entry["output"] for entry in orders["ranks"]], nursery_pid)
            if orders["first"]:
                raise_priority()
            run_here(order["command"])
            return
        pids[pid] = rank
        os.close(order["output"])
        os.write(report, f"start {rank} {pid}\n".encode())
    while pids:
        pid, status = os.wait()
        if pid in pids:
            os.write(report, f"end {pids.pop(pid)} {os.waitstatus_to_exitcode(status)}\n".encode())


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies; exit at once if the parent is already dead."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def enter_rank(order: dict[str, Any], outputs: list[int], parent: int) -> None:
    """Turn this process into a rank: own session, namespace, environment and output."""
    die_with_parent(parent)
    os.setsid()
    handle = os.open(f"/run/netns/{order['namespace']}", os.O_RDONLY | os.O_CLOEXEC)
    if _LIBC.setns(handle, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), order["namespace"])
    os.close(handle)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(order["output"], 1)
    os.dup2(order["output"], 2)
    for descriptor in (nothing, *outputs):
        if descriptor > 2:
            try:
                os.close(descriptor)
            except OSError:
                continue
    os.environ.update(order["environment"])


def raise_priority() -> bool:
    """Give this process and its future threads a real-time priority. Returns True on success."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        return True
    return False


def run_here(command: list[str]) -> None:
    """Run a Python command in this interpreter, which has imported its libraries; exec any other command."""
    if command[0] == "pipefit":
        sys.argv = command
        runpy.run_module("pipefit", run_name="__main__", alter_sys=True)
    elif is_python(command) and len(command) > 2 and command[1] == "-m":
        sys.argv = command[2:]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    elif is_python(command) and len(command) > 1 and not command[1].startswith("-"):
        sys.argv = command[1:]
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[1])))
        runpy.run_path(command[1], run_name="__main__")
    else:
        program = sys.executable if is_python(command) else command[0]
        try:
            os.execvp(program, command)
        except OSError as error:
            print(f"pipefit lab: {command[0]}: {error.strerror}", file=sys.stderr)
            sys.exit(127)


def is_python(command: list[str]) -> bool:
    """Return True if this Python can run the command."""
    return os.path.basename(command[0]) in ("python", "python3") or command[0] == sys.executable


if __name__ == "__main__":
    main()
