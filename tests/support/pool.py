"""A pool of gloo processes on the loopback interface, started once and used for many cases.

PyTorch takes a second and 0.2 GB per process, so layouts of up to 8 processes share one world: a case runs on its
first n ranks. Every wait has a limit, and the pool ends its own processes whatever happens.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.multiprocessing as multiprocessing

LIMIT_S = 120.0


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pool:
    """`size` processes in one gloo world."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._pipes, self._processes = [], []
        os.environ["OMP_NUM_THREADS"] = "1"
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
        """`function(*arguments)` on the first `ranks` processes at once; their results by rank.

        An exception in one of them is raised here with its traceback as text, and ends the pool. A function marked
        `for_all` makes process groups: a process that did not make them would wait for others in later tests.
        """
        assert ranks == self.size or not getattr(function, "for_all", False), "process groups are made by all processes"
        for pipe in self._pipes[:ranks]:
            pipe.send((function, arguments))
        results: list[Any] = []
        failures = []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            limit = 1.0 if failures else LIMIT_S
            try:
                good, value = pipe.recv() if pipe.poll(limit) else (False, f"no answer within {limit} s")
            except EOFError:
                good, value = False, "the process ended"
            (results if good else failures).append(value if good else f"rank {rank}: {value}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
