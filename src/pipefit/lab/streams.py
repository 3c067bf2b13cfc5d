"""Measure real TCP streams between the hosts of a lab, several at the same time if asked.

One process per host, `python -m pipefit.lab.streams` in its namespace, accepts streams. It sends the streams that
`HostStreams` in the measuring process requests over a Unix socket, which crosses namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from pipefit.errors import LabError
from pipefit.lab import netns, network
from pipefit.lab.lifecycle import Lab, scratch_folder

STREAM_PORT = 5201
START_S = 60.0
"""Seconds that a host's process has to start, and to answer beyond the time of its stream."""

SKIPPED_S = 0.1
"""Start of every stream that is not counted: it contains htb's burst and TCP's first windows."""

StreamPair = tuple[int, int]


class HostStreams:
    """Connections to the host processes of a running lab. `measure_rates` can be called repeatedly."""

    def __init__(self, lab: Lab, told: Sequence[socket.socket]) -> None:
        self._lab, self._told = lab, told
        self._files = [connection.makefile("rw") for connection in told]

    def measure_rates(self, pairs: Sequence[StreamPair], seconds: float) -> dict[StreamPair, float]:
        """Return the payload bytes per second of each ordered pair of hosts while all pairs stream at once.

        A host may send to several hosts at once, with one stream to each. Raises LabError if a stream failed.
        """
        senders = sorted({source for source, _ in pairs})
        for source in senders:
            targets = [network.device_address(target) for origin, target in pairs if origin == source]
            self._files[source].write(json.dumps({"targets": targets, "seconds": seconds}) + "\n")
            self._files[source].flush()
        rates: dict[StreamPair, float] = {}
        for source in senders:
            answer = json.loads(self._files[source].readline() or '{"error": "the process is gone"}')
            if "error" in answer:
                raise LabError(
                    "A stream failed.", where=self._lab.file.cluster.hosts[source].name, seen=answer["error"]
                )
            targets_of = [target for origin, target in pairs if origin == source]
            rates |= {(source, target): rate for target, rate in zip(targets_of, answer["rates"], strict=True)}
        return rates


@contextlib.contextmanager
def open_streams(lab: Lab) -> Iterator[HostStreams]:
    """Start a process on every host of a running lab; kill all of them at exit."""
    count = len(lab.file.cluster.hosts)
    running: list[subprocess.Popen[bytes]] = []
    with scratch_folder(lab) as folder, socket.socket(socket.AF_UNIX) as door:
        door.bind(str(folder / "door"))
        door.listen(count)
        door.settimeout(START_S)
        connections: dict[int, socket.socket] = {}
        try:
            for h in range(count):
                command = [sys.executable, "-m", "pipefit.lab.streams", str(folder / "door"), str(h)]
                running.append(
                    subprocess.Popen([*netns.exec_words(lab.namespace_of(h)), *command, str(os.getpid())], stdin=-3)
                )
            for _ in range(count):
                connection, _ = door.accept()
                connection.settimeout(START_S + 600)
                connections[int(connection.recv(16))] = connection
            yield HostStreams(lab, [connections[h] for h in range(count)])
        except TimeoutError:
            raise LabError(
                "A host of the lab did not answer.", where=str(lab.path), seen=f"{len(connections)} of {count}"
            ) from None
        finally:
            for process in running:
                process.kill()
                process.wait()
            for connection in connections.values():
                connection.close()


def main(door: str, host: int, parent: int) -> None:
    """Run the process of one host: accept streams, and send on request."""
    from pipefit.lab.nursery import die_with_parent

    die_with_parent(parent)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("0.0.0.0", STREAM_PORT))
    listener.listen(64)
    threading.Thread(target=_receive_all, args=(listener,), daemon=True).start()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(door)
        connection.send(str(host).encode())
        with connection.makefile("rw") as lines:
            for line in lines:
                lines.write(json.dumps(_send_all(**json.loads(line))) + "\n")
                lines.flush()


def _send_all(targets: Sequence[str], seconds: float) -> dict[str, object]:
    rates: list[float] = [0.0] * len(targets)
    errors: list[str] = []

    def send_to(index: int) -> None:
        try:
            rates[index] = _send_stream(targets[index], seconds)
        except OSError as error:
            errors.append(f"to {targets[index]}: {error}")

    threads = [threading.Thread(target=send_to, args=(index,)) for index in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"error": errors[0]} if errors else {"rates": rates}


def _send_stream(target: str, seconds: float) -> float:
    """Return the bytes per second that the receiver reports."""
    data = bytes(1 << 16)
    with socket.create_connection((target, STREAM_PORT), timeout=START_S) as stream:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)
        return float(stream.makefile().readline())


def _receive_all(listener: socket.socket) -> None:
    while True:
        stream, _ = listener.accept()
        threading.Thread(target=_receive_stream, args=(stream,), daemon=True).start()


def _receive_stream(stream: socket.socket) -> None:
    """Report the bytes per second between the first arrival after `SKIPPED_S` and the last arrival."""
    buffer = bytearray(1 << 16)
    first_s = begin_s = last_s = 0.0
    total = 0
    with stream:
        while count := stream.recv_into(buffer):
            now = time.monotonic()
            first_s = first_s or now
            if begin_s:
                total += count
                last_s = now
            elif now - first_s >= SKIPPED_S:
                begin_s = now
        rate = total / (last_s - begin_s) if last_s > begin_s else 0.0
        stream.sendall(f"{rate}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
