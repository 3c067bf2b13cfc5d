"""Choice of tests: by room, by changed file, in a small tree and in this project."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.support.command import ROOT, Request, choose_files, main, read_words
from tests.support.graph import Graph
from tests.support.selection import (
    UnknownRoomError,
    changed_files,
    choose_changed,
    choose_rooms,
    files_of_room,
    list_rooms,
    mirrored_folder,
)

TREE = {
    "src/pipefit/__init__.py": "",
    "src/pipefit/errors.py": "class Wrong(ValueError): pass",
    "src/pipefit/plan/__init__.py": "from pipefit.plan.search import search\nfrom pipefit.plan.rows import rows",
    "src/pipefit/plan/search.py": "from pipefit.errors import Wrong\ndef search(): ...",
    "src/pipefit/plan/rows.py": "rows = 3",
    "src/pipefit/plan/cutting/__init__.py": "",
    "src/pipefit/plan/cutting/cut.py": "def cut():\n    from pipefit.plan import search",
    "src/pipefit/kinds/__init__.py": "import pkgutil\nKINDS = [*pkgutil.iter_modules(__path__)]",
    "src/pipefit/kinds/one_kind.py": "",
    "src/pipefit/show/page.py": "FILES = resources.files('pipefit.show').joinpath('assets', name)",
    "src/pipefit/show/assets/page.css": "",
    "src/pipefit/cli/__init__.py": "import pkgutil\nlist(pkgutil.iter_modules(__path__))",
    "src/pipefit/cli/plan.py": "def command():\n    from pipefit.plan.search import search",
    "src/pipefit/cli/report.py": "def command():\n    import pipefit.show.page",
    "benchmarks/planning/__init__.py": "",
    "benchmarks/planning/speed.py": "from pipefit.kinds import KINDS",
    "bin/tour": "run pipefit report run/",
    "docs/plans.md": "",
    "tests/conftest.py": "import pytest\n@pytest.fixture\ndef pipefit():\n    from pipefit.cli import main\n"
    "@pytest.fixture\ndef page():\n    import pipefit.show.page\n",
    "tests/test_errors.py": "from pipefit.errors import Wrong",
    "tests/plan/toys.py": "from pipefit.plan import search",
    "tests/plan/test_toys.py": "from toys import search",
    "tests/plan/test_rows.py": "from pipefit.plan import rows",
    "tests/plan/test_cut.py": "from pipefit.plan.cutting.cut import cut",
    "tests/plan/test_command.py": "def test_it(pipefit):\n    pipefit('plan', '--help')",
    "tests/plan/test_words.py": "def test_it(pipefit):\n    words = ['plan', '-o']\n    pipefit(*words)",
    "tests/plan/test_any_command.py": "def test_it(pipefit):\n    words = make()\n    pipefit(*words)",
    "tests/plan/test_process.py": "COMMAND = [python, '-m', 'pipefit', 'report']",
    "tests/plan/test_fixture.py": "def test_it(page): ...",
    "tests/plan/test_speed.py": "COMMAND = [python, '-m', 'benchmarks.planning.speed']",
    "tests/plan/test_tour.py": "run(Path(__file__).parents[2] / 'bin' / 'tour')",
    "tests/plan/test_page.py": "DOCS = Path(__file__).parents[2] / 'docs'\nDOCS.glob('*.md')",
    "tests/plan/test_module.py": "load(f'pipefit.kinds.{name}')",
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    root = tmp_path_factory.mktemp("tree")
    for name, text in TREE.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Graph(root)


@pytest.fixture(scope="module")
def project() -> Graph:
    return Graph(ROOT)


def names(graph: Graph, *rooms: str) -> set[str]:
    return {Path(file).stem.removeprefix("test_") for file in choose_rooms(graph, rooms).files}


@pytest.mark.parametrize(
    ("room", "chosen"),
    [
        ("errors", "errors toys cut command words any_command"),
        ("plan/cutting", "cut"),
        ("src/pipefit/plan/rows.py", "rows"),
        ("kinds/one_kind", "speed module"),
        ("show", "any_command process fixture tour"),
        ("src/pipefit/show/assets/page.css", "any_command process fixture tour"),
        ("benchmarks/planning/speed.py", "speed"),
        ("benchmarks/planning", "speed"),
        ("docs/plans.md", "page"),
        ("docs", "page"),
        ("bin/tour", "tour"),
        ("tests/plan/toys.py", "toys"),
        ("tests/plan/test_rows.py", "rows"),
        ("cli/report", "any_command process tour"),
    ],
)
def test_a_room_chooses_what_depends_on_it(graph: Graph, room: str, chosen: str) -> None:
    assert names(graph, room) == set(chosen.split())


def test_tests_stand_in_the_folder_that_mirrors_the_source() -> None:
    files = ["src/pipefit/plan/cutting/cut.py", "benchmarks/spmd/bound.py", "docs/plans.md"]
    assert set(mirrored_folder(files)) == {"tests/plan/cutting/", "tests/benchmarks/spmd/"}


def test_a_package_file_reaches_all_that_import_below_it(graph: Graph) -> None:
    """It runs at their import, though they do not need all that it names."""
    assert names(graph, "src/pipefit/plan/__init__.py") == {"toys", "rows", "cut", "command", "words", "any_command"}


def test_the_own_tests_of_a_room_come_first(graph: Graph) -> None:
    choice = choose_rooms(graph, ["errors"])
    assert choice.files[0] == "tests/test_errors.py" and choice.own == 1
    choice = choose_rooms(graph, ["plan/cutting", "errors"])
    assert set(choice.files[: choice.own]) == {"tests/plan/test_cut.py", "tests/test_errors.py"}


def test_rooms_are_listed_and_found(graph: Graph) -> None:
    assert list_rooms(graph) == ["cli", "errors", "kinds", "plan", "plan/cutting", "show"]
    assert files_of_room(graph, "./src/pipefit/plan/") == files_of_room(graph, "plan")
    with pytest.raises(UnknownRoomError, match=r"seen: plans\n  allowed: .*plan/cutting"):
        files_of_room(graph, "plans")


def test_an_unknown_room_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no/such/room"]) == 2
    assert "seen: no/such/room" in capsys.readouterr().err


def test_changed_files_choose_what_depends_on_them(graph: Graph) -> None:
    assert choose_changed(graph, []).files == ()
    assert "nothing changed" in choose_changed(graph, []).reason
    assert choose_changed(graph, ["README.md"]).files == ()
    assert choose_changed(graph, ["src/pipefit/plan/rows.py"]).files == ("tests/plan/test_rows.py",)
    for name in ("pyproject.toml", "constraints.txt", "tests/conftest.py"):
        assert list(choose_changed(graph, ["src/pipefit/plan/rows.py", name]).files) == graph.tests
    gone = choose_changed(graph, ["src/pipefit/plan/cutting/gone.py"])
    assert gone.files == ("tests/plan/test_cut.py",), "a module that is gone counts as a change of those beside it"


def test_git_says_what_changed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", ".")
    git("commit", "-qm", "Begin")
    assert changed_files(tmp_path) == []
    (tmp_path / "a").write_text("changed")
    (tmp_path / "b").unlink()
    (tmp_path / "new").write_text("new")
    (tmp_path / "ignored").write_text("ignored")
    git("add", "a")
    assert changed_files(tmp_path) == ["a", "b", "new"]


def test_words_are_read() -> None:
    assert read_words([]) == Request()
    assert read_words(["plan", "show", "-x", "--quick"]) == Request(rooms=["plan", "show"], further=["-x", "--quick"])
    request = read_words(["--every", "--record-durations", "-rs", "--durations=25"])
    assert (request.tier, request.record, request.further) == ("every", True, ["-rs", "--durations=25"])
    assert read_words(["--changed", "--quick"]) == Request(tier="quick", changed=True)
    assert read_words(["tests/test_units.py::test_x"]).tier == "every", "a test that is named runs, whatever its tier"


def test_help_is_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    assert all(any(word in line for line in lines) for word in ("ROOM", "--changed", "--quick", "--all", "--every"))


def test_every_mode_chooses_tests(project: Graph) -> None:
    assert choose_files(Request(), ROOT) is None and choose_files(Request(tier="all"), ROOT) is None
    quick = choose_files(Request(tier="quick"), ROOT)
    assert quick is not None and quick.files
    for room in list_rooms(project):
        choice = choose_rooms(project, [room])
        assert choice.files and choice.own, f"no test belongs to {room}"


def test_every_test_file_is_reached_by_a_room(project: Graph) -> None:
    rooms = {file for room in (*list_rooms(project), "benchmarks") for file in files_of_room(project, room)}
    lone = [test for test in project.tests if not rooms & project.distances_from(test).keys()]
    assert [test for test in lone if not test.startswith("tests/support/")] == []


def test_a_module_near_the_end_has_few_tests_and_a_common_one_has_most(project: Graph) -> None:
    """Else the graph sees too much, or too little."""
    count = len(project.tests)
    assert len(choose_rooms(project, ["errors"]).files) > 0.8 * count
    assert len(choose_rooms(project, ["show"]).files) < 0.4 * count
