"""`pipefit simulate`: simulate a plan, draw it, and write its timeline as a trace."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from pipefit.cli._options import takes_options


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of `pipefit simulate`."""

    path: Path
    "A plan file."
    trace: Path | None = None
    "Write the timeline for Perfetto or chrome://tracing."
    model: str | None = None
    "The model, if it is not found under its name in the plan."
    cluster: str | None = None
    "The cluster, if it is not found under its name in the plan."
    local: int | None = None
    "The cluster: this many processes on this machine's CPU."
    as_json: bool = False
    "Print the simulated figures as JSON."


@takes_options(SimulateOptions, arguments=("path",), metavars={"path": "PLAN"})
def command(options: SimulateOptions) -> None:
    """Simulate one step of PLAN: a grid of its lanes in time, and where time and memory go."""
    from pipefit.cli._plans import open_subject, print_tables
    from pipefit.codec import to_data
    from pipefit.plan.assemble.predict import add_prediction, critical_path_shares, simulate_plan
    from pipefit.plan.check.rules import load_plan
    from pipefit.plan.explain.text import forecast_lines, memory_table, plan_headline, stage_table
    from pipefit.schedule.text.grid import draw_grid

    plan = load_plan(options.path)
    opened_model, opened_cluster = open_subject(plan, options.model, options.cluster, options.local)
    simulation = simulate_plan(plan, opened_model, opened_cluster)
    bound_s = plan.prediction.lower_bound_s if plan.prediction else 0.0
    plan = add_prediction(plan, opened_model, simulation, bound_s)
    timeline = simulation.timeline
    if options.trace is not None:
        from pipefit.show.perfetto import write_timeline

        write_timeline(options.trace, timeline)
    if options.as_json:
        facts = {
            "prediction": to_data(plan.prediction),
            "bubble": timeline.bubble_share,
            "critical_path_s": dict(critical_path_shares(timeline, plan.stages)),
            "exposed_transfer_s": timeline.exposed_transfer_s.tolist(),
            "fits": simulation.fits_in_memory,
        }
        sys.stdout.write(json.dumps(facts, indent=1) + "\n")
        return
    print(plan_headline(plan))
    for line in forecast_lines(plan):
        print(line)
    print(f"bubble {timeline.bubble_share:.1%}\n")
    if sys.stdout.isatty():
        from rich.console import Console

        Console(soft_wrap=True).print(draw_grid(timeline.schedule, simulation.costs, colour=True), highlight=False)
    else:
        print(draw_grid(timeline.schedule, simulation.costs))
    print_tables([stage_table(plan), memory_table(plan)])
    if options.trace is not None:
        print(f"\ntrace written to {options.trace}: open it at https://ui.perfetto.dev")
