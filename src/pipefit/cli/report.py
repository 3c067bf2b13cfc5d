"""`pipefit report`: write one HTML file with predictions beside measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    path: Annotated[Path, typer.Argument(metavar="RUN_DIR|PLAN", help="A run's folder, or a plan that has not run.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML file to write.")] = Path("report.html"),
    trace: Annotated[Path | None, typer.Option(help="Write both timelines for Perfetto as well.")] = None,
    model: str = typer.Option("", help="The model, if it is not found under its name in the plan."),
    cluster: str = typer.Option("", help="The cluster, if it is not found under its name in the plan."),
) -> None:
    """Write a self-contained report of RUN_DIR, or of a PLAN alone (predicted only); it opens without a network."""
    from pipefit.codec import write_file
    from pipefit.show.page import render_report
    from pipefit.show.perfetto import write_perfetto
    from pipefit.show.subject import open_subject
    from pipefit.show.trace import from_timeline

    subject = open_subject(path, cluster, model)
    html = render_report(subject)
    timeline = subject.simulation.timeline
    traces = [from_timeline(timeline)]
    if subject.record is not None and subject.record.trace is not None:
        traces.append(subject.record.trace)
    write_file(output, html, "report")
    if trace is not None:
        write_perfetto(trace, traces, timeline)
    print(f"report written to {output} ({len(html.encode()) / 1e6:.2f} MB): open it in a browser")
    if trace is not None:
        print(f"trace written to {trace}: open it at https://ui.perfetto.dev")
