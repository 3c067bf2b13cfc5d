"""`bin/test`: the linters and the tests of one mode.

usage: bin/test [MODE] [ROOM ...] [--changed] [PYTEST OPTIONS]

  bin/test                every test of the default tier
  bin/test ROOM ...       tests of a room, and of all that depends on it: plan, plan/cutting,
                          src/pipefit/units.py, docs/results, tests/run, benchmarks/spmd/programs.py
  bin/test --changed      the same for what differs from HEAD in the working tree
  bin/test --quick        short tests of every room
  bin/test --all          also slow tests, labs and the benchmarks' quick runs; continuous
                          integration runs this
  bin/test --every        also all parameters of the tests that take minutes with all of them

--quick, --all and --every combine with rooms and with --changed.
--record-durations        with --all or --every: write tests/durations.json
Everything from the first other option on goes to pytest: bin/test plan -x -k cut; -n 0 runs
one process. The tests of the rooms themselves run first. How long a mode takes and how it
chooses tests stands in docs/how-to/run-the-tests.md.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.durations import read_durations
from tests.support.graph import Graph
from tests.support.selection import Choice, UnknownRoomError, changed_files, choose_changed, choose_rooms
from tests.support.tiers import choose_quick_files

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Request:
    """What the words of a command line ask for."""

    tier: str = "default"
    rooms: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    """Single tests, `FILE::TEST`."""
    changed: bool = False
    record: bool = False
    asks_help: bool = False
    further: list[str] = field(default_factory=list)
    """Words for pytest."""


def read_words(words: Sequence[str]) -> Request:
    """What the command line says."""
    request = Request()
    for k, word in enumerate(words):
        if word in ("--quick", "--all", "--every"):
            request.tier = word[2:]
        elif word == "--changed":
            request.changed = True
        elif word == "--record-durations":
            request.record = True
        elif word in ("--help", "-h"):
            request.asks_help = True
        elif word.startswith("-"):
            request.further = list(words[k:])
            break
        else:
            (request.nodes if "::" in word else request.rooms).append(word)
    if request.nodes and request.tier == "default":
        request.tier = "every"  # a test that is named runs, whatever its tier
    return request


def choose_files(request: Request, root: Path) -> Choice | None:
    """Test files of a request; None for all of them."""
    if request.tier != "quick" and not (request.rooms or request.changed or request.nodes):
        return None
    graph = Graph(root)
    choices = []
    if request.rooms:
        choices.append(choose_rooms(graph, request.rooms))
    if request.changed:
        choices.append(choose_changed(graph, changed_files(root)))
    files = list(dict.fromkeys(file for choice in choices for file in choice.files))
    reasons = [choice.reason for choice in choices]
    own = choices[0].own if choices else 0
    if request.tier == "quick":
        quick = set(choose_quick_files(read_durations(root), files if choices else graph.tests))
        own = sum(file in quick for file in files[:own])
        files = [file for file in files if file in quick] if choices else sorted(quick)
        reasons.append("short tests")
    return Choice((*request.nodes, *files), "; ".join(reasons or request.nodes), own)


def check_source(root: Path) -> int:
    """Exit code of the linters and of the type checker, which keeps what it found in files that did not change."""
    for words in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        code = subprocess.run([sys.executable, "-m", *words], cwd=root).returncode
        if code:
            return code
    return 0


def main(words: Sequence[str]) -> int:
    """Exit code of what went wrong before pytest starts, else of pytest."""
    request = read_words(words)
    if request.asks_help:
        print(__doc__.strip())
        return 0
    try:
        choice = choose_files(request, ROOT)
    except UnknownRoomError as error:
        print(f"bin/test: {error}", file=sys.stderr)
        return 2
    if choice is not None and not choice.files:
        print(f"bin/test: nothing to run: {choice.reason}")
        return 0
    code = check_source(ROOT)
    if code:
        return code
    command = [sys.executable, "-m", "pytest", "-n", "2", "--no-loadscope-reorder", f"--tier={request.tier}"]
    command += ["--record-durations"] if request.record else []
    if choice is not None:
        print(f"bin/test: {len(choice.files)} test files: {choice.reason}", flush=True)
        command += [f"--own-first={choice.own}", *choice.files]
    return subprocess.run([*command, *request.further], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
