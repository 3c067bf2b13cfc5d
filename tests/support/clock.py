"""The cost of a test, measured so that a busy machine records what a free one would.

A test costs the processor seconds of its process and of all that it started, and the seconds in which none of them ran
or wanted to run: they waited for a clock or a socket. Time in which they waited for a processor does not count. On a
free machine that is what a test takes, but for tests that run on several cores at once: these cost more, since they
take cores from others. Linux says in `/proc` how long a process ran and waited; of children that have ended it says
only how long they ran, and the time in which anyone waited for a processor stands in for the rest. Where nothing is
said, wall time counts.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Reading:
    """Seconds of this process, and of its descendants, at one moment."""

    wall_s: float
    ran_s: float
    """Processor time, that of descendants which have ended included."""
    ended_s: float
    """Processor time of children that have ended."""
    stalled_s: float
    """Time in which some process of the machine waited for a processor."""
    queued: dict[int, float]
    """Process -> seconds in which it waited for a processor."""


def read_clock() -> Reading:
    """The time now, and what this process and its descendants have used until now."""
    ran_s, ended_s, queued = 0.0, 0.0, dict[int, float]()
    stats = _read_stats()
    for pid in _find_descendants(os.getpid(), {pid: parent for pid, (parent, _, _) in stats.items()}):
        ran_s += stats[pid][1] + stats[pid][2]
        ended_s += stats[pid][2]
        queued[pid] = _read_queued(pid)
    return Reading(time.monotonic(), ran_s, ended_s, _read_stalled(), queued)


def cost_between(before: Reading, after: Reading) -> float:
    """Seconds that were used between two readings."""
    wall_s = after.wall_s - before.wall_s
    if not after.queued:
        return wall_s
    ran_s = max(0.0, after.ran_s - before.ran_s)
    # Threads that ended take the seconds that they waited with them.
    queued_s = sum(max(0.0, seconds - before.queued.get(pid, 0.0)) for pid, seconds in after.queued.items())
    if after.ended_s > before.ended_s:
        queued_s = max(queued_s, after.stalled_s - before.stalled_s)
    return ran_s + max(0.0, wall_s - ran_s - queued_s)


def _read_stats() -> dict[int, tuple[int, float, float]]:
    """Process -> its parent, and processor seconds of it and of its ended children."""
    stats = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        own, ended = (sum(map(int, words[k : k + 2])) / TICKS_PER_S for k in (11, 13))
        stats[int(folder.name)] = int(words[1]), own, ended
    return stats


def _find_descendants(start: int, parents: dict[int, int]) -> list[int]:
    """`start`, where it is known, and all processes below it."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    reached = [start] if start in parents else []
    for pid in reached:
        reached += children.get(pid, [])
    return reached


def _read_queued(pid: int) -> float:
    """Seconds in which the threads of a process waited for a processor."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        return sum(int((task / "schedstat").read_text().split()[1]) for task in tasks.iterdir()) / 1e9
    except (OSError, IndexError):
        return 0.0


def _read_stalled() -> float:
    """Seconds since the machine's start in which some process waited for a processor."""
    try:
        return int(re.findall(r"some .*total=(\d+)", Path("/proc/pressure/cpu").read_text())[0]) / 1e6
    except (OSError, IndexError):
        return 0.0
