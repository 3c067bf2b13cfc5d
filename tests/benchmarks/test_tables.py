"""Tables of docs/results: the committed pages hold what the committed result files give."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_the_pages_hold_what_the_result_files_give() -> None:
    from tables import MARKED, PAGES, TABLES, filled_page

    marked = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        marked += [mark[2] for mark in MARKED.finditer(text)]
        assert filled_page(text) == text, f"{page.name} differs from its result files: python -m benchmarks.tables"
    assert sorted(marked) == sorted(TABLES), "every table has one place in the pages"


def test_a_changed_figure_is_seen_and_put_right() -> None:
    from tables import PAGES, filled_page

    text = PAGES[0].read_text(encoding="utf-8")
    assert "| 4 | 1.67 | 3.08 | 1.85 |" in text
    changed = text.replace("| 4 | 1.67 | 3.08 | 1.85 |", "| 4 | 1.57 | 3.08 | 1.95 |")
    assert filled_page(changed) == text
