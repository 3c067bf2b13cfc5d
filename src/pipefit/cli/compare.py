"""`pipefit compare`: several plans or runs side by side, predicted and measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pipefit.show.compare import Entry
    from pipefit.show.figures import Figures, Pair


def command(
    paths: Annotated[list[Path], typer.Argument(metavar="PLAN|RUN_DIR ...", help="Plans, or folders of runs.")],
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Compare plans and runs of the same model and batch: time, throughput, idle share and memory."""
    from pipefit.show.compare import as_data, compare
    from pipefit.show.subject import open_plan_or_run

    entries = compare([(path, *open_plan_or_run(path)) for path in paths])
    if as_json:
        print(json.dumps([as_data(entry) for entry in entries], indent=1))
        return
    _print(entries)


def _print(entries: tuple[Entry, ...]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from pipefit.show.sections import percent
    from pipefit.units import format_bytes, format_count, format_seconds

    columns: list[tuple[str, Callable[[Figures], Pair], Callable[[float], str]]] = [
        ("step", lambda f: f.step_s, format_seconds),
        ("tokens/s", lambda f: f.tokens_per_s, format_count),
        ("idle", lambda f: f.idle_share, percent),
        ("peak memory", lambda f: f.peak_bytes, format_bytes),
        ("of limit", lambda f: f.peak_share, percent),
    ]
    plan = entries[0].plan
    table = Table(
        title=f"{plan.model.name}, batch {plan.job.batch} x {plan.job.sequence} tokens",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("plan", overflow="fold")
    table.add_column("")
    for name, _, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for entry in entries:
        predicted = [_cell(pick(entry.figures).predicted, form) for _, pick, form in columns]
        table.add_row(f"{entry.path}\n{entry.name}", "predicted", *predicted)
        if entry.has_run:
            measured = [_cell(pick(entry.figures).measured, form) for _, pick, form in columns]
            table.add_row("", "measured", *measured)
            errors = [_error(pick(entry.figures).error) for _, pick, _ in columns]
            table.add_row("", "error", *errors, end_section=True)
    console = Console()
    console.print(table)
    if any(entry.has_run for entry in entries):
        console.print("error: (predicted - measured) / measured", highlight=False)


def _cell(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"
