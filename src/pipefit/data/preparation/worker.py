"""A preparation worker: `python -m pipefit.data.preparation.worker FD`, started by `processes`.

It reads from the socket FD what it is to do (a Maker), then requests, and answers each. It holds no state that matters
and ends when the trainer does, since the socket then does.
"""

from __future__ import annotations

import sys

from pipefit.data.preparation.wire import receive, send
from pipefit.errors import PipefitError


def main(descriptor: int) -> None:
    """Serve until the socket ends. An answer is ("up" | "refused" | "done" | "error", key, value)."""
    import signal
    import socket

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes the socket
    connection = socket.socket(fileno=descriptor)
    try:
        try:
            make = receive(connection).open()
        except Exception as error:  # told to the trainer, which says it where results are waited for
            send(connection, ("refused", None, f"{type(error).__name__}: {error}"))
            return
        send(connection, ("up", None, None))
        while True:
            key, request = receive(connection)
            try:
                answer = ("done", key, make(request))
            except Exception as error:  # told to the trainer, which raises it where the result is wanted
                answer = ("error", key, error if isinstance(error, PipefitError) else _plain(error))
            send(connection, answer)
    except (EOFError, OSError):
        return


def _plain(error: Exception) -> Exception:
    """What can travel, whatever the error holds."""
    return RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m pipefit.data.preparation.worker FD (started by pipefit itself)")
    main(int(sys.argv[1]))
