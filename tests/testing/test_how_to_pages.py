"""The code of the how-to page for schedule families runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from pipefit.schedule import FAMILIES, remove_family

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"


def example_of(page: str) -> str:
    text = (PAGES / page).read_text(encoding="utf-8")
    assert len(text.split()) <= 450, f"{page} is longer than a page"
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


def test_the_schedule_family_of_the_page_is_registered() -> None:
    names = list(FAMILIES)
    exec(compile(example_of("add-a-schedule-family.md"), "add-a-schedule-family.md", "exec"), {"__name__": "page"})
    try:
        assert {*FAMILIES} - {*names} == {"breadth-first"}
    finally:
        remove_family("breadth-first")
    assert list(FAMILIES) == names
