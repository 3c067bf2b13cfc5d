"""Readers of other tools' descriptions of machines. One file per tool; a file that defines `READER` is found by
walking, and a plug-in calls `register_reader`.

A reader turns texts into a cluster. Facts that the texts omit (devices per host, bandwidth between hosts) must be given
in `ReaderOptions`: nothing is assumed silently.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pipefit.cluster.files import check_cluster
from pipefit.cluster.readers.plausible import check_plausible
from pipefit.cluster.readers.reader import ClusterReader, ReaderInput, ReaderOptions
from pipefit.cluster.types import Cluster
from pipefit.errors import ClusterError, FormatError, MissingFactsError, PipefitError, most_like, suggest_name
from pipefit.plugins import NamedRegistry, call_plugin

__all__ = [
    "ClusterReader",
    "ReaderInput",
    "ReaderOptions",
    "check_plausible",
    "find_readers",
    "open_reader_text",
    "read_cluster",
    "register_reader",
]


@cache
def find_readers() -> NamedRegistry[ClusterReader]:
    """Return all readers by name: the files of this package, and readers of plug-ins."""
    readers: NamedRegistry[ClusterReader] = NamedRegistry("cluster readers")
    for info in pkgutil.iter_modules(__path__):
        reader = getattr(importlib.import_module(f"{__name__}.{info.name}"), "READER", None)
        if isinstance(reader, ClusterReader):
            readers.add_entry(reader.name, reader)
    return readers


def register_reader(reader: ClusterReader) -> ClusterReader:
    """Add a reader for `pipefit profile --from NAME` and `--cluster NAME:FILE`, and return it. Raises PipefitError for
    a name that another reader has."""
    return find_readers().add_entry(reader.name, reader)


def open_reader_text(text: str) -> Cluster | None:
    """Return the cluster of `NAME:FILE`, NAME a reader; None for a text of another form.

    Raises the errors of `read_cluster`. A file that lacks facts leads to `pipefit profile`, which takes them as
    options.
    """
    name, _, file = text.partition(":")
    readers = find_readers()
    if not file:
        return None
    if name not in readers:
        if Path(text).exists() or not most_like(name, readers):
            return None
        raise ClusterError(
            "No reader has this name.",
            where="--cluster",
            seen=repr(text),
            allowed=f"NAME:FILE for the readers {', '.join(readers)}",
            next_step=suggest_name(name, readers),
        )
    try:
        return read_cluster(name, [file])
    except MissingFactsError as error:
        raise ClusterError(
            error.what,
            where=error.where,
            seen=error.seen,
            next_step=f"pipefit profile --from {name} {file} {_missing_options(name, file)} -o cluster.json",
        ) from None


def _missing_options(name: str, file: str) -> str:
    """Return examples of the options that the file needs, and of no others."""
    devices, network = ("", "H100", "8xH100"), ("", "200Gbit/s")
    options = {}
    for kind, bandwidth in itertools.product(devices, network):
        options = {"--devices": kind, "--network": bandwidth}
        try:
            read_cluster(name, [file], devices=kind, network=bandwidth)
        except MissingFactsError:
            continue
        except PipefitError:  # nothing is missing any more
            pass
        break
    return " ".join(f"{option} {value}" for option, value in options.items() if value)


def read_cluster(source: str, files: Sequence[str], *, devices: str = "", network: str = "") -> Cluster:
    """Return the cluster that `files` of the tool `source` describe, checked and found plausible.

    `devices` gives the devices of a host (`8xA100-80`, or `A100-80`) and `network` a host's bandwidth (`200Gbit/s`), if
    the files do not. Raises PipefitError (unknown tool, nothing to read), FormatError (wrong format), ClusterError
    (incomplete, contradictory, or in mistaken units) or PluginError (a reader of a plug-in fails).
    """
    known = find_readers()
    if source not in known:
        raise PipefitError(
            "No reader has this name.",
            where="--from",
            seen=repr(source),
            allowed="; ".join(f"{reader.name} ({reader.summary})" for reader in known.values()),
            next_step=suggest_name(source, known),
        )
    reader = known[source]
    if not files:
        raise PipefitError(
            "There is nothing to read.",
            where=f"--from {source}",
            next_step=f"name the {reader.takes}",
        )
    inputs = [_read_input(name, reader) for name in files]
    options = ReaderOptions(devices=devices, network=network)
    cluster = call_plugin(known.describe_entry(source), reader.read, inputs, options, returns=Cluster)
    check_cluster(cluster, files[0])
    check_plausible(cluster, files[0])
    return cluster


def _read_input(name: str, reader: ClusterReader) -> ReaderInput:
    path = Path(name)
    if reader.literal and not path.is_file():
        return ReaderInput(where=repr(name), text=name)
    try:
        return ReaderInput(where=name, text=path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError("The file cannot be read.", where=name, seen=error) from None
