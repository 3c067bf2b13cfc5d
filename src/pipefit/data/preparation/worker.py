"""A preparation worker: `python -P -m pipefit.data.preparation.worker FD TRAINER`, started by `processes`.

It reads from the socket FD what it is to do (a Maker), then requests, and answers each. It holds no state that matters
and ends when the process TRAINER does: at once on Linux, elsewhere when it uses the socket next.
"""

from __future__ import annotations

import sys

from pipefit.data.preparation.wire import receive_object, send_object
from pipefit.errors import PipefitError

_PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def main(descriptor: int, trainer: int) -> None:
    """Serve until the socket ends. An answer is ("up" | "refused" | "done" | "error", key, value)."""
    import signal
    import socket

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes the socket
    _die_with_parent(trainer)
    connection = socket.socket(fileno=descriptor)
    try:
        try:
            make = receive_object(connection).open()
        except Exception as error:  # told to the trainer, which says it where results are waited for
            send_object(connection, ("refused", None, f"{type(error).__name__}: {error}"))
            return
        send_object(connection, ("up", None, None))
        while True:
            key, request = receive_object(connection)
            try:
                answer = ("done", key, make(request))
            except Exception as error:  # told to the trainer, which raises it where the result is wanted
                answer = ("error", key, error if isinstance(error, PipefitError) else _picklable_error(error))
            send_object(connection, answer)
    except (EOFError, OSError):
        return


def _die_with_parent(trainer: int) -> None:
    """Have the kernel end this process with its parent, where it can: also one that stands still or has a long task."""
    import ctypes
    import os
    import signal

    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):  # a libc without it: the socket ends, which does for all but those
        return
    if os.getppid() != trainer:  # it has ended before it was asked for
        sys.exit()


def _picklable_error(error: Exception) -> Exception:
    """What can travel, whatever the error holds."""
    return RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -P -m pipefit.data.preparation.worker FD TRAINER (started by pipefit itself)")
    main(int(sys.argv[1]), int(sys.argv[2]))
