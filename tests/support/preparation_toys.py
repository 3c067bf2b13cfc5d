"""Makers that misbehave, digests of prepared steps, and a trainer that is killed: for tests of preparation.

Run as a program it is that trainer: `RECIPE.pickle OUT FIRST STOP KILL_AT`.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipefit.data.preparation.ahead import BatchRecipe, HeldStage, PreparedStep, StepPrefetcher
from pipefit.data.preparation.pool import WorkerPool
from pipefit.data.preparation.processes import ProcessWorkers
from pipefit.errors import DataError

PLACES = (HeldStage(0, "patches", 0), HeldStage(1, "samples", 1), HeldStage(2, "latents", 0))


@dataclass(frozen=True)
class Odd:
    """Does as the request says; what must happen once only leaves a mark in the folder."""

    folder: str

    def open(self) -> Callable[[Any], Any]:
        def make(request: Any) -> Any:
            kind, number = request
            mark = Path(self.folder, f"{kind}-{number}")
            first = not mark.exists()
            mark.touch()
            if kind == "crash" or (kind == "crash once" and first):
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "stop once" and first:
                os.kill(os.getpid(), signal.SIGSTOP)
            if kind == "raise":
                raise DataError("An image is broken.", where="a.jpg")
            if kind == "fail":
                raise KeyError("odd")
            return np.full(1000, number), os.getpid()

        return make


class Unreadable:
    """Can be sent, not received."""

    def __reduce__(self) -> Any:
        return _too_large, ()


def _too_large() -> None:
    raise MemoryError("of this size")


class Garbled:
    """Answers one request by what cannot be read, others by themselves."""

    def open(self) -> Callable[[Any], Any]:
        return lambda request: Unreadable() if request == "garbled" else request


def digest(step: PreparedStep) -> str:
    """Of everything that a step feeds, and its counts."""
    state = hashlib.sha256(step.plan.rows.tobytes() + repr(sorted(step.plan.divisors.items())).encode())
    for space, counts in sorted(step.plan.counts.items()):
        state.update(space.encode() + counts.tobytes())
    for key, feed in sorted(step.feeds.items()):
        for name, array in sorted(feed.arrays.items()):
            state.update(f"{key} {name} {array.dtype} {array.shape} {feed.image_lengths}".encode() + array.tobytes())
    return state.hexdigest()


def train(recipe: BatchRecipe, out: Path, first: int, stop: int, kill_at: int) -> None:
    """Write the digest of every step; be killed in the middle of one."""
    executor = ProcessWorkers(recipe, 1)
    pool = WorkerPool(executor)
    ahead = StepPrefetcher(recipe, PLACES, pool, stop=stop)
    with out.open("a") as file:
        for step in range(first, stop):
            prepared = ahead.take_step(step)
            if step == kill_at:
                print(*executor.process_ids.values(), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            print(step, digest(prepared), file=file, flush=True)
    pool.close()


def gone(process: int, timeout_s: float = 10.0) -> bool:
    """Whether a process ends in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def stands_still(process: int, timeout_s: float = 30.0) -> bool:
    """Whether a process is stopped by a signal in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.02)
    return False


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as stored:
        what = pickle.load(stored)
    train(what, Path(sys.argv[2]), *map(int, sys.argv[3:6]))
