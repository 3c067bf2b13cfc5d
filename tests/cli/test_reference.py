"""The page of the command line against the parser."""

from __future__ import annotations

from pathlib import Path

import typer

from pipefit.cli import build_app
from pipefit.cli.reference import reference_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "command-line.md"


def test_the_page_is_what_the_command_writes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == reference_page(), "python -m pipefit.cli.reference > docs/reference/command-line.md"


def test_the_page_has_every_option_of_every_command() -> None:
    text = PAGE.read_text(encoding="utf-8")
    commands = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    assert len(commands) > 10
    for name, command in commands.items():
        section = text.split(f"## pipefit {name}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert all(f"`{word}`" in section for word in parameter.opts), f"{name}: {parameter.opts}"
