"""Objects over a socket between the trainer and workers that it started itself: pickle, arrays as they lie in memory.

A message is the number of its parts, their lengths, and the parts: the pickle, then the buffers of its arrays, which
are read straight into the memory that they keep.
"""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

_NUMBER = struct.Struct("<Q")


def send_object(connection: socket.socket, value: Any) -> None:
    """Send one object; returns when the other side has read all but what the socket holds."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    lengths = [len(parts), *(part.nbytes for part in parts)]
    connection.sendall(b"".join(map(_NUMBER.pack, lengths)))
    for part in parts:
        connection.sendall(part)


def receive_object(connection: socket.socket) -> Any:
    """The next object. Raises EOFError when the other side has ended, OSError when it broke off."""
    count = _NUMBER.unpack(_read_exactly(connection, _NUMBER.size))[0]
    lengths = struct.unpack(f"<{count}Q", _read_exactly(connection, _NUMBER.size * count))
    head, *buffers = [_read_exactly(connection, length) for length in lengths]
    return pickle.loads(head, buffers=buffers)


def _read_exactly(connection: socket.socket, length: int) -> bytearray:
    """Writable, as the arrays that lie in it must be."""
    data = bytearray(length)
    view, at = memoryview(data), 0
    while at < length:
        got = connection.recv_into(view[at:])
        if not got:
            raise EOFError("the other side has ended")
        at += got
    return data
