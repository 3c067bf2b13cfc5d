"""For all tests: one thread, so that measured bytes do not depend on the machine's cores; property tests have no
deadline, because a busy machine is not a failure; which tests keep together where several processes run them, and
which have the machine to themselves; what earlier files left behind is not searched for garbage again and again; and
the command line."""

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

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("pipefit", deadline=None)
settings.load_profile("pipefit")

LAB = "lab"
"""Labs are made of what a machine has once, its network namespaces and the time of its cores: one after the other."""

FIRST = (LAB, "tests/test_quickstart.py")
"""What takes longest, so that no process is left alone with it in the end."""


def together(nodeid: str) -> str:
    """What one process runs from end to end: a file, whose tests share its fixtures; all that make a lab."""
    file = nodeid.partition("::")[0]
    return LAB if file.startswith("tests/lab/") else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first."""
    items.sort(key=lambda item: FIRST.index(group) if (group := together(item.nodeid)) in FIRST else len(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where several processes run the tests (`pytest -n`): who gets what."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

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
