"""Memory and cores that the process of a rank uses for its training.

A CPU process also holds Python, torch and their libraries. A plan does not count them, so neither does this memory:
it counts from the moment before the worker is built.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch


class ProcessUse:
    """Memory beyond that at this object's making, and core time since then. `sharing` processes share the machine."""

    def __init__(self, device: torch.device, sharing: int = 1) -> None:
        self.device, self.sharing = device, sharing
        self.library_bytes = 0 if device.type == "cuda" else resident_bytes()
        self._start_s = scheduled_s()

    def peak_memory(self) -> tuple[int, int]:
        """Return (peak bytes, bytes of the device): allocated on CUDA, resident without Python and its libraries on
        the CPU."""
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            return torch.cuda.max_memory_allocated(self.device), total
        return max(0, peak_resident_bytes() - self.library_bytes), _machine_bytes(self.sharing)

    def core_share(self) -> float | None:
        """Return the share of the time in which the main thread could run and had a core; None where the kernel does
        not tell."""
        ran_s, queued_s = (now - start for now, start in zip(scheduled_s(), self._start_s, strict=True))
        return ran_s / (ran_s + queued_s) if ran_s > 0 else None


def resident_bytes() -> int:
    """Return the resident memory of this process now; its peak where the kernel does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def scheduled_s() -> tuple[float, float]:
    """Return the seconds for which the main thread had a core, and for which it was ready and had none; (0, 0) where
    the kernel does not tell."""
    try:
        ran, queued = Path("/proc/self/schedstat").read_text().split()[:2]
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(ran) / 1e9, int(queued) / 1e9


def _machine_bytes(sharing: int) -> int:
    from pipefit.cluster import local_cluster

    return local_cluster(sharing).kinds["cpu"].memory_bytes
