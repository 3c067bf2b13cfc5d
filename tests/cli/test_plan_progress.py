"""Progress of `pipefit plan` on stderr, and Ctrl-C, as a user sees them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.support.plan_toys import toy_model

from pipefit.cli._progress import ProgressLines
from pipefit.codec import dump_text
from pipefit.plan.check.rules import load_plan
from pipefit.plan.evaluate.search_progress import INTERRUPTED, SearchReport
from pipefit.plan.make import is_interrupted

Pipefit = Callable[..., tuple[int, str, str]]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    path = tmp_path / "model.json"
    path.write_text(dump_text(toy_model(3)))
    return ["plan", "--model", str(path), "--cluster", "2xH100", "--batch", "8", "--seq", "64", "--json"]


def test_lines_name_every_pass_on_stderr_and_quiet_prints_none(pipefit: Pipefit, words: list[str]) -> None:
    code, out, err = pipefit(*words)
    lines = [line for line in err.splitlines() if not line.startswith("compiling")]
    assert code == 0 and lines[0] == "reading the model ..."
    for name in ("searching layouts", "placing devices", "grouping devices", "trading memory", "sensitivity to"):
        assert any(line.startswith(name) for line in lines)
    assert pipefit(*words, "--quiet") == (0, out, "")


def start_command(words: list[str]) -> subprocess.Popen[str]:
    """Start a command that hears Ctrl-C, also where the tests run in the background and ignore it."""
    return subprocess.Popen(
        [sys.executable, "-m", "pipefit", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def test_ctrl_c_gives_the_best_plan_so_far(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    job = ["--cluster", "8xH100", "--batch", "64", "--seq", "4096"]
    process = start_command(["plan", "--model", "llama-3-8b", *job, "-o", str(path)])
    assert process.stderr is not None
    for line in process.stderr:
        if "best" in line:
            process.send_signal(signal.SIGINT)
            break
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and out.splitlines()[0] == INTERRUPTED
    assert is_interrupted(load_plan(path))


def test_ctrl_c_before_any_plan_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    job = ["--cluster", "8xH100", "--batch", "64", "--seq", "4096"]
    process = start_command(["plan", "--model", "llama-3-8b", *job, "-o", str(path)])
    assert process.stderr is not None and process.stderr.readline() == "reading the model ...\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    # Python ends by the signal itself if the interrupt passed through `exec` of a text, as dataclasses do in an import.
    assert process.returncode in (130, -signal.SIGINT) and out == "" and not path.exists()
    assert err.splitlines()[-1] == "interrupted: no plan found yet, nothing written"


def test_plain_lines_are_seconds_apart_within_a_pass(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with ProgressLines(quiet=False) as lines:
        for now_s, name in ((100.0, "a"), (101.0, "a"), (106.0, "a"), (106.5, "b"), (107.0, "b")):
            lines.show_report(SearchReport(name, 2, int(now_s), 0.5, 0.25))
    assert capsys.readouterr().err.splitlines() == [
        "reading the model ...",
        "a: 2 candidates left, 100 simulated, best 500 ms, lower bound 250 ms ...",
        "a: 2 candidates left, 106 simulated, best 500 ms, lower bound 250 ms ...",
        "b: 2 candidates left, 106 simulated, best 500 ms, lower bound 250 ms ...",
    ]


def test_the_first_compilation_is_announced_and_a_cached_one_is_not(tmp_path: Path) -> None:
    code = (
        "from pipefit.schedule.taskgraph.compile_notice import on_compilation\n"
        "from pipefit.cli._progress import ProgressLines\n"
        "from pipefit.plan.cutting import partition\n"
        "lines = ProgressLines(quiet=False)\n"
        "with on_compilation(lines.show_compilation):\n"
        "    partition.partition_layers([[1.0] * 12] * 3, compiled=True)\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    answers = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True).stderr
        for _ in range(2)
    ]
    assert answers == ["compiling the search loops (once on this machine) ...\n", ""]
