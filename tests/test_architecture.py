"""The rules of docs/design/architecture.md and of the house, over the source as it stands: imports, sizes, words,
commands."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from pipefit.optimizers.sharded_state import STATES

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "pipefit"
MODULES = sorted(SOURCE.rglob("*.py"))

FAMILY_LAYERS = r"model/families/\w+/(?!\w*config\.py|__init__\.py)\w+\.py"
"""Modules of a model family that hold its layers; the configurations beside them need no torch."""


def module_id(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


TORCH_AT_IMPORT = (
    "run/",
    "profile/",
    "testing/operator",
    "testing/optimizers",
    "model/families/common",
    "model/families/finish",
    "model/families/leaf",
    *(module_id(path) for path in MODULES if re.fullmatch(FAMILY_LAYERS, module_id(path))),
)
"""Where torch may be imported with the module: doing the work, measuring it, and the models as nn.Module layers."""

TORCH_INSIDE_FUNCTIONS = (
    "model/capture/", "model/weights/", "model/families/build", "model/any_class", "model/user", "optimizers/", "cli/",
)  # fmt: skip
"""Where functions may import torch: they capture, build, load or save a model, or start a run; optimizers for types."""

LINE_LIMIT = 450
LONG_FILES: dict[str, str] = {}
"""Files above the limit, each with the reason why it is better whole."""

IMPORT_LIMIT_S = 0.3
NUMPYS = 5
"""The same limit where a processor is slow, or shared: a free one imports numpy in 0.06 s."""

TRIES = 15
"""How often the import is timed, at most."""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def rooms() -> dict[str, int]:
    """Room -> its line in the table of docs/design/architecture.md; a room may import those of its own line and
    above."""
    text = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8").partition("## Rooms of rooms")[0]
    rows = re.findall(r"^\| ((?:`\w+/?` ?)+)\|", text, flags=re.MULTILINE)
    return {name: line for line, row in enumerate(rows) for name in re.findall(r"`(\w+)/?`", row)}


def room_of(path: Path) -> str:
    """The first part of the path; `__main__` is the command line, and the package itself belongs to no room."""
    parts = path.relative_to(SOURCE).parts
    name = parts[0].removesuffix(".py")
    return "cli" if name == "__main__" else name


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(dotted name, line, whether at import) of everything that a module imports, inside functions too."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: a relative import"
                names = [f"{child.module}.{alias.name}" for alias in child.names]
                yield from ((name, child.lineno, at_import) for name in names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                yield from visit(child, False)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from visit(child, at_import and not inside)

    yield from visit(tree(path), True)


def is_under(path: Path, places: tuple[str, ...]) -> bool:
    return module_id(path).startswith(places)


def test_the_table_of_rooms_names_what_stands() -> None:
    assert list(rooms())[:4] == ["errors", "units", "codec", "layout"] and list(rooms())[-1] == "cli"
    standing = {room_of(path) for path in MODULES} - {"__init__"}
    assert standing == set(rooms()), "docs/design/architecture.md and src/pipefit name different rooms"


def test_no_room_imports_the_conformance_suites() -> None:
    users = [path for path in MODULES if any(name.startswith("pipefit.testing") for name, _, _ in imports(path))]
    assert {room_of(path) for path in users} == {"testing"}


def test_imports_go_one_way() -> None:
    order, faults = rooms(), []
    for path in MODULES:
        room = room_of(path)
        for name, line, _ in imports(path):
            parts = name.split(".")
            if parts[0] == "pipefit" and order.get("".join(parts[1:2]), -1) > order.get(room, -1):
                faults.append(f"{module_id(path)}:{line}: {room} imports {name}, which stands below it")
    assert not faults, "\n".join(faults)


@cache
def inner_levels() -> dict[str, list[set[str]]]:
    """Return the levels of the rooms inside a room, by docs/design/architecture.md."""
    text = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## Rooms of rooms")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)/` \| (.+) \|$", section, flags=re.MULTILINE)
    return {room: [set(re.findall(r"`(\w+)`", level)) for level in levels.split("·")] for room, levels in rows}


def test_imports_inside_a_room_go_one_way() -> None:
    faults = []
    assert len(inner_levels()) == 6
    for room, levels in inner_levels().items():
        level_of = {name: number for number, names in enumerate(levels) for name in names}
        files = [path for path in MODULES if room_of(path) == room and path != SOURCE / room / "__init__.py"]
        standing = {path.relative_to(SOURCE / room).parts[0].removesuffix(".py") for path in files}
        assert standing == set(level_of), f"docs/design/architecture.md and src/pipefit/{room} name different rooms"
        for path in files:
            inner = path.relative_to(SOURCE / room).parts[0].removesuffix(".py")
            for name, line, _ in imports(path):
                parts = name.split(".")
                target = parts[2] if parts[:2] == ["pipefit", room] and len(parts) > 2 else inner
                if target in standing - {inner} and level_of[target] >= level_of[inner]:
                    faults.append(f"{module_id(path)}:{line}: {inner} imports {name}")
    assert not faults, "\n".join(faults)


def test_no_module_imports_itself_around_a_corner() -> None:
    """Inside functions and for types, too. A package's own `__init__` is left out: it names what it holds."""
    ids = {".".join(("pipefit", *path.relative_to(SOURCE).with_suffix("").parts)): path for path in MODULES}
    known: dict[str, set[str]] = {}
    for name, path in ids.items():
        targets = [target.split(".") for target, _, _ in imports(path)]
        known[name] = {".".join(parts[:k]) for parts in targets for k in range(1, len(parts) + 1)} & ids.keys()
    circles = []

    def follow(name: str, way: tuple[str, ...]) -> None:
        if name in way:
            circles.append(" -> ".join((*way[way.index(name) :], name)))
        elif name not in done:
            for target in sorted(known[name]):
                follow(target, (*way, name))
            done.add(name)

    done: set[str] = set()
    for name in ids:
        follow(name, ())
    assert not circles, "\n".join(circles)
    assert sum(map(len, known.values())) > 300, "this test must see the imports"


def test_no_folder_has_a_circle_of_its_rooms_and_files() -> None:
    """At every depth: two rooms or files of a folder do not need each other, also around further ones."""
    folders = {parent for path in MODULES for parent in path.parents if parent.is_relative_to(SOURCE)}
    circles = set()
    for folder in folders:
        needs: dict[str, set[str]] = {}
        depth = len(folder.relative_to(SOURCE.parent).parts)
        for path in MODULES:
            if not path.is_relative_to(folder) or (path.parent == folder and path.name == "__init__.py"):
                continue
            unit = path.relative_to(folder).parts[0].removesuffix(".py")
            targets = [name.split(".") for name, _, _ in imports(path)]
            here = [*folder.relative_to(SOURCE.parent).parts]
            needs.setdefault(unit, set()).update(
                parts[depth] for parts in targets if parts[:depth] == here and len(parts) > depth
            )
        needs = {unit: reached & needs.keys() - {unit} for unit, reached in needs.items()}
        for _ in needs:  # the transitive closure, a step further each time
            needs = {unit: reached.union(*(needs[name] for name in reached)) for unit, reached in needs.items()}
        circle = frozenset(unit for unit, reached in needs.items() if unit in reached)
        if circle:
            circles.add((folder.relative_to(SOURCE).as_posix().removeprefix("."), circle))
    assert not circles


def test_torch_is_imported_where_it_may_be() -> None:
    faults = []
    for path in MODULES:
        for name, line, at_import in imports(path):
            allowed = TORCH_AT_IMPORT if at_import else TORCH_AT_IMPORT + TORCH_INSIDE_FUNCTIONS
            if name.split(".")[0] in ("torch", "transformers") and not is_under(path, allowed):
                faults.append(f"{module_id(path)}:{line} imports {name}")
    assert not faults, "\n".join(faults)


def test_the_check_sees_imports_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "import torch.nn\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import scipy\n"
        "class C:\n    from pipefit import plan\n    def f(self):\n        from pipefit.run.stage.program import S\n"
    )
    assert [found for found in imports(path) if found[0] != "typing.TYPE_CHECKING"] == [
        ("torch.nn", 1, True),
        ("scipy", 4, False),
        ("pipefit.plan", 6, True),
        ("pipefit.run.stage.program.S", 8, False),
    ]


def test_every_module_says_what_it_is_for() -> None:
    silent = [module_id(path) for path in MODULES if len(ast.get_docstring(tree(path)) or "") < 20]
    assert not silent, f"without a docstring: {silent}"


def test_the_core_imports_quickly_and_without_heavy_libraries(tmp_path: Path) -> None:
    """Best of several, in processes of their own, in seconds of processor time: other processes do not count, but for
    what they do to caches, so on a busy machine a quiet moment is waited for. The first one compiles all files, whether
    or not this machine lets Python keep what it compiled."""
    plain = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    core = [
        "pipefit." + module_id(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in MODULES
        if rooms().get(room_of(path), 99) < rooms()["run"] and not is_under(path, (*TORCH_AT_IMPORT, "lab/"))
    ]
    program = (
        "import importlib, json, sys, time\n"
        "a = time.process_time()\nimport numpy\nb = time.process_time()\n"
        f"for name in {core!r}: importlib.import_module(name)\n"
        "c = time.process_time()\nprint(json.dumps([b - a, c - b, sorted(sys.modules)]))\n"
    )
    times: list[tuple[float, float]] = []
    while len(times) < TRIES and not quick(times):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT, env=plain
        )
        numpy_s, core_s, loaded = json.loads(done.stdout)
        heavy = {"torch", "scipy", "numba", "pyarrow", "tokenizers", "transformers", "ortools", "ray"} & set(loaded)
        assert not heavy, f"importing the core imported {sorted(heavy)}"
        times.append((core_s, numpy_s))
    assert quick(times), ", ".join(f"{core_s:.2f} s, numpy itself {numpy_s:.2f} s" for core_s, numpy_s in times)


def quick(times: list[tuple[float, float]]) -> bool:
    """Whether any (seconds of the core, of numpy) is within the limit."""
    return any(core_s < IMPORT_LIMIT_S or core_s < NUMPYS * numpy_s for core_s, numpy_s in times)


def python_files() -> list[Path]:
    folders = [ROOT / name for name in ("src", "tests", "benchmarks", "examples")]
    return sorted(path for folder in folders if folder.is_dir() for path in folder.rglob("*.py"))


def test_files_are_short_enough_to_read() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_bytes().splitlines()) for path in python_files()}
    long = {name: length for name, length in lengths.items() if length > LINE_LIMIT}
    assert long.keys() == LONG_FILES.keys(), f"above {LINE_LIMIT} lines, or listed without need: {long}"
    assert all(len(reason) > 20 for reason in LONG_FILES.values())


def text_files() -> Iterator[tuple[Path, str]]:
    """What a clone would hold: every text file but those that git ignores by name."""
    skipped = {".git", ".venv", "build", "dist", "runs", "out", "__pycache__", "node_modules", ".hypothesis"}
    for parent, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in skipped and not name.endswith(("_cache", ".egg-info"))]
        for name in files:
            path = Path(parent, name)
            if path != Path(__file__).resolve() and path.stat().st_size < 10_000_000:
                try:
                    yield path, path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    continue


def test_no_file_names_the_machine_it_was_written_on() -> None:
    words = [r"(?<![\w.])/(?:root|home/\w+|Users/\w+|work)/"]
    if len(ROOT.parts) > 2:
        words.append(rf"(?<![\w.]){re.escape(str(ROOT))}\b")
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX"):
        for address in os.environ.get(variable, "").split():
            host = urlsplit(address).hostname
            if host and not host.endswith(("pypi.org", "pytorch.org")):
                words.append(re.escape(host))
    pattern = re.compile("|".join(words))
    for path, text in text_files():
        found = pattern.search(text)
        assert found is None, f"{path}: {found[0] if found else ''}"


def test_nothing_is_left_to_do_in_the_source() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    for path in MODULES:
        found = pattern.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: {found[0] if found else ''}"


STATE_WORDS = {*STATES}
COMMON_WORDS = {"none", "optimizer"}
"""The values of `sharded_state`, and the ones that other fields have too."""


def compared_words(node: ast.AST) -> tuple[list[ast.expr], set[object]]:
    """Return the sides of a comparison, a `match` or a test of a prefix, and the literals among them."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
    elif isinstance(node, ast.Match):
        patterns = [part for case in node.cases for part in ast.walk(case.pattern)]
        sides = [node.subject, *(part.value for part in patterns if isinstance(part, ast.MatchValue))]
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("startswith", "endswith")
    ):
        sides = [node.func.value, *node.args]
    else:
        return [], set()
    words: set[object] = set()
    for side in sides:
        parts = side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else [side]
        words |= {part.value for part in parts if isinstance(part, ast.Constant)}
    return sides, words


def state_comparisons(module: ast.Module) -> Iterator[int]:
    """Yield the lines that compare a sharded state with a literal."""
    for node in ast.walk(module):
        sides, words = compared_words(node)
        named = any(re.search(r"(state|sharded)\b", ast.unparse(side)) for side in sides)
        if words and words <= STATE_WORDS and (named or words - COMMON_WORDS):
            yield node.lineno  # type: ignore[attr-defined]


def test_only_one_file_compares_sharded_states() -> None:
    """What a state shards is asked of the predicates in `optimizers/sharded_state.py`."""
    lines = {module_id(path): list(state_comparisons(tree(path))) for path in MODULES}
    assert len(lines.pop("optimizers/sharded_state.py")) >= 3, "this test must see the comparisons"
    assert not any(lines.values()), {name: numbers for name, numbers in lines.items() if numbers}


def test_the_check_sees_every_kind_of_comparison() -> None:
    text = (
        'a = stage.sharded_state == "none"\nb = held(x) in ("gradients", "parameters")\nc = recompute == "none"\n'
        'd = "optimizer" != share.state\nmatch state:\n    case "parameters": pass\n'
    )
    assert sorted(state_comparisons(ast.parse(text))) == [1, 2, 4, 5]


OWN_KINDS = ("model/ops/", "shard/rules/", "run/ops/")
"""The three files of an operator, in which a kind may be named."""

NAMED_KINDS = {
    "cost/compute/operator_times.py": 1,
    "cost/compute/shard_exchanges.py": 4,
    "model/adapters/adapt.py": 1,
    "model/analysis/saved.py": 6,
    "model/capture/counted.py": 2,
    "model/capture/cut_layers.py": 2,
    "model/capture/layers.py": 2,
    "model/capture/lift.py": 11,
    "model/capture/lift_rotary.py": 10,
    "model/capture/settle.py": 3,
    "model/capture/whole.py": 1,
    "shard/apart.py": 3,
}
"""Files that compare the kind of an operator with names, and the number of their comparisons. It may only go down: a
fact about a kind is a field of `OperatorKind`."""


def kind_comparisons(module: ast.Module) -> Iterator[int]:
    """Yield the lines that compare an attribute `kind` with names of operator kinds, or with the begin of one."""
    from pipefit.model.ops import KINDS

    for node in ast.walk(module):
        sides, words = compared_words(node)
        named = any(isinstance(side, ast.Attribute) and side.attr == "kind" for side in sides)
        prefix = isinstance(node, ast.Call) and any(name.startswith(str(word)) for word in words for name in KINDS)
        if named and (prefix or words & {*KINDS}):
            yield node.lineno  # type: ignore[attr-defined]


def test_no_more_files_name_operator_kinds() -> None:
    lines = {module_id(path): list(kind_comparisons(tree(path))) for path in MODULES if not is_under(path, OWN_KINDS)}
    standing = {name: len(numbers) for name, numbers in lines.items() if numbers}
    assert standing == NAMED_KINDS, f"more: use a field of OperatorKind; fewer: lower NAMED_KINDS here. {standing}"


def test_the_check_sees_every_kind_by_its_name() -> None:
    text = (
        'a = operator.kind == "linear"\nb = x.kind not in ("cast", "reshape")\nc = action.kind == "F"\n'
        'd = op.kind.startswith("conv")\nmatch op.kind:\n    case "add" | "sub": pass\n'
        'e = action.kind.startswith("SEND")\nf = style == "linear"\n'
    )
    assert sorted(kind_comparisons(ast.parse(text))) == [1, 2, 4, 5]


def commands() -> list[str]:
    names = [entry.name for entry in pkgutil.iter_modules([str(SOURCE / "cli")])]
    return sorted(name for name in names if hasattr(importlib.import_module(f"pipefit.cli.{name}"), "command"))


def test_every_command_answers_help() -> None:
    from typer.testing import CliRunner

    from pipefit.cli import build_app

    app, runner = build_app(), CliRunner()
    overview = runner.invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert overview.exit_code == 0
    assert commands(), "there is not one command"
    for name in commands():
        word = name.replace("_", "-")
        assert word in overview.output
        answer = runner.invoke(app, [word, "--help"], env={"COLUMNS": "200"})
        assert answer.exit_code == 0 and "Usage" in answer.output, f"{word} --help: {answer.output}"
        assert len(answer.output.strip().splitlines()) > 5, f"{word} --help says next to nothing"


def test_the_command_line_starts_without_torch() -> None:
    program = (
        "import sys, runpy\nsys.argv = ['pipefit', '--help']\n"
        "try: runpy.run_module('pipefit', run_name='__main__')\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and "Usage" in done.stdout, done.stderr
