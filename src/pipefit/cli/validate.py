"""`pipefit validate`: predict published runs, and print published value, prediction and difference."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def command(
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME", help="Only this data set; may be given several times.")
    ] = None,
    show_all: bool = typer.Option(False, "--all", help="Print every row, of the large sets too."),
    as_json: bool = typer.Option(False, "--json", help="Print all rows, splits and summaries as JSON."),
) -> None:
    """Predict published runs: published, predicted and delta for every row, the fitted constants, and summaries.

    Exits with code 1 if a target is missed.
    """
    from pipefit.validate.report import as_data, as_text
    from pipefit.validate.sets import select_sets

    results = []
    for run in select_sets(sets or []).values():
        for result in run():
            results.append(result)
            if not as_json:
                print(as_text(result, show_all) + "\n", flush=True)
    if as_json:
        print(json.dumps([as_data(result) for result in results], indent=1))
    if not all(target.is_met for result in results for target in result.targets):
        raise typer.Exit(1)
