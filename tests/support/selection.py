"""Choice of test files: those that depend on rooms of the sources, or on what changed in the working tree."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.support.graph import Graph

SOURCES = "src/pipefit/"

MIRRORED = (SOURCES, "benchmarks/")
"""Folders whose tests stand in folders of the same names."""

FOR_EVERYTHING = ("pyproject.toml", "constraints.txt", "tests/conftest.py", "bin/setup", "bin/test", "tests/support/")
"""Files that decide how all tests run: where one of them changed, all tests of the default tier run."""

FURTHER_OFF = 9


class UnknownRoomError(ValueError):
    """A name that is neither a room nor a file of the project."""


@dataclass(frozen=True)
class Choice:
    """Test files to run, the nearest ones first; the reason in a few words; how many are a room's own."""

    files: tuple[str, ...]
    reason: str
    own: int = 0


def list_rooms(graph: Graph) -> list[str]:
    """Rooms and rooms within rooms: `plan`, `plan/cutting`, `errors`."""
    rooms = set()
    for file in graph.files:
        if file.startswith(SOURCES) and file.endswith(".py"):
            parts = file.removeprefix(SOURCES).split("/")
            rooms |= {"/".join(parts[:k]) for k in range(1, len(parts))}
            if len(parts) == 1 and not parts[0].startswith("__"):
                rooms.add(parts[0].removesuffix(".py"))
    return sorted(rooms)


def files_of_room(graph: Graph, name: str) -> set[str]:
    """Files that a room, a folder or a path stands for."""
    word = name.strip("/").removeprefix("./")
    for base in (SOURCES + word, word):
        for path in (base, f"{base}.py"):
            if path in graph.known:
                return {path}
        if base in graph.folders:
            return graph.files_in(base)
    raise UnknownRoomError(
        f"No room and no file is called so.\n  where: bin/test\n  seen: {name}\n"
        f"  allowed: a file or folder of this project, or one of {', '.join(list_rooms(graph))}"
    )


def mirrored_folder(files: Iterable[str]) -> tuple[str, ...]:
    """Folders of the tests that belong to these source files, the nearest first: src/pipefit/a/b/c.py has tests/a/b,
    and benchmarks/a/b.py has tests/benchmarks/a."""
    folders = {file.removeprefix(SOURCES).rpartition("/")[0] for file in files if file.startswith(MIRRORED)}
    return tuple(sorted({f"tests/{folder}/" for folder in folders if folder}, key=len, reverse=True))


def choose_tests(graph: Graph, files: Collection[str], reason: str) -> Choice:
    """Test files that depend on one of `files`: their own first, which stand in the folder that mirrors theirs or
    import them, then by the number of steps to them."""
    own, ranked = mirrored_folder(files), []
    for test in graph.tests:
        distances = graph.distances_from(test)
        steps = min((distances[file] for file in files if file in distances), default=None)
        if steps is not None:
            ranked.append((0 if test.startswith(own) or steps <= 1 else min(steps, FURTHER_OFF), test))
    return Choice(tuple(test for _, test in sorted(ranked)), reason, sum(rank == 0 for rank, _ in ranked))


def choose_rooms(graph: Graph, names: Collection[str]) -> Choice:
    """Tests of rooms, and of what depends on them."""
    files = set[str]().union(*(files_of_room(graph, name) for name in names))
    return choose_tests(graph, files, f"{', '.join(names)} and what depends on it")


def choose_changed(graph: Graph, changed: Collection[str]) -> Choice:
    """Tests of changed files, and of what depends on them; a file that is gone counts through those that name it."""
    common = sorted(file for file in changed if file.startswith(FOR_EVERYTHING))
    if common:
        return Choice(tuple(graph.tests), f"everything, since {common[0]} changed")
    gone = sorted(file for file in changed if file not in graph.known and file.startswith("src/"))
    if gone:
        near = set[str]().union(*(nearest_files(graph, file) for file in gone))
        changed = {*changed, *near}
    if not changed:
        return Choice((), "nothing changed")
    return choose_tests(graph, changed, f"files that changed ({len(changed)}) and what depends on them")


def nearest_files(graph: Graph, file: str) -> set[str]:
    """Files of the nearest folder that still stands: what a removed module leaves behind."""
    folder = file.rpartition("/")[0]
    while folder and folder not in graph.folders:
        folder = folder.rpartition("/")[0]
    return graph.files_in(folder, deep=False)


def changed_files(root: Path) -> list[str]:
    """Files that differ from HEAD, and files that git does not know yet."""
    differing = ["git", "diff", "--name-only", "--no-renames", "HEAD"]
    unknown = ["git", "ls-files", "--others", "--exclude-standard"]
    lines = set[str]()
    for words in (differing, unknown):
        done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
        lines |= set(done.stdout.splitlines())
    return sorted(lines - {""})
