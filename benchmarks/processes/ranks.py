"""The ranks of a benchmark: fresh processes on this machine, of which one reports.

found = in_ranks(rank_main, 4, plans, model)        calls rank_main(rank, 4, port, plans, model, queue) in each
"""

from __future__ import annotations

import os
import queue as queues
import socket
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 3600.0
"""How long ranks may take together."""


def in_ranks(main: Callable[..., None], count: int, *arguments: Any, limit_s: float = LIMIT_S) -> Any:
    """What the one rank that reports puts into the queue. RuntimeError where a rank ends before, or time is up."""
    import torch.multiprocessing as multiprocessing

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(target=main, args=(rank, count, port, *arguments, queue), daemon=True) for rank in range(count)
    ]
    for rank in ranks:
        rank.start()
    try:
        found = _report(queue, ranks, time.monotonic() + limit_s)
        for rank in ranks:
            rank.join(60)
        return found
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()


def join_group(rank: int, count: int, port: int) -> None:
    """In a rank: one thread, and a gloo group over loopback."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)


def _report(queue: Any, ranks: list[Any], until: float) -> Any:
    while True:
        try:
            return queue.get(timeout=5)
        except queues.Empty:
            codes = [rank.exitcode for rank in ranks]
            if any(code not in (None, 0) for code in codes) or time.monotonic() > until:
                raise RuntimeError(f"a rank ended, or time is up: exit codes {codes}") from None
