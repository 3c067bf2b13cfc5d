"""`pipefit explain`: show the decisions and the prediction of a plan, and why the alternatives lost."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from pipefit.cli._options import takes_options


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """Options of `pipefit explain`."""

    path: Path
    "A plan file."
    as_json: bool = False
    "Print the tables as JSON."


@takes_options(ExplainOptions, arguments=("path",), metavars={"path": "PLAN"})
def command(options: ExplainOptions) -> None:
    """Explain PLAN: decisions, stages, memory, lower bound, bottleneck, alternatives."""
    from pipefit.cli._plans import print_tables
    from pipefit.plan.check.rules import load_plan
    from pipefit.plan.explain.text import forecast_lines, plan_headline, plan_tables

    plan = load_plan(options.path)
    notes = list(plan.prediction.assumptions) if plan.prediction else []
    if options.as_json:
        facts = {
            "headline": plan_headline(plan),
            "forecast": forecast_lines(plan),
            "tables": {
                table.title: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
                for table in plan_tables(plan)
            },
            "figures come from": notes,
        }
        sys.stdout.write(json.dumps(facts, indent=1) + "\n")
        return
    print(plan_headline(plan))
    for line in forecast_lines(plan):
        print(line)
    print_tables(plan_tables(plan))
    if notes:
        print("\nfigures come from:")
        for note in notes:
            print(f"  - {note}")
