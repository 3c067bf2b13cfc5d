"""Static imports of the project: which of its files a file reads, imports or starts, found without running anything.

Imports count wherever they stand, inside functions too. An import from a package follows the name to the module that
defines it, so that a package which only passes names on does not tie all of its modules together. Paths and module
names that stand in strings count as well: tests start benchmarks, examples and the command line that way.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

SKIPPED = {"__pycache__", "node_modules", "build", "dist", "runs", "out"}
"""Folders that git ignores; so do those whose names begin with a dot, but for `.ci`."""

COMMANDS = "src/pipefit/cli/"
"""A folder that holds one file a command."""

COMMAND_FIXTURE = "pipefit"
"""A fixture that runs a command: what it needs depends on the words that it is called with."""

WORD_WITH_SUFFIX = re.compile(r"(?:[\w.-]+/)*[\w-][\w.-]*\.(?:py|md|json|css|js|svg|toml|txt|html|csv)\b")
DOTTED_NAME = re.compile(r"\b(?:pipefit|benchmarks)(?:\.\w+)+")
SHELL_COMMAND = re.compile(r"\bpipefit (\w+)")

Reached = tuple[str, bool]
"""A path from the project's root as far as it is known, and whether more parts follow that are not."""


@dataclass
class Needs:
    """What a file needs: files that are followed further, files that count by themselves, and fixtures by name."""

    files: set[str] = field(default_factory=set)
    leaves: set[str] = field(default_factory=set)
    fixtures: dict[str, Needs] = field(default_factory=dict)
    """What a fixture of a conftest needs: only tests that ask for it need that too."""
    asked: set[str] = field(default_factory=set)
    """Names of arguments and strings, among them the fixtures that are asked for."""


def list_files(root: Path) -> list[str]:
    """Paths of the project's files, relative to its root, sorted."""
    paths = []
    for parent, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED and not name.endswith(".egg-info") and (name[0] != "." or name == ".ci")
        ]
        paths += [Path(parent, name).relative_to(root).as_posix() for name in names if not name.endswith(".pyc")]
    return sorted(paths)


class Graph:
    """A project's files and what each of them needs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = list_files(root)
        self.known = set(self.files)
        self._needs: dict[str, Needs] = {}
        self._trees: dict[str, ast.Module] = {}
        self._distances: dict[str, dict[str, int]] = {}

    @cached_property
    def folders(self) -> set[str]:
        """Folders of all files, at any depth."""
        return {parent.as_posix() for file in self.files for parent in PurePosixPath(file).parents}

    @cached_property
    def named(self) -> dict[str, list[str]]:
        """Files by their last part."""
        names: dict[str, list[str]] = {}
        for file in self.files:
            names.setdefault(file.rpartition("/")[2], []).append(file)
        return names

    @cached_property
    def commands(self) -> dict[str, str]:
        """Commands of the command line, and their files."""
        names = [PurePosixPath(file) for file in self.files if file.startswith(COMMANDS) and file.endswith(".py")]
        return {name.stem.replace("_", "-"): name.as_posix() for name in names if name.stem[0] != "_"}

    @cached_property
    def tests(self) -> list[str]:
        """Files that hold tests."""
        return [file for file in self.files if re.search(r"^tests/(.+/)?test_\w+\.py$", file)]

    @cached_property
    def tests_known(self) -> set[str]:
        """Files that hold tests: a string that names one does not run it."""
        return set(self.tests)

    def needs_of(self, file: str) -> Needs:
        """What this file needs by itself."""
        if file not in self._needs:
            self._needs[file] = Needs()  # a file that names itself ends here
            self._needs[file] = self._read_needs(file)
        return self._needs[file]

    def distances_from(self, file: str) -> dict[str, int]:
        """All files that this one depends on, itself included, and the number of steps to them."""
        if file not in self._distances:
            self._distances[file] = self._walk_needs(file)
        return self._distances[file]

    def _walk_needs(self, file: str) -> dict[str, int]:
        distances, leaves, near, steps = {file: 0}, dict[str, int](), [file], 0
        while near:
            steps += 1
            further = []
            for name in near:
                needs = [self.needs_of(name), *(self._needs_of_fixtures(file) if name == file else ())]
                for target in set[str]().union(*(more.files for more in needs)) - distances.keys():
                    distances[target] = steps
                    further.append(target)
                for target in set[str]().union(*(more.leaves for more in needs)):
                    leaves.setdefault(target, steps)
            near = further
        return leaves | distances

    def conftests_of(self, file: str) -> list[str]:
        """Conftests that pytest reads for this file, outermost first."""
        parents = [parent.as_posix() for parent in reversed(PurePosixPath(file).parents)]
        paths = [f"{parent}/conftest.py" for parent in parents]
        return [path for path in paths if path in self.known and path != file]

    def _needs_of_fixtures(self, file: str) -> list[Needs]:
        """What the fixtures need that this test file asks for, and fixtures that these ask for."""
        available: dict[str, Needs] = {}
        for conftest in self.conftests_of(file):
            available |= self.needs_of(conftest).fixtures
        wanted, taken = list(self.needs_of(file).asked), set()
        while wanted:
            name = wanted.pop()
            if name in available and name not in taken:
                taken.add(name)
                wanted += available[name].asked
        return [available[name] for name in sorted(taken - {COMMAND_FIXTURE})]

    def tree_of(self, file: str) -> ast.Module:
        """Syntax tree of a file; those of packages are asked for again and again."""
        if file in self._trees:
            return self._trees[file]
        tree = ast.parse((self.root / file).read_text(encoding="utf-8"), file)
        if file.endswith("/__init__.py"):
            self._trees[file] = tree
        return tree

    def _read_needs(self, file: str) -> Needs:
        needs = Needs(leaves={path for path in self.conftests_of(file) if file.startswith("tests/")})
        if not file.endswith(".py"):
            if file.startswith(("bin/", ".ci/")):
                text = (self.root / file).read_text(encoding="utf-8", errors="replace")
                self.need_commands(needs, set(SHELL_COMMAND.findall(text)) & self.commands.keys())
            return needs
        tree = self.tree_of(file)
        conftest = file.endswith("/conftest.py")
        for conftest_of in self.conftests_of(file) if file.startswith("tests/") else ():
            needs.files |= self.needs_of(conftest_of).files
            needs.leaves |= self.needs_of(conftest_of).leaves
        nodes = [list(ast.walk(statement)) for statement in tree.body]
        reading = Reading(self, file, [node for of_statement in nodes for node in of_statement])
        for statement, of_statement in zip(tree.body, nodes, strict=True):
            asked = conftest and isinstance(statement, ast.FunctionDef) and _is_asked_for(statement)
            reading.needs = needs.fixtures.setdefault(statement.name, Needs()) if asked else needs
            reading.read_nodes(of_statement)
        return needs

    def need_commands(self, needs: Needs, names: Iterable[str] | None) -> None:
        """Add what is behind `pipefit NAME`; all commands where the names are not known."""
        needs.files |= set(self.commands.values() if names is None else [self.commands[name] for name in names])
        needs.leaves |= {f"{COMMANDS}__init__.py", f"{COMMANDS.removesuffix('cli/')}__main__.py"} & self.known

    def module_file(self, name: str, near: str) -> str | None:
        """File of the module `name`, imported in the file `near`: of the sources, beside it, or a helper elsewhere."""
        tail = name.replace(".", "/")
        folders = ["src", near.rpartition("/")[0], "tests"]
        prefixes = [f"{folder}/{tail}" if folder else tail for folder in folders] + [tail]
        for prefix in prefixes:
            for path in (f"{prefix}.py", f"{prefix}/__init__.py"):
                if path in self.known:
                    return path
        if near.startswith(("tests/", "benchmarks/")):
            ends = [path for path in self.named.get(f"{tail.rpartition('/')[2]}.py", []) if path.startswith("tests/")]
            ends = [path for path in ends if path.endswith(f"/{tail}.py")]
            return ends[0] if ends else None
        return None

    def package_folder(self, name: str) -> str | None:
        """Folder of a package of the sources."""
        folder = f"src/{name.replace('.', '/')}"
        return folder if folder in self.folders else None

    def files_in(self, folder: str, deep: bool = True) -> set[str]:
        """Files of a folder, at any depth or directly in it."""
        prefix = f"{folder}/" if folder not in ("", ".") else ""
        return {path for path in self.files if path.startswith(prefix) and (deep or "/" not in path[len(prefix) :])}


def _is_asked_for(function: ast.FunctionDef) -> bool:
    """Whether a function of a conftest is a fixture that only runs where a test names it."""
    decorators = [ast.dump(decorator) for decorator in function.decorator_list]
    return any("fixture" in text and "autouse" not in text for text in decorators)


class Reading:
    """Reading of one file, a statement at a time, into `needs`."""

    def __init__(self, graph: Graph, file: str, nodes: list[ast.AST]) -> None:
        self.graph, self.file, self.needs = graph, file, Needs()
        self.folder = file.rpartition("/")[0]
        self.paths: dict[str, Reached] = {}
        self.lists: dict[str, list[list[ast.expr]]] = {}
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                path, name = self.folder_named(node.value), node.targets[0].id
                if path is not None:
                    self.paths[name] = path
                words = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else [node.value]
                self.lists.setdefault(name, []).append([word for word in words if word is not node.value])
        self.documents = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}

    def read_nodes(self, nodes: list[ast.AST]) -> None:
        """Add what the nodes of a statement need."""
        inner = {id(node.left) for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)}
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.import_module(alias.name, None)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                for alias in node.names:
                    self.import_module(node.module, alias.name)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and id(node) not in inner:
                self.read_path(self.folder_named(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in self.documents:
                self.read_text(node.value)
            elif isinstance(node, ast.JoinedStr):
                self.read_pattern(node)
            elif isinstance(node, ast.Call):
                self.read_call(node)
                self.read_words(node.args)
            elif isinstance(node, ast.List | ast.Tuple):
                self.read_words(node.elts)
            elif isinstance(node, ast.arg):
                self.needs.asked.add(node.arg)
        if any(isinstance(node, ast.arg) and node.arg == COMMAND_FIXTURE for node in nodes):
            self.read_command_line(nodes)

    def import_module(self, module: str, name: str | None) -> None:
        """Add an import of a module, or of a name from it."""
        path = self.graph.module_file(f"{module}.{name}", self.file) if name else None
        path = path or self.graph.module_file(module, self.file)
        if path is None or path == self.file:
            return
        packages = {f"{parent.as_posix()}/__init__.py" for parent in PurePosixPath(path).parents}
        self.needs.leaves |= packages & self.graph.known - {path}
        is_package = path.endswith("/__init__.py")
        origin = self._follow_name(path, name) if name and is_package and path.startswith("src/") else None
        if origin is None:
            self.needs.files.add(path)
        else:
            self.needs.leaves.add(path)
            self.needs.files.add(origin)

    def _follow_name(self, package: str, name: str) -> str | None:
        """File that a package takes this name from, if it takes it from another one."""
        for statement in self.graph.tree_of(package).body:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        return self.graph.module_file(statement.module, package)
        return None

    def folder_named(self, node: ast.AST) -> Reached | None:
        """Path that an expression stands for if it begins at `__file__`: `ROOT / "docs" / name` is ("docs", True)."""
        if isinstance(node, ast.Name):
            return self.paths.get(node.id)
        if isinstance(node, ast.Call):
            if any(isinstance(word, ast.Name) and word.id == "__file__" for word in node.args):
                return self.file, False
            keeps = isinstance(node.func, ast.Attribute) and node.func.attr in ("resolve", "absolute")
            return self.folder_named(node.func.value) if keeps else None  # type: ignore[attr-defined]
        if isinstance(node, ast.Attribute) and node.attr == "parent":
            before = self.folder_named(node.value)
            return (before[0].rpartition("/")[0], before[1]) if before else None
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "parents":
            before = self.folder_named(node.value.value)
            count = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if before is None or not isinstance(count, int):
                return None
            parts = before[0].split("/")
            return "/".join(parts[: max(0, len(parts) - 1 - count)]), before[1]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            before = self.folder_named(node.left)
            if before is None or before[1]:
                return before
            if isinstance(node.right, ast.Constant) and isinstance(node.right.value, str):
                return f"{before[0]}/{node.right.value.strip('/')}".lstrip("/"), False
            return before[0], True
        return None

    def read_path(self, reached: Reached | None, deep: bool = False) -> None:
        """Add the file that a path expression ends at; of a folder its data, or all of it where the end is open."""
        if reached is None:
            return
        path, is_open = reached
        if path in self.graph.known:
            self.needs.files.add(path)
        elif is_open or deep:
            self.needs.leaves |= self.graph.known if not path else set()
            self.needs.files |= self.graph.files_in(path) if path else set()
        elif path:
            files = self.graph.files_in(path, deep=False)
            self.needs.files |= {name for name in files if not name.endswith(".py")}

    def read_text(self, text: str) -> None:
        """Add what a string names: files with a suffix, modules with dots, a folder beside this file."""
        self.needs.asked |= {text} if text.isidentifier() else set()
        for word in set(WORD_WITH_SUFFIX.findall(text)):
            for path in self.graph.named.get(word.rpartition("/")[2], ()):
                near = path.startswith(("benchmarks/", "docs/", "examples/", f"{self.folder}/"))
                if path not in self.graph.tests_known and (path == word or (path.endswith(f"/{word}") and near)):
                    self.needs.files.add(path)
        for name in set(DOTTED_NAME.findall(text)):
            path = self.graph.module_file(name, self.file)
            path = path or self.graph.module_file(name.rpartition(".")[0], self.file)
            self.needs.files |= {path} - {self.file} if path else set()
        beside = f"{self.folder}/{text}"
        if re.fullmatch(r"[\w-]+", text) and beside in self.graph.folders:
            data = self.graph.files_in(beside)
            self.needs.files |= data if not any(path.endswith(".py") for path in data) else set()

    def read_pattern(self, node: ast.JoinedStr) -> None:
        """Add all modules of a package whose module names are made from parts: `f"pipefit.cli.{name}"`."""
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and str(first.value).endswith("."):
            folder = self.graph.package_folder(str(first.value)[:-1])
            self.needs.files |= self.modules_in(folder) if folder else set()

    def read_call(self, node: ast.Call) -> None:
        """Add all modules of a package that walks through itself, and all files of a folder that is walked through."""
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name == "iter_modules" and self.file.startswith("src/"):
            self.needs.files |= self.modules_in(self.folder)
        elif name in ("glob", "rglob", "iterdir", "walk"):
            start = function.value if isinstance(function, ast.Attribute) and name != "walk" else node.args[0]
            self.read_path(self.folder_named(start), deep=True)

    def modules_in(self, folder: str) -> set[str]:
        """Modules of a folder, and packages directly in it."""
        files = self.graph.files_in(folder)
        return {path for path in files if re.fullmatch(r"(?:\w+/__init__|\w+)\.py", path[len(folder) + 1 :])} - {
            self.file
        }

    def read_words(self, words: list[ast.expr]) -> None:
        """Add the command line where a command is put together: `-m pipefit train`."""
        values = [word.value if isinstance(word, ast.Constant) else None for word in words]
        for k in range(len(values) - 1):
            if values[k] == "-m" and values[k + 1] == "pipefit":
                command = values[k + 2] if k + 2 < len(values) else None
                known = isinstance(command, str) and command in self.graph.commands
                self.graph.need_commands(self.needs, [str(command)] if known else None)

    def first_words(self, words: list[ast.expr], names: tuple[str, ...] = ()) -> list[object]:
        """Values that the first of these words may have: its own, or the first of the words that a name stands for."""
        first = words[0] if words else None
        if isinstance(first, ast.Constant):
            return [first.value]
        if isinstance(first, ast.Starred) and isinstance(first.value, ast.Name) and first.value.id not in names:
            name = first.value.id
            return [value for words in self.lists.get(name, [[]]) for value in self.first_words(words, (*names, name))]
        return [None]

    def read_command_line(self, nodes: list[ast.AST]) -> None:
        """Add the commands that the fixture `pipefit` is called with; all where it is handed on, or called with words
        that only a run makes."""
        uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == COMMAND_FIXTURE]
        calls = [node for node in nodes if isinstance(node, ast.Call) and node.func in uses]
        firsts = [first for call in calls for first in self.first_words(call.args[:1])]
        clear = len(uses) == len(calls) and all(first in self.graph.commands for first in firsts)
        self.graph.need_commands(self.needs, [str(first) for first in firsts] if clear else None)
