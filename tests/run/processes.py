"""Runs a function in several gloo processes on the loopback interface, with a time limit, and brings results back."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

LIMIT_S = 120


def run_processes(function: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """[function(rank, count, *arguments) of every rank]; raises what the first failing rank raised."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        workers = [
            context.Process(target=_enter, args=(function, rank, count, port, folder, arguments), daemon=True)
            for rank in range(count)
        ]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join(LIMIT_S)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
                    worker.join()
        results = []
        for rank in range(count):
            path = Path(folder) / str(rank)
            assert path.exists(), f"rank {rank} ended without a result (exit code {workers[rank].exitcode})"
            kind, value = pickle.loads(path.read_bytes())
            assert kind == "done", f"rank {rank}:\n{value}"
            results.append(value)
        return results


def _enter(
    function: Callable[..., Any], rank: int, count: int, port: int, folder: str, arguments: tuple[Any, ...]
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=LIMIT_S - 20))
    try:
        result: tuple[str, Any] = ("done", function(rank, count, *arguments))
    except BaseException:
        result = ("failed", traceback.format_exc())
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    if result[0] == "done":
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
