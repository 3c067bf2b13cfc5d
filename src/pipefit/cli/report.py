"""`pipefit report`: write one HTML file with predictions beside measurements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipefit.cli._options import takes_options


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Options of `pipefit report`."""

    path: Path
    "A run's folder, or a plan that has not run."
    output: Path = Path("report.html")
    "The HTML file to write."
    trace: Path | None = None
    "Write both timelines for Perfetto as well."
    model: str = ""
    "The model, if it is not found under its name in the plan."
    cluster: str = ""
    "The cluster, if it is not found under its name in the plan."


@takes_options(
    ReportOptions, arguments=("path",), metavars={"path": "RUN_DIR|PLAN"}, flags={"output": ("-o", "--output")}
)
def command(options: ReportOptions) -> None:
    """Write a self-contained report of RUN_DIR, or of a PLAN alone (predicted only); it opens without a network."""
    from pipefit.codec import write_file
    from pipefit.show.figures import headline_lines
    from pipefit.show.page import render_report
    from pipefit.show.perfetto import subject_traces, write_perfetto
    from pipefit.show.sections import crowding_words
    from pipefit.show.subject import open_subject

    subject = open_subject(options.path, options.cluster, options.model)
    html = render_report(subject)
    write_file(options.output, html, "report")
    if options.trace is not None:
        write_perfetto(options.trace, subject_traces(subject), subject.simulation.timeline)
    for line in (*headline_lines(subject.plan, subject.record), crowding_words(subject.record)):
        if line:
            print(line)
    print(f"report written to {options.output} ({len(html.encode()) / 1e6:.2f} MB): open it in a browser")
    if options.trace is not None:
        print(f"trace written to {options.trace}: open it at https://ui.perfetto.dev")
