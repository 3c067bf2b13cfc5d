"""`pipefit compare`: several plans or runs side by side, predicted and measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pipefit.cli._options import takes_options


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of `pipefit compare`."""

    paths: tuple[Path, ...]
    "Plans, or folders of runs."
    as_json: bool = False
    "Print the figures as JSON."


@takes_options(CompareOptions, arguments=("paths",), metavars={"paths": "PLAN|RUN_DIR ..."})
def command(options: CompareOptions) -> None:
    """Compare plans and runs of the same model and batch: time, throughput, idle share and memory."""
    from pipefit.cli._plans import print_tables
    from pipefit.show.compare import as_data, compare_entries, compare_table
    from pipefit.show.subject import open_plan_or_run

    entries = compare_entries([(path, *open_plan_or_run(path)) for path in options.paths])
    if options.as_json:
        print(json.dumps([as_data(entry) for entry in entries], indent=1))
        return
    print_tables([compare_table(entries)])
    if any(entry.has_run for entry in entries):
        print("\nerror: predicted less measured, as a part of the measured; shares in points")
