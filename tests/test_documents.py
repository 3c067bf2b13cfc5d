"""What the documents say of the code and can be read off it: commands, pages, schedules that are not searched."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from pipefit.cli import build_app
from pipefit.model.families import FAMILIES as MODEL_FAMILIES
from pipefit.model.ops import KINDS
from pipefit.schedule import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """What stands below `## title`."""
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_readme_lists_every_command() -> None:
    listed = re.findall(r"^pipefit (\w+)", section(README, "What it does"), re.MULTILINE)
    assert set(listed) == set(typer.main.get_command(build_app()).commands)  # type: ignore[attr-defined]


PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))


def test_the_readme_links_every_page() -> None:
    assert sorted(set(re.findall(r"\((docs/[\w/-]+\.md)\)", section(README, "Read on")))) == PAGES


def heading_anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor and path.suffix == ".md":
            assert anchor in heading_anchors(path.read_text(encoding="utf-8")), f"{page}: {target}"


def test_the_glossary_names_words_of_the_code() -> None:
    glossary = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    words = re.findall(r"^\| [^|]+ \| ([^|]+) \|", glossary, re.MULTILINE)
    names = {name for cell in words for name in re.findall(r"`(\w+)`", cell)}
    assert len(names) > 40
    missing = sorted(name for name in names if not re.search(rf"\b{name}\b", source))
    assert not missing, f"docs/reference/glossary.md names what the code does not have: {missing}"


def test_the_documents_name_the_families_that_are_not_searched() -> None:
    left_out = {name for name, made in FAMILIES.items() if not made.searched} - {"fit"}
    first = section(README, "What it does not do yet").split("\n- ")[1]
    assert set(re.findall(r"`([\w-]+)`", first)) & FAMILIES.keys() == left_out
    page = (ROOT / "docs/reference/schedules.md").read_text(encoding="utf-8")
    named = page.split("With `searched = False`")[1].split("\n\n")[0].split("`fit`")[0]
    assert set(re.findall(r"`([\w-]+)`", named)) & FAMILIES.keys() == left_out


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("schedules.md", [*FAMILIES]),
        ("operators.md", [*KINDS]),
        ("models.md", [name for family in MODEL_FAMILIES.values() for name in family.model_types]),
    ],
)
def test_a_page_of_the_reference_has_every_name(page: str, names: list[str]) -> None:
    text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    assert not [name for name in names if f"`{name}`" not in text], page


def cells(line: str) -> int:
    """Cells of a row of a table; a `\\|` within one does not end it."""
    return len(re.sub(r"\\\|", "", line).strip("|").split("|"))


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_every_row_of_a_table_has_the_cells_of_its_head(page: str) -> None:
    lines = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S).splitlines()
    for above, line in pairwise(lines):
        if line.startswith("|") and above.startswith("|"):
            assert cells(line) == cells(above), f"{page}: {above}\n{line}"


def pipefit_lines(text: str) -> list[list[str]]:
    """Return the arguments of each `pipefit` or `-m pipefit` command in the code blocks of a page."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = [re.search(r"(?:^|-m )pipefit (.+)", line.strip()) for line in lines]
    return [shlex.split(command[1], comments=True) for command in commands if command]


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/tutorial/")])
def test_commands_of_a_tutorial_parse(page: str) -> None:
    commands = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    lines = pipefit_lines((ROOT / page).read_text(encoding="utf-8"))
    assert {"plan", "train", "report"} <= {name for name, *_ in lines}
    for name, *arguments in lines:
        commands[name].make_context(name, arguments)
