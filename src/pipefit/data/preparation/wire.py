"""Send objects over a socket between the trainer and its workers: pickle, with array buffers sent as raw memory.

A message is the number of its parts, their lengths, and the parts: the pickle, then the array buffers, which are read
directly into their final memory.
"""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

_NUMBER = struct.Struct("<Q")


def send_object(connection: socket.socket, value: Any) -> None:
    """Send one object; returns when the receiver has read all but the socket's buffer."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    lengths = [len(parts), *(part.nbytes for part in parts)]
    connection.sendall(b"".join(map(_NUMBER.pack, lengths)))
    for part in parts:
        connection.sendall(part)


def receive_object(connection: socket.socket) -> Any:
    """Return the next object. Raises EOFError if the sender has closed the socket, OSError if the connection broke."""
    count = _NUMBER.unpack(_read_exactly(connection, _NUMBER.size))[0]
    lengths = struct.unpack(f"<{count}Q", _read_exactly(connection, _NUMBER.size * count))
    head, *buffers = [_read_exactly(connection, length) for length in lengths]
    return pickle.loads(head, buffers=buffers)


def _read_exactly(connection: socket.socket, length: int) -> bytearray:
    """Read `length` bytes into writable memory, because arrays share it."""
    data = bytearray(length)
    view, received = memoryview(data), 0
    while received < length:
        got = connection.recv_into(view[received:])
        if not got:
            raise EOFError("the other side has ended")
        received += got
    return data
