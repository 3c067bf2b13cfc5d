"""How many bytes really came over every TCP connection of a process, by the kernel's own count."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

Address = tuple[str, int]

RECEIVED = 128
"""Place of tcpi_bytes_received in the kernel's `struct tcp_info` (linux/tcp.h, since 4.1)."""


def received_bytes() -> dict[tuple[Address, Address], int]:
    """(own address, the other's) -> bytes of payload that have come, of every connection of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                ends = one.getsockname()[:2], one.getpeername()[:2]
                found[ends] = struct.unpack_from("=Q", info, RECEIVED)[0]
    return found
