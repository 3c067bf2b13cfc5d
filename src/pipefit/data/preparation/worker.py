"""A preparation worker: `python -P -m pipefit.data.preparation.worker FD TRAINER`, started by `processes`.

It reads a HandlerFactory from the socket FD, then requests, and answers each. It holds no state that matters. It ends
with the process TRAINER: at once on Linux, elsewhere at its next use of the socket.
"""

from __future__ import annotations

import sys

from pipefit.data.preparation.wire import receive_object, send_object
from pipefit.errors import PipefitError

_PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""


def main(descriptor: int, trainer: int) -> None:
    """Serve until the socket closes. An answer is ("up" | "refused" | "done" | "error", key, value)."""
    import signal
    import socket

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes the socket
    _die_with_parent(trainer)
    connection = socket.socket(fileno=descriptor)
    try:
        try:
            make = receive_object(connection).open()
        except Exception as error:  # sent to the trainer as the reason of this worker's end
            send_object(connection, ("refused", None, f"{type(error).__name__}: {error}"))
            return
        send_object(connection, ("up", None, None))
        while True:
            key, request = receive_object(connection)
            try:
                answer = ("done", key, make(request))
            except Exception as error:  # sent to the trainer, which raises it in `take`
                answer = ("error", key, error if isinstance(error, PipefitError) else _picklable_error(error))
            send_object(connection, answer)
    except (EOFError, OSError):
        return


def _die_with_parent(trainer: int) -> None:
    """Ask the kernel (Linux only) to end this process with its parent, even if it hangs or runs a long task."""
    import ctypes
    import os
    import signal

    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):  # libc without prctl: the closed socket ends idle workers
        return
    if os.getppid() != trainer:  # the trainer ended before prctl was called
        sys.exit()


def _picklable_error(error: Exception) -> Exception:
    """Convert an error to one that can be pickled, whatever it contains."""
    return RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -P -m pipefit.data.preparation.worker FD TRAINER (started by pipefit itself)")
    main(int(sys.argv[1]), int(sys.argv[2]))
