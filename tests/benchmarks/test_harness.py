"""The harness of the benchmarks: exit codes, results with provenance, results that are measured again in parts."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Outcome, TextTable, benchmark_parser, markdown_table, run_benchmark
from pipefit.errors import FormatError, PipefitError

ROOT = Path(__file__).resolve().parents[2]


def run_words(monkeypatch: pytest.MonkeyPatch, measure: Callable[[Namespace], Outcome], *words: str) -> int:
    """Run a benchmark with parts `a` and `b` as a command line would."""
    monkeypatch.setattr(sys, "argv", ["toy.py", *words])
    return run_benchmark(benchmark_parser("A toy.", quick="nothing", only=("a", "b")), measure)


def test_the_exit_code_says_whether_targets_were_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_words(monkeypatch, lambda arguments: Outcome({"rows": []})) == 0
    assert run_words(monkeypatch, lambda arguments: Outcome({"rows": []}, passed=False)) == 1


def test_an_error_of_the_user_is_printed_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def measure(arguments: Namespace) -> Outcome:
        raise PipefitError("There is no lab.", next_step="run it as root")

    path = tmp_path / "result.json"
    assert run_words(monkeypatch, measure, "--json", str(path)) == 2
    assert capsys.readouterr().err == "toy: There is no lab.\n  try: run it as root\n" and not path.exists()


def test_a_result_is_written_with_its_provenance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = ("--quick", "--only", "b", "--json", str(path))

    def measure(arguments: Namespace) -> Outcome:
        return Outcome({"part": arguments.only, "quick": arguments.quick})

    assert run_words(monkeypatch, measure, *words) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    assert list(result) == ["provenance", "part", "quick"] and (result["part"], result["quick"]) == ("b", True)
    assert result["provenance"]["command"] == "python -m toy --quick --only b --json result.json"
    assert {"commit", "date", "machine", "packages", "python"} <= result["provenance"].keys()
    assert str(tmp_path) not in path.read_text(encoding="utf-8")


def test_provenance_is_of_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The commit is of the code that ran, and the load of the machine is not the benchmark's."""
    moments: list[str] = []
    monkeypatch.setattr(harness, "provenance", lambda: {"moment": moments.append("provenance")})

    def measure(arguments: Namespace) -> Outcome:
        moments.append("measure")
        return Outcome({})

    assert run_words(monkeypatch, measure, "--json", str(tmp_path / "result.json")) == 0
    assert moments == ["provenance", "measure"]


def test_nothing_is_written_without_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert run_words(monkeypatch, lambda arguments: Outcome(), "--json", str(path)) == 0 and not path.exists()


def test_one_part_is_measured_again_beside_the_others(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert harness.earlier_result(path) == harness.earlier_result(None) == {}
    harness.write_result(path, {"lab": 0, "replay": 2, "gone": 3})
    parts = harness.keep_others({"lab": 1}, harness.earlier_result(path), ("replay", "peaks", "lab"))
    assert list(parts.items()) == [("replay", 2), ("lab", 1)]


@pytest.mark.parametrize(
    ("text", "what"), [(None, "cannot be read"), ("{", "cannot be read"), ("[]", "no JSON object")]
)
def test_a_result_that_cannot_be_read_names_its_file(tmp_path: Path, text: str | None, what: str) -> None:
    path = tmp_path / "result.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=what) as caught:
        harness.read_result(path)
    assert str(path) in str(caught.value) and "benchmarks/results" in str(caught.value)


def test_progress_is_told_at_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    report = harness.report_progress("first look")
    for done in range(41):
        report(done, 40)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11 and lines[-1] == "first look: 40 of 40 visits"


def test_rows_stand_below_their_titles(capsys: pytest.CaptureFixture[str]) -> None:
    table = TextTable(("name", "<6"), ("seconds", ">9"), indent="  ")
    table.print_head()
    table.print_row("a", f"{1.5:.2f}", note="  LATE")
    assert capsys.readouterr().out == "  name    seconds\n  a          1.50  LATE\n"
    with pytest.raises(ValueError):
        table.print_row("a")


def test_a_markdown_table_has_a_rule_for_every_column() -> None:
    assert markdown_table(["a", "b"], [["1", "2"]], "---:") == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


PROGRAMS = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "run_benchmark(" in path.read_text(encoding="utf-8") and path.name != "harness.py"
)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_explains_itself(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"python -m {program}" in done.stdout and {"--quick", "--json"} <= set(done.stdout.split())


def test_no_program_parses_or_writes_by_itself() -> None:
    """All programs use the harness: one spelling of each option, one form of a result."""
    assert len(PROGRAMS) >= 26
    for path in (ROOT / "benchmarks").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name != "harness.py":
            is_other = path.name in ("table.py", "tables.py")  # these measure nothing
            assert "ArgumentParser" not in text or is_other, path
