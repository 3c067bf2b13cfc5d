"""For all tests: one thread, so that measured bytes do not depend on the machine's cores; property tests have no
deadline, because a busy machine is not a failure; and the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("pipefit", deadline=None)
settings.load_profile("pipefit")


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
