"""Write docs/reference/command-line.md from the parser: `python -m pipefit.cli.reference > PAGE`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from pipefit.cli import build_app

HEAD = """# Command line

`python -m pipefit.cli.reference` writes this page from the parser. `pipefit COMMAND --help` prints the same texts. An
error of the user is one message with exit code 2.

| environment variable | meaning |
| --- | --- |
| `PIPEFIT_CACHE` | The folder of [captured models](models.md#cache); `off`: no cache. Default: `$XDG_CACHE_HOME/pipefit`, or `~/.cache/pipefit`. |
| `PIPEFIT_PLUGINS` | `off`: load no [plug-ins](../how-to/write-a-plugin-package.md). |
| `PIPEFIT_HOST`, `PIPEFIT_DEVICE_KIND` | The host's name and kind of device in a [profile](../design/profiling.md). |
"""  # noqa: E501


def reference_page() -> str:
    """Return the page: a section with a table of options for every command."""
    commands = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    return "\n".join([HEAD, *(line for name in sorted(commands) for line in _section_lines(name, commands[name]))])


def _section_lines(name: str, command: Any) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    yield f"## pipefit {name}\n"
    yield f"{_one_line(command.help)}\n"
    yield f"```\npipefit {' '.join([name, *map(_argument_name, arguments)])}{' [OPTIONS]' if options else ''}\n```\n"
    yield "| option | default | meaning |"
    yield "| --- | --- | --- |"
    for parameter in (*arguments, *options):
        is_argument = parameter.param_type_name == "argument"
        names = [_argument_name(parameter)] if is_argument else [*parameter.opts, *parameter.secondary_opts]
        cells = (", ".join(f"`{word}`" for word in names), _default_text(parameter), _one_line(parameter.help))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _argument_name(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _default_text(parameter: Any) -> str:
    """Return the default of a parameter as a table cell; nothing for a flag or an absent value."""
    if parameter.required:
        return "required"
    default = parameter.default
    if default is None or default is False or default in ("", []):
        return ""
    words = default if isinstance(default, (list, tuple)) else [default]
    return f"`{' '.join(map(str, words))}`"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    print(reference_page(), end="")
