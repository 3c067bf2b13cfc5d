"""`pipefit export`: write a plan for another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipefit.errors import PipefitError


def command(
    path: Annotated[Path | None, typer.Argument(metavar="PLAN|RUN_DIR", help="A plan, or a run's folder.")] = None,
    target: str = typer.Option("", "--to", help="The target; --list prints all of them."),
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write. Default: the plan's name with a suffix.")
    ] = None,
    listed: bool = typer.Option(False, "--list", help="List the targets, those of plug-ins included."),
    model: str = typer.Option("", help="The model, if it is not found under its name in the plan."),
    cluster: str = typer.Option("", help="The cluster, if it is not found under its name in the plan."),
) -> None:
    """Write PLAN for another tool."""
    from pipefit.codec import write_file
    from pipefit.export import ExportSource, find_exporter, find_exporters

    if listed:
        for exporter in find_exporters().values():
            print(f"{exporter.name:<16} {exporter.summary}")
        return
    if path is None:
        raise PipefitError("Name the plan to export.", where="pipefit export", allowed="a plan file or RUN_DIR")
    exporter = find_exporter(target)
    text = exporter.write(ExportSource(path, cluster, model))
    chosen = output or path.with_suffix(exporter.suffix)
    write_file(chosen, text, "export")
    print(f"{exporter.name} written to {chosen}")
