"""Workers as processes on this host: plain interpreters that import numpy and Pillow, but not torch or the main
program.

Each worker has a socket and, in the trainer, a thread that reads it, so a hanging worker does not delay the others. A
worker that ends is replaced. On Linux no worker outlives the thread that started it: the creator of ProcessWorkers or
the pool's thread.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipefit.data.preparation.executor import (
    HandlerFactory,
    TaskFailed,
    TaskFinished,
    TaskKey,
    WorkerDied,
    WorkerEvent,
    WorkerReady,
    WorkerStarting,
)
from pipefit.data.preparation.wire import receive_object, send_object

if TYPE_CHECKING:  # both are slow to import
    import socket
    import subprocess

_SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_PROGRAM = ("-P", "-m", "pipefit.data.preparation.worker")
"""-P keeps the trainer's working directory off the module path, unless the trainer has it there."""

_ENDS_WITHIN_S = 1.0


@dataclass(slots=True)
class _WorkerProcess:
    process: subprocess.Popen[bytes]
    connection: socket.socket
    thread: threading.Thread


class ProcessWorkers:
    """A WorkerExecutor of `count` processes."""

    def __init__(self, maker: HandlerFactory, count: int) -> None:
        self._maker, self.count = maker, count
        self._events: queue.SimpleQueue[WorkerEvent | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._workers: dict[int, _WorkerProcess] = {}
        self._closed = False
        for _ in range(count):
            self._spawn_worker()

    @property
    def process_ids(self) -> dict[int, int]:
        """Worker -> its process id. Safe from any thread."""
        return {number: worker.process.pid for number, worker in tuple(self._workers.items())}

    def submit(self, worker: int, key: TaskKey, request: Any) -> None:
        if worker in self._workers:
            try:
                send_object(self._workers[worker].connection, (key, request))
            except OSError:
                return  # it has just ended; its thread reports that

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        events: list[WorkerEvent] = []
        try:
            event = self._events.get(timeout=timeout_s)
            while True:
                if event is not None:
                    events.append(event)
                event = self._events.get_nowait()
        except queue.Empty:
            pass
        for event in events:
            if isinstance(event, WorkerDied):
                self._replace_worker(event.worker)
        return events

    def wake(self) -> None:
        self._events.put(None)

    def kill(self, worker: int) -> None:
        if worker in self._workers:
            self._workers[worker].process.kill()

    def close(self) -> None:
        """Kill all workers at once; their tasks are not needed."""
        self._closed = True
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.process.wait()
            worker.thread.join()
            worker.connection.close()
        self._workers.clear()

    def _spawn_worker(self) -> None:
        import socket
        import subprocess

        number = next(self._numbers)
        paths = [path or os.getcwd() for path in sys.path]
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [sys.executable, *_PROGRAM, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | _SINGLE_THREADED | {"PYTHONPATH": os.pathsep.join(paths)},
            )
        finally:
            theirs.close()
        thread = threading.Thread(target=self._read_answers, args=(number, ours, process), daemon=True)
        self._workers[number] = _WorkerProcess(process, ours, thread)
        self._events.put(WorkerStarting(number))
        thread.start()

    def _replace_worker(self, number: int) -> None:
        worker = self._workers.pop(number)
        worker.process.kill()
        worker.process.wait()
        worker.thread.join()
        worker.connection.close()
        if not self._closed:
            self._spawn_worker()

    def _read_answers(self, number: int, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """Convert a worker's answers to events until the worker ends."""
        refused = ""
        try:
            send_object(connection, self._maker)
            while True:
                kind, key, value = receive_object(connection)
                if kind == "up":
                    self._events.put(WorkerReady(number))
                elif kind == "refused":
                    refused = value
                elif kind == "done":
                    self._events.put(TaskFinished(number, key, value))
                else:
                    self._events.put(TaskFailed(number, key, value))
        except (EOFError, OSError):
            self._events.put(WorkerDied(number, refused or _describe_exit(process)))
        except Exception as error:  # an invalid or too large message: the worker is unusable
            self._events.put(WorkerDied(number, f"{type(error).__name__}: {error}"))


def _describe_exit(process: subprocess.Popen[bytes]) -> str:
    """Describe the exit of a process that has closed its socket."""
    import subprocess

    try:
        code = process.wait(_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}"
