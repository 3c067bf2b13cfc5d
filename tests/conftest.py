"""For all tests: one thread, so that measured bytes do not depend on the machine's cores; property tests have no
deadline, because a busy machine is not a failure; which tests keep together where several processes run them; and the
command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("pipefit", deadline=None)
settings.load_profile("pipefit")

LAB = "lab"
"""Labs are made of what a machine has once, its network namespaces and the time of its cores: one after the other."""

FIRST = (LAB, "tests/test_quickstart.py")
"""What takes longest, so that no process is left alone with it in the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of a file share its fixtures, so they go to one process; so do all that make a lab."""
    groups = {}
    for item in items:
        file = item.path.relative_to(config.rootpath).as_posix()
        groups[item] = LAB if file.startswith("tests/lab/") else file
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    items.sort(key=lambda item: FIRST.index(groups[item]) if groups[item] in FIRST else len(FIRST))


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
