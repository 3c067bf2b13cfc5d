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
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from pipefit import __version__
from pipefit.errors import PipefitError
from pipefit.extras import missing_package
from pipefit.plugins import load_plugins


def build_app() -> typer.Typer:
    """Build the command line from the modules of this package."""
    app = typer.Typer(
        help="Fit a training job to the cluster you really have: plan, train, and compare.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root_options)
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda entry: entry.name):
        command = importlib.import_module(f"{__name__}.{module.name}")
        if hasattr(command, "command"):
            app.command(name=module.name.replace("_", "-"))(command.command)
    return app


def main() -> None:
    """Run the `pipefit` command."""
    code: int | str | None = 0
    try:
        with _short_warnings():
            build_app()()
    except PipefitError as error:
        print(f"pipefit: {error.full_text()}", file=sys.stderr)
        code = 2
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            raise
        print(f"pipefit: {missing.full_text()}", file=sys.stderr)
        code = 2
    except SystemExit as ended:
        code = ended.code
    if "RANK" in os.environ and "torch" in sys.modules and not isinstance(code, str):
        from pipefit.run.session.process_exit import exit_process

        exit_process(code or 0)
    sys.exit(code)


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Print warnings of pipefit without the line of code that raised them; those of libraries as Python does."""
    usual, package = warnings.formatwarning, str(Path(__file__).parents[1])

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if filename.startswith(package):
            return f"pipefit: warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = usual


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
