"""Starting real `pipefit train` processes for tests: small plans, small text, time limits, nobody left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support import worker_plans as plans
from tests.support.pool import free_port
from typer.testing import CliRunner

from pipefit.cli import build_app
from pipefit.plan.check.rules import save_plan
from pipefit.plan.types import Job, Plan

JOB = Job(batch=8, sequence=16, precision="float32", seed=3)
TEXT = "The quick brown fox jumps over the lazy dog; a pipeline of six stages has no bubble worth a name. "


def write_plan(directory: Path, name: str = "plan.json", **decisions: Any) -> tuple[Path, Plan]:
    """A plan of a tiny Llama over bytes (vocabulary 256), as a file."""
    plans.CONFIGS.setdefault("bytes", plans.LLAMA | {"vocab_size": 256, "num_hidden_layers": 2})
    one = plans.plan("bytes", JOB, **decisions)
    path = directory / name
    save_plan(one, path)
    return path, one


def write_text(directory: Path) -> Path:
    """Enough text for a few epochs of ten steps."""
    path = directory / "corpus.txt"
    path.write_text(TEXT * 60, encoding="utf-8")
    return path


def command(plan: Path, text: Path, run_dir: Path, *options: str, steps: int = 4) -> list[str]:
    return [
        sys.executable, "-m", "pipefit", "train", str(plan), "-o", str(run_dir),
        "--data", str(text), "--steps", str(steps), "--held-out", "8", "--device", "cpu", *options,
    ]  # fmt: skip


def train_here(plan: Path, text: Path, run: Path, *options: str, steps: int = 1) -> tuple[int, str]:
    """(exit code, stderr) of a run of one process, in this process."""
    result = CliRunner().invoke(build_app(), command(plan, text, run, *options, steps=steps)[3:])
    return result.exit_code, result.stderr


TIME_LIMIT_S = 280
"""Of a command: on two cores with other work it takes some times as long as alone."""


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **extra}


def start(words: list[str], **extra: str) -> subprocess.CompletedProcess[str]:
    """Run to the end; whatever was started is gone afterwards."""
    process = subprocess.Popen(
        words,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=TIME_LIMIT_S)
    finally:
        _end(process)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def start_ranks(words: list[list[str]], **extra: str) -> list[subprocess.Popen[str]]:
    """The ranks of a run started by hand, as on machines of their own: nobody but they themselves notices a death."""
    port = str(free_port())
    count = str(len(words))
    return [
        subprocess.Popen(
            line,
            env=environment(
                RANK=str(rank), WORLD_SIZE=count, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=count,
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **extra,
            ),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        for rank, line in enumerate(words)
    ]  # fmt: skip


def finish(processes: list[subprocess.Popen[str]], survivors: list[int], limit_s: float) -> list[tuple[int, str]]:
    """(exit code, stderr) of the survivors once they have ended, within the limit; then everyone is ended."""
    deadline = time.monotonic() + limit_s
    results = []
    try:
        for rank in survivors:
            _, err = processes[rank].communicate(timeout=max(0.1, deadline - time.monotonic()))
            results.append((processes[rank].returncode, err))
    finally:
        for process in processes:
            _end(process)
    return results


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def group_is_empty(process_group: int) -> bool:
    """Whether no process of this group lives."""
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return True
    return False
