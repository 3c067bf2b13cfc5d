"""One pool of eight gloo processes for all tests of this folder that want one; the schedule tests' helpers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "schedule"))

_POOLS: list = []


@pytest.fixture
def gloo_pool() -> Iterator:
    """A living pool of 8 processes; made when first asked for, and again after a case broke it."""
    from pool import Pool

    if not _POOLS or not _POOLS[-1].alive:
        _POOLS.append(Pool(8))
    yield _POOLS[-1]


@pytest.fixture
def alone(monkeypatch) -> None:
    """No launcher: the run is one process, this one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def pytest_sessionfinish() -> None:
    for pool in _POOLS:
        pool.close()
