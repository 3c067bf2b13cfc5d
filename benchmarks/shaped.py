"""Hosts with links that take time, on one machine: network namespaces on a bridge, each with a shaped way out.

Every host's packets leave through a token bucket (tc tbf) at the given rate, so a message takes its size over the
rate, messages of one sender queue behind each other, and both directions of a pair are independent. What comes in is
not limited: a host that two others send to at once receives both at full rate. Needs root and iproute2.

    with shaped_hosts(4, 100e6) as hosts:
        subprocess.Popen([*hosts[0].prefix, "python", ...])
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PACKET_BYTES = 16000
"""Large packets: shaping costs a timer interrupt a packet, which 1500 bytes at 200 MB/s would fill a core with."""
BURST_BYTES = 2 * PACKET_BYTES
"""What may leave at once after a pause: well below a message."""


@dataclass(frozen=True, slots=True)
class Host:
    """Where one process runs."""

    address: str
    interface: str
    prefix: tuple[str, ...] = ()
    "Put before a command to run it there."


def cannot_shape() -> str:
    """Why links cannot be shaped here; empty where they can."""
    if os.geteuid() != 0:
        return "this needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found"
    name = f"pfb{os.getpid()}-try"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        _run("ip", "netns", "del", name)
    return done.stderr.strip()


def loopback_hosts(count: int) -> list[Host]:
    """All on this machine as it is."""
    return [Host("127.0.0.1", "lo")] * count


@contextmanager
def shaped_hosts(count: int, bytes_per_s: float) -> Iterator[list[Host]]:
    """`count` hosts whose outgoing links carry that many bytes a second. RuntimeError if a command fails."""
    switch, names = f"pfb{os.getpid()}-s", [f"pfb{os.getpid()}-{index}" for index in range(count)]
    made: list[str] = []
    try:
        _run("ip", "netns", "add", switch)
        made.append(switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for index, name in enumerate(names):
            _run("ip", "netns", "add", name)
            made.append(name)
            _join(name, switch, index)
            rate = ("rate", f"{int(bytes_per_s)}bps", "burst", str(BURST_BYTES), "limit", "64m")
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
        yield [Host(_address(i), "eth0", ("ip", "netns", "exec", name)) for i, name in enumerate(names)]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _join(name: str, switch: str, index: int) -> None:
    port = f"port{index}"
    _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", name, "address", "add", f"{_address(index)}/24", "dev", "eth0")
    _run("ip", "-n", switch, "link", "set", port, "mtu", str(PACKET_BYTES))
    _run("ip", "-n", name, "link", "set", "eth0", "mtu", str(PACKET_BYTES), "gso_max_size", str(PACKET_BYTES))
    for device in ("lo", "eth0"):
        _run("ip", "-n", name, "link", "set", device, "up")


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
