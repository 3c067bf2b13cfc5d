"""The command line, one file per command. A file `cli/NAME.py` that defines `command` becomes `pipefit NAME`.

The options of a command are the fields of frozen dataclasses (`_options.py`). Command modules import configurations,
typer and the standard library at the top, and other packages inside the function, so that `pipefit --help` answers at
once. Plug-ins are loaded before a command reads its options. A PipefitError is printed without a traceback and exits
with code 2.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import typer

from pipefit import __version__
from pipefit.errors import PipefitError
from pipefit.plugins import load_plugins


def build_app(first_word: str = "") -> typer.Typer:
    """Build the command line from the modules of this package: all commands, or only the one that `first_word` names.

    Importing the modules of all commands takes 0.1 s of processor time.
    """
    app = typer.Typer(
        help="Fit a training job to the cluster you really have: plan, train, and compare.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root_options)
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    for name in [name for name in names if _command_word(name) == first_word] or names:
        command = importlib.import_module(f"{__name__}.{name}")
        if hasattr(command, "command"):
            app.command(name=_command_word(name))(command.command)
    return app


def main() -> None:
    """Run the `pipefit` command."""
    code: int | str | None = 0
    try:
        build_app(sys.argv[1] if len(sys.argv) > 1 else "")()
    except PipefitError as error:
        print(f"pipefit: {error.full_text()}", file=sys.stderr)
        code = 2
    except SystemExit as ended:
        code = ended.code
    if "RANK" in os.environ and "torch" in sys.modules and not isinstance(code, str):
        from pipefit.run.session.process_exit import exit_process

        exit_process(code or 0)
    sys.exit(code)


def _command_word(module: str) -> str:
    return module.replace("_", "-")


def _print_version(value: bool) -> None:
    if value:
        print(f"pipefit {__version__}")
        raise typer.Exit


def _root_options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    """Fit a training job to the cluster you really have."""
    load_plugins()
