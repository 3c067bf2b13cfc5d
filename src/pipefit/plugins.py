"""Plug-ins: packages that add model families, readers, exporters and more, and the registries that they add them to.

A package names its plug-in in the entry point group `pipefit.plugins`. The entry point is a module whose import calls
register functions, or a function that calls them. The command line loads all plug-ins once, when a command starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pipefit.errors import PipefitError, PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "pipefit.plugins"
"""The entry point group."""

SWITCH = "PIPEFIT_PLUGINS"
"""The environment variable that turns plug-ins off."""

Entry = TypeVar("Entry")


@cache
def load_plugins() -> tuple[str, ...]:
    """Load the plug-ins of all installed packages, at most once in a process.

    Returns `PACKAGE: MODULE` for each, sorted. Raises PluginError for a plug-in that cannot be imported or registered,
    and for a wrong value of PIPEFIT_PLUGINS.
    """
    choice = os.environ.get(SWITCH, "on")
    if choice not in ("on", "off"):
        raise PluginError("The switch of plug-ins is wrong.", where=SWITCH, seen=repr(choice), allowed="on, off")
    if choice == "off" or not _group_is_named():
        return ()
    from importlib.metadata import entry_points

    known = sorted((_package_name(entry), entry.value, entry) for entry in entry_points(group=GROUP))
    for package, _, entry in known:
        _load_plugin(package, entry)
    return tuple(f"{package}: {value}" for package, value, _ in known)


def loaded_modules() -> tuple[str, ...]:
    """Return the modules of the plug-ins that this process has loaded, sorted. Loads none."""
    if not load_plugins.cache_info().currsize:
        return ()
    return tuple(sorted({text.partition(": ")[2].partition(":")[0] for text in load_plugins()}))


class NamedRegistry(Mapping[str, Entry]):
    """The entries of one kind by name: the built-in entries, then entries of plug-ins in their order."""

    def __init__(
        self, kind: str, entries: Mapping[str, Entry] | None = None, *, error: type[PipefitError] = PipefitError
    ) -> None:
        self.kind = kind
        "The plural for messages, such as `cluster readers`."
        self.error = error
        "The error of a repeated name."
        self._entries: dict[str, Entry] = dict(entries or {})

    def add_entry(self, name: str, entry: Entry) -> Entry:
        """Add an entry and return it; adding an equal one again changes nothing. Raises `error` if another entry has
        the name."""
        if self._entries.setdefault(name, entry) != entry:
            raise self.error(
                f"Two {self.kind} have one name.",
                seen=repr(name),
                allowed=f"a name other than {', '.join(sorted(self._entries))}",
            )
        return entry

    def remove_entry(self, name: str) -> None:
        """Remove an entry, for tests. KeyError if there is none."""
        del self._entries[name]

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _load_plugin(package: str, entry: EntryPoint) -> None:
    try:
        loaded = entry.load()
        if callable(loaded):
            loaded()
    except Exception as error:
        raise PluginError(
            "A plug-in cannot be loaded.",
            where=f"package {package}, entry point {entry.name} = {entry.value}",
            seen=f"{type(error).__name__}: {error}",
            next_step=f"mend or uninstall {package}, or go on without plug-ins: {SWITCH}=off",
        ) from error


def _package_name(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "unknown"


def _group_is_named() -> bool:
    """Return True if an installed package names the group.

    Reading the few small files takes 2 ms, where importing importlib.metadata and asking it takes 40 ms.
    """
    needle = f"[{GROUP}]".encode()
    for folder in dict.fromkeys(path or "." for path in sys.path):
        for suffix in ("dist-info", "egg-info"):
            for path in Path(folder).glob(f"*.{suffix}/entry_points.txt"):
                if needle in path.read_bytes():
                    return True
    return False
