"""`pipefit validate`: predict published runs, and print published value, prediction and difference."""

from __future__ import annotations

import json
from dataclasses import dataclass

import typer

from pipefit.cli._options import takes_options


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions:
    """Options of `pipefit validate`."""

    sets: tuple[str, ...] = ()
    "Only this data set; may be given several times."
    show_all: bool = False
    "Print every row, of the large sets too."
    as_json: bool = False
    "Print all rows, splits and summaries as JSON."


@takes_options(ValidateOptions, flags={"sets": ("--set",), "show_all": ("--all",)}, metavars={"sets": "NAME"})
def command(options: ValidateOptions) -> None:
    """Predict published runs: published, predicted and delta for every row, the fitted constants, and summaries.

    Exits with code 1 if a target is missed.
    """
    from pipefit.validate.report import as_data, as_text
    from pipefit.validate.sets import select_sets

    results = []
    for run in select_sets(options.sets).values():
        for result in run():
            results.append(result)
            if not options.as_json:
                print(as_text(result, options.show_all) + "\n", flush=True)
    if options.as_json:
        print(json.dumps([as_data(result) for result in results], indent=1))
    if not all(target.is_met for result in results for target in result.targets):
        raise typer.Exit(1)
