"""`pipefit export`: write a plan for another tool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipefit.cli._options import takes_options
from pipefit.errors import PipefitError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of `pipefit export`."""

    path: Path | None = None
    "A plan, or a run's folder."
    target: str = ""
    "The target; --list prints all of them."
    output: Path | None = None
    "The file to write. Default: the plan's name with a suffix."
    listed: bool = False
    "List the targets, those of plug-ins included."
    model: str = ""
    "The model, if it is not found under its name in the plan."
    cluster: str = ""
    "The cluster, if it is not found under its name in the plan."


@takes_options(
    ExportOptions,
    arguments=("path",),
    metavars={"path": "PLAN|RUN_DIR"},
    flags={"target": ("--to",), "output": ("-o", "--output"), "listed": ("--list",)},
)
def command(options: ExportOptions) -> None:
    """Write PLAN for another tool."""
    from pipefit.codec import write_file
    from pipefit.export import ExportSource, export_text, find_exporter, find_exporters

    if options.listed:
        for exporter in find_exporters().values():
            print(f"{exporter.name:<16} {exporter.summary}")
        return
    if options.path is None:
        raise PipefitError("Name the plan to export.", where="pipefit export", allowed="a plan file or RUN_DIR")
    exporter = find_exporter(options.target)
    text = export_text(exporter, ExportSource(options.path, options.cluster, options.model))
    chosen = options.output or options.path.with_suffix(exporter.suffix)
    write_file(chosen, text, "export")
    print(f"{exporter.name} written to {chosen}")
