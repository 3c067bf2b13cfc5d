"""The machine that processes of `--local` share: its cores, their frequency and its memory, as the system reports them.

This is the one place where a cluster may depend on the planning machine. Code that compares plans with recorded ones
passes its own `LocalMachine`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_DEFAULT_HZ = 2.5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMachine:
    """All inputs of the guessed figures of a local cluster."""

    cores: int
    "Cores that this process may use."
    frequency_hz: float
    memory_bytes: int


def detect_machine() -> LocalMachine:
    """Return the machine that this process runs on. Two calls may differ: some systems report only the current
    frequency."""
    return LocalMachine(cores=_cores(), frequency_hz=_frequency_hz(), memory_bytes=_memory_bytes())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _memory_bytes() -> int:
    """The machine's memory, or the limit of this process's control group if it is smaller."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        total = 8 * 2**30
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path).strip()
        if text.isdigit():
            total = min(total, int(text))
    return total


def _frequency_hz() -> float:
    """The highest frequency of the first core; if only the current frequency is known, that one rounded to 0.1 GHz."""
    highest = _read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    if highest.isdigit():
        return float(highest) * 1e3
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("cpu MHz"):
            return round(float(line.split(":")[1]) / 100) * 1e8
    return _DEFAULT_HZ


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
