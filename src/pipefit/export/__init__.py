"""Exporters: a plan written for other tools. One file per target; a file that defines `EXPORTER` is found by walking,
and a plug-in calls `register_exporter`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from pipefit.errors import PipefitError, suggest_name
from pipefit.export.base import ExportSource, PlanExporter
from pipefit.plugins import NamedRegistry, call_plugin

__all__ = ["ExportSource", "PlanExporter", "export_text", "find_exporter", "find_exporters", "register_exporter"]


@cache
def find_exporters() -> NamedRegistry[PlanExporter]:
    """Return all exporters by name: the files of this package, and exporters of plug-ins."""
    exporters: NamedRegistry[PlanExporter] = NamedRegistry("exporters")
    for info in pkgutil.iter_modules(__path__):
        exporter = getattr(importlib.import_module(f"{__name__}.{info.name}"), "EXPORTER", None)
        if isinstance(exporter, PlanExporter):
            exporters.add_entry(exporter.name, exporter)
    return exporters


def register_exporter(exporter: PlanExporter) -> PlanExporter:
    """Add an exporter for `pipefit export --to NAME`, and return it. Raises PipefitError for a name that another
    exporter has."""
    return find_exporters().add_entry(exporter.name, exporter)


def find_exporter(name: str) -> PlanExporter:
    """Return the exporter of this name. Raises PipefitError that lists the known names."""
    known = find_exporters()
    if name not in known:
        raise PipefitError(
            "No exporter has this name.",
            where="--to",
            seen=repr(name),
            allowed="; ".join(f"{exporter.name} ({exporter.summary})" for exporter in known.values()),
            next_step=suggest_name(name, known),
        )
    return known[name]


def export_text(exporter: PlanExporter, source: ExportSource) -> str:
    """Return the text of the file. Raises PipefitError for a plan that the target cannot express, and PluginError if
    the exporter of a plug-in fails or returns no text."""
    return call_plugin(find_exporters().describe_entry(exporter.name), exporter.write, source, returns=str)
