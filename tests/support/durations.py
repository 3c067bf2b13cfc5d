"""Recorded seconds of every test: `tests/durations.json`, written by `bin/test --all --record-durations`.

Tests that take less than `LISTED_S` are not listed one by one: a file keeps their number and their sum. A file that was
moved since is found by its name, so that moving tests loses no durations.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.clock import cost_between, read_clock

RECORDED = "tests/durations.json"
COST = "cost_s"
LISTED_S = 0.1
UNKNOWN_S = 0.05
"""Assumed where nothing is recorded of a whole file."""


@dataclass
class FileDurations:
    """Recorded seconds of one test file."""

    listed: dict[str, float] = field(default_factory=dict)
    """Test, with its parameters -> seconds."""
    small_count: int = 0
    small_s: float = 0.0

    @property
    def each_small_s(self) -> float:
        """Mean of the tests that are not listed."""
        return self.small_s / self.small_count if self.small_count else UNKNOWN_S

    @property
    def total_s(self) -> float:
        """Sum of all tests."""
        return sum(self.listed.values()) + self.small_s


class Durations:
    """Recorded seconds of all test files."""

    def __init__(self, files: Mapping[str, FileDurations]) -> None:
        self.files = dict(files)
        self._by_name: dict[str, list[str]] = {}
        for file in self.files:
            self._by_name.setdefault(file.rpartition("/")[2], []).append(file)

    def of_file(self, file: str) -> FileDurations | None:
        """What is recorded of a file, also where it stood elsewhere then; None where nothing is."""
        if file in self.files:
            return self.files[file]
        same = self._by_name.get(file.rpartition("/")[2], [])
        return self.files[same[0]] if len(same) == 1 else None

    def of_test(self, nodeid: str) -> float:
        """Seconds of a test; of one that is not listed what small tests of its file take."""
        file, _, test = nodeid.partition("::")
        recorded = self.of_file(file)
        if recorded is None:
            return UNKNOWN_S
        return recorded.listed.get(test, recorded.each_small_s)


def read_durations(root: Path) -> Durations:
    """What is committed; nothing where the file is missing."""
    path = root / RECORDED
    if not path.exists():
        return Durations({})
    data = json.loads(path.read_text(encoding="utf-8"))
    return Durations(
        {
            file: FileDurations(dict(entry.get("tests", {})), *entry.get("small", (0, 0.0)))
            for file, entry in data["files"].items()
        }
    )


def gather_durations(seconds: Mapping[str, float]) -> Durations:
    """Durations by file, from those of every test."""
    files: dict[str, FileDurations] = {}
    for nodeid in sorted(seconds):
        file, _, test = nodeid.partition("::")
        entry = files.setdefault(file, FileDurations())
        if seconds[nodeid] >= LISTED_S:
            entry.listed[test] = round(seconds[nodeid], 1 if seconds[nodeid] >= 1 else 2)
        else:
            entry.small_count += 1
            entry.small_s = round(entry.small_s + seconds[nodeid], 3)
    return Durations(files)


def write_durations(root: Path, durations: Durations) -> None:
    """Write `tests/durations.json`, a line for each test that is listed."""
    lines = []
    for file, entry in sorted(durations.files.items()):
        tests = [f"\n   {json.dumps(test)}: {seconds}" for test, seconds in entry.listed.items()]
        small = json.dumps([entry.small_count, round(entry.small_s, 2)])
        lines.append(f'\n  {json.dumps(file)}: {{"small": {small}, "tests": {{{",".join(tests)}}}}}')
    head = f'{{\n "unit": "seconds", "cores": {os.cpu_count()}, "files": {{'
    (root / RECORDED).write_text(f"{head}{','.join(lines)}\n }}\n}}\n", encoding="utf-8")


class Measuring:
    """A plugin of the processes that run tests: it adds to the report of a test what the test has cost so far."""

    def __init__(self) -> None:
        self.began = read_clock()

    def pytest_runtest_logstart(self) -> None:
        """Begin with a test."""
        self.began = read_clock()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> None:
        """Say what the test has cost until the end of this phase; the report takes that along."""
        item.user_properties[:] = [(name, value) for name, value in item.user_properties if name != COST]
        item.user_properties.append((COST, cost_between(self.began, read_clock())))


class Recorder:
    """A plugin of the process that hears of all tests: it writes down what each has cost. A test that was skipped, or
    failed, keeps what was recorded before; so do parameters that the tier left out."""

    def __init__(self, root: Path, keeps_absent: bool = True) -> None:
        """`keeps_absent`: parameters that did not run keep their durations, as a tier left them out."""
        self.root, self.keeps_absent = root, keeps_absent
        self.seconds: dict[str, float] = {}
        self.kept: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the cost up to this phase of a test: the last phase has all of it."""
        self.seconds[report.nodeid] = dict(report.user_properties).get(COST, 0.0)  # type: ignore[assignment]
        if report.outcome != "passed":
            self.kept.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write what was recorded, and keep files that did not run."""
        before = read_durations(self.root)
        for nodeid in self.kept:
            self.seconds[nodeid] = before.of_test(nodeid)
        ran = {nodeid.partition("[")[0] for nodeid in self.seconds}
        for file, entry in before.files.items() if self.keeps_absent else ():
            for test, seconds in entry.listed.items():
                if f"{file}::{test}".partition("[")[0] in ran:
                    self.seconds.setdefault(f"{file}::{test}", seconds)
        files = before.files | gather_durations(self.seconds).files
        standing = {file: entry for file, entry in files.items() if (self.root / file).exists()}
        write_durations(self.root, Durations(standing))
