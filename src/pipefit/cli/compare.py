"""`pipefit compare`: several plans or runs side by side, predicted and measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    paths: Annotated[list[Path], typer.Argument(metavar="PLAN|RUN_DIR ...", help="Plans, or folders of runs.")],
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Compare plans and runs of the same model and batch: time, throughput, idle share and memory."""
    from pipefit.cli._plans import print_tables
    from pipefit.show.compare import as_data, compare_entries, compare_table
    from pipefit.show.subject import open_plan_or_run

    entries = compare_entries([(path, *open_plan_or_run(path)) for path in paths])
    if as_json:
        print(json.dumps([as_data(entry) for entry in entries], indent=1))
        return
    print_tables([compare_table(entries)])
    if any(entry.has_run for entry in entries):
        print("\nerror: predicted less measured, as a part of the measured; shares in points")
