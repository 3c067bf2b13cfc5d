"""The tutorials on models, as their reader follows them: files saved, commands run in order, output compared.

Times, rates, loads and the memory of the machine are not compared; losses are, within a tenth.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(?:Save this as\s+`([^`]+)`[^\n]*\n(?:[^\n]+\n)?\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL
)
UNSTABLE = re.compile(r"[\d.,]+ (?:us|ms|s|tokens/s|\w?FLOP/s|GiB)\b|[\d.]+%")
Command = Callable[..., tuple[int, str, str]]
LOSS = re.compile(r"step:\s+(\d+)\s+(loss|eval_loss):\s+([\d.]+)")


def stable_text(line: str) -> str:
    """Return a line without widths of columns and without figures of the machine."""
    return " ".join(UNSTABLE.sub("#", line).split())


def printed_losses(text: str) -> dict[tuple[str, str], float]:
    """Return the losses of a run's output by step and name."""
    return {(step, name): float(value) for step, name, value in LOSS.findall(text)}


def command_words(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a block."""
    for line in text.replace("\\\n", " ").splitlines():
        yield shlex.split(line)


def run_command(words: list[str], folder: Path, pipefit: Command) -> str:
    """Run a command in the working directory `folder` and return its output. Commands of `pipefit` that start no other
    process run in this process."""
    if words[0] == "pipefit" and words[1] not in ("train", "profile", "verify"):
        code, out, err = pipefit(*words[1:])
    else:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        line = [sys.executable, *(["-m", "pipefit"] if words[0] == "pipefit" else []), *words[1:]]
        done = subprocess.run(
            line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    assert code == 0, f"{words}\n{out[-1000:]}{err[-2000:]}"
    return out


def follow_tutorial(page: str, folder: Path, pipefit: Command) -> int:
    """Follow a page in a folder; return the number of compared lines."""
    output, compared = "", 0
    for name, language, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if name:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        elif not language and text.startswith(("pipefit ", "python ")):
            output = ""
            for words in command_words(text):
                output += run_command(words, folder, pipefit)
        elif not language:
            losses = printed_losses(text)
            actual = {key: loss for key, loss in printed_losses(output).items() if key in losses}
            assert actual == pytest.approx(losses, rel=0.1)
            lines = {stable_text(line) for line in text.splitlines() if line.strip() and not LOSS.match(line)}
            assert not lines - {stable_text(line) for line in output.splitlines()}, output
            compared += len(lines) + len(losses)
    return compared


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page", "lines"), [("your-own-model.md", 15), ("multimodal.md", 15)])
def test_a_tutorial_prints_what_its_page_shows(
    page: str, lines: int, tmp_path: Path, pipefit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert follow_tutorial(f"docs/tutorial/{page}", tmp_path, pipefit) >= lines
