"""For all tests: one thread, so that measured bytes do not depend on the machine's cores; property tests have no
deadline, because a busy machine is not a failure; the tier of a run, and what it leaves out; which tests keep together
where several processes run them, in which order, and which have the machine to themselves; what earlier files left
behind is not searched for garbage again and again; the command line; and one pool of eight gloo processes for all
tests that want one."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.support import durations, session, tiers

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PIPEFIT_CACHE"] = "off"  # models are captured by the code under test; tests of the cache name a folder
settings.register_profile("pipefit", deadline=None)
settings.load_profile("pipefit")

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what `bin/test` says to pytest."""
    group = parser.getgroup("pipefit")
    group.addoption("--tier", choices=tiers.TIERS, default="every", help="which tests run (see bin/test --help)")
    group.addoption("--own-first", type=int, default=0, metavar="N", help="the first N files that are named come first")
    group.addoption("--record-durations", action="store_true", help=f"write {durations.RECORDED}")


def pytest_configure(config: pytest.Config) -> None:
    """Record durations where that is asked for: processes that run tests measure, and the one that hears of all
    tests writes them down."""
    if config.getoption("record_durations"):
        runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
        if runs_tests:
            config.pluginmanager.register(durations.Measuring())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(durations.Recorder(ROOT, config.getoption("tier") != "every"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the tier leaves out, draw less in its property tests, and put what takes longest first."""
    session.arrange_items(config, items, ROOT)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where several processes run the tests (`pytest -n`): who gets what."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return session.together(nodeid)

    return Together(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that makes a lab waits until no other test of this project runs on the machine, and has it to itself: a
    lab's devices and links keep their pace only where the cores have time. First, so that the waiting is not in the
    test's time limit."""
    alone = item.get_closest_marker("netns") is not None
    path = Path(tempfile.gettempdir(), f"pipefit-tests-{os.getuid()}")
    with open(f"{path}.turn", "w") as turn, open(f"{path}.room", "w") as room:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:  # else the turn is kept, so that no other test goes in before this one is out
            fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:  # by hand: a process that the test forked and left to a later one has these files as well
            fcntl.flock(room, fcntl.LOCK_UN)
            fcntl.flock(turn, fcntl.LOCK_UN)


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """What is alive when a file begins (captured models, compiled code) mostly stays until the end: without this every
    `gc.collect()` of a test, and every full collection, goes through all of it, for seconds late in a whole run."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def pipefit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Exit code, standard output, standard error of `pipefit WORDS` in this process."""
    from pipefit.cli import main

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipefit", *words])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


_POOLS: list[Any] = []


@pytest.fixture
def gloo_pool() -> Iterator[Any]:
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
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher: the run is one process, this one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def pytest_sessionfinish() -> None:
    for pool in _POOLS:
        pool.close()
