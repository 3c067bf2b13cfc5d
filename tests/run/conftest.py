"""One pool of eight gloo processes for all tests of this folder that want one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

_POOLS: list = []


@pytest.fixture
def gloo_pool() -> Iterator:
    """A living pool of 8 processes; made when first asked for, and again after a case broke it."""
    from tests.support.pool import Pool

    if not _POOLS or not _POOLS[-1].alive:
        _POOLS.append(Pool(8))
    yield _POOLS[-1]


@pytest.fixture(scope="module", autouse=True)
def forgotten_groups() -> Iterator[None]:
    """Destroy the process groups that the tests of a file made: later files pay for their threads."""
    yield
    if _POOLS and _POOLS[-1].alive:
        from tests.support.worker_cases import forget_groups

        _POOLS[-1].run(forget_groups, ranks=_POOLS[-1].size)


@pytest.fixture
def alone(monkeypatch) -> None:
    """No launcher: the run is one process, this one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def pytest_sessionfinish() -> None:
    for pool in _POOLS:
        pool.close()
