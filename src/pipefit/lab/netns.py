"""Create, list and delete network namespaces. Needs root and iproute2.

Every name begins with the lab's own prefix; no other namespace is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence

from pipefit.errors import LabError

PREFIX = "pflab-"
KILL_S = 10.0
"""Seconds that processes have to disappear after SIGKILL."""


def unavailable_reason() -> str:
    """Return the reason why labs cannot be created here, or ''. Creates and deletes a namespace as a test."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found"
    if os.geteuid() != 0:
        return "not root"
    name = f"{PREFIX}try-{os.getpid()}"
    try:
        add_namespaces([name])
        run_batch(["ip", "-n", name], ["link add left type veth peer name right", "link add middle type bridge"])
        run_batch(
            ["tc", "-n", name],
            [
                "qdisc add dev left root handle 1: htb",
                "class add dev left parent 1: classid 1:1 htb rate 1mbit",
                "filter add dev left parent 1: protocol ip prio 1 u32 match ip dst 10.0.0.0/8 flowid 1:1",
            ],
        )
    except LabError as error:
        return str(error.seen)
    finally:
        with contextlib.suppress(LabError):
            _run_tool(["ip", "netns", "delete", name])
    return ""


def require_namespaces() -> None:
    """Raise LabError, with the next step, if labs cannot be created here."""
    reason = unavailable_reason()
    if reason:
        raise LabError(
            "The lab needs root and iproute2: it makes network namespaces and shapes their links.",
            where="pipefit lab",
            seen=reason,
            allowed="root in a Linux (or a container with CAP_SYS_ADMIN and CAP_NET_ADMIN), with ip and tc",
            next_step="install the package iproute2, and start the command with sudo",
        )


def standing_namespaces(prefix: str) -> list[str]:
    """Return the namespaces whose names begin with `prefix`, which must begin with the lab prefix."""
    assert prefix.startswith(PREFIX), prefix
    lines = _run_tool(["ip", "netns", "list"]).splitlines()
    return sorted(line.split()[0] for line in lines if line.startswith(prefix))


def add_namespaces(names: Sequence[str]) -> None:
    """Create namespaces."""
    run_batch(["ip"], [f"netns add {name}" for name in names])


def exec_words(name: str) -> list[str]:
    """Return the command prefix that runs a command in a namespace."""
    return ["ip", "netns", "exec", name]


def run_batch(command: Sequence[str], lines: Sequence[str]) -> None:
    """Run many commands of `ip` or `tc` in one process. Raises LabError with the line that failed."""
    if lines:
        _run_tool([*command, "-batch", "-"], "\n".join(lines) + "\n")


def apply_settings(name: str, values: Sequence[str]) -> None:
    """Apply kernel settings `net.ipv4.x=value` in a namespace. A setting that is not available here is skipped."""
    lines = []
    for setting in values:
        key, _, value = setting.partition("=")
        lines.append(f"echo '{value}' > /proc/sys/{key.replace('.', '/')}")
    _run_tool([*exec_words(name), "sh", "-c", f"{{ {'; '.join(lines)}; }} 2> /dev/null; true"])


def list_processes(name: str) -> list[int]:
    """Return the ids of the processes in a namespace."""
    return [int(word) for word in _run_tool(["ip", "netns", "pids", name]).split()]


def remove_namespaces(names: Sequence[str]) -> None:
    """Kill all processes in these namespaces and delete them; their links disappear with them."""
    deadline = time.monotonic() + KILL_S
    for name in names:
        assert name.startswith(PREFIX), name
        while pids := list_processes(name):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise LabError("A process in the lab cannot be ended.", where=name, seen=f"processes {pids}")
            time.sleep(0.02)
        _run_tool(["ip", "netns", "delete", name])


def _run_tool(command: Sequence[str], text: str = "") -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LabError(
            "A command of iproute2 failed.",
            where=" ".join(command),
            seen=said.splitlines()[0] if said else f"exit code {done.returncode}",
            next_step="the kernel needs network namespaces, veth, bridge, sch_htb and cls_u32",
        )
    return done.stdout
