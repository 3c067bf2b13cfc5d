"""Tables of docs/results: the committed pages hold what the committed result files give."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.tables import MARKED, PAGES, TABLES, filled_page


def test_the_pages_hold_what_the_result_files_give() -> None:
    marked = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        marked += [mark[2] for mark in MARKED.finditer(text)]
        assert filled_page(text) == text, f"{page.name} differs from its result files: python -m benchmarks.tables"
    assert sorted(marked) == sorted(TABLES), "every table has one place in the pages"


def test_a_changed_figure_is_seen_and_put_right() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    assert "| 4 | 1.67 | 3.08 | 1.85 |" in text
    changed = text.replace("| 4 | 1.67 | 3.08 | 1.85 |", "| 4 | 1.57 | 3.08 | 1.95 |")
    assert filled_page(changed) == text


def test_a_check_names_the_page_that_differs_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "results.md"
    text = PAGES[0].read_text(encoding="utf-8")
    page.write_text(text.replace("| 4 | 1.67 |", "| 4 | 1.57 |"), encoding="utf-8")
    monkeypatch.setattr(tables, "PAGES", (page,))
    monkeypatch.setattr("sys.argv", ["tables", "--check"])
    assert tables.main() == 1 and "results.md differs from its result files" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") != text
    monkeypatch.setattr("sys.argv", ["tables"])
    assert tables.main() == 0 and page.read_text(encoding="utf-8") == text
