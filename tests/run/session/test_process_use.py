"""Memory and cores of a process: its own tensors count, Python and its libraries do not; a crowded core is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pipefit.run.session.process_use import ProcessUse, resident_bytes, scheduled_s

LINUX = pytest.mark.skipif(not Path("/proc/self/schedstat").is_file(), reason="the kernel does not tell")


@LINUX
def test_only_new_memory_counts() -> None:
    use = ProcessUse(torch.device("cpu"))
    assert use.library_bytes == resident_bytes() > 50 * 2**20
    before, total = use.peak_memory()
    kept = torch.ones(96 * 2**20 // 4)
    after, _ = use.peak_memory()
    assert 0 <= before <= after < total and after >= 90 * 2**20 and kept[0] == 1


@LINUX
def test_a_crowded_core_is_noticed() -> None:
    """Another process on the only core that this one may use."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        use = ProcessUse(torch.device("cpu"))
        stop = time.process_time() + 0.3
        while time.process_time() < stop:
            pass
        share = use.core_share()
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, cores)
    assert share is not None and 0 < share < 0.8


def test_no_share_is_known_before_the_process_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipefit.run.session.process_use.scheduled_s", lambda: (0.0, 0.0))
    assert ProcessUse(torch.device("cpu")).core_share() is None
    assert all(value >= 0 for value in scheduled_s())
