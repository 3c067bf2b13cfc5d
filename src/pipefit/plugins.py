"""Plug-ins: packages that add model families, readers, exporters and more, and the registries that they add them to.

A package names its plug-in in the entry point group `pipefit.plugins`. The entry point is a module whose import calls
register functions, or a function that calls them. The command line loads all plug-ins once, when a command starts.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from pipefit.errors import PipefitError, PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "pipefit.plugins"
"""The entry point group."""

SWITCH = "PIPEFIT_PLUGINS"
"""The environment variable that turns plug-ins off."""

MEND_IT = f"mend it, or go on without plug-ins: {SWITCH}=off"
"""The advice of each error that names a plug-in."""

Entry = TypeVar("Entry")
Result = TypeVar("Result")

_LOADING: ContextVar[str] = ContextVar("loading", default="")
"""The package of the plug-in that is being loaded; '' outside of `load_plugins`."""


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
        self._packages: dict[str, str] = {}

    def add_entry(self, name: str, entry: Entry) -> Entry:
        """Add an entry and return it; adding an equal one again changes nothing. Raises `error` if another entry has
        the name."""
        if name not in self._entries:
            self._packages[name] = loading_package()
        if self._entries.setdefault(name, entry) != entry:
            raise self.error(
                f"Two {self.kind} have one name.",
                seen=repr(name),
                allowed=f"a name other than {', '.join(sorted(self._entries))}",
            )
        return entry

    def describe_entry(self, name: str) -> str:
        """Return `exporter 'markdown' of walk-ext`; without the package if no plug-in was being loaded."""
        singular = f"{self.kind[:-3]}y" if self.kind.endswith("ies") else self.kind[:-1]
        return name_plugin(singular, name, self._packages.get(name, ""))

    def remove_entry(self, name: str) -> None:
        """Remove an entry, for tests. KeyError if there is none."""
        del self._entries[name]

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def missing_plugin_advice() -> str:
    """Return the next step after an unknown name in a file: a plug-in that is not loaded may add it."""
    if os.environ.get(SWITCH) == "off":
        return f"plug-ins are off: leave out {SWITCH}=off if one of them adds it"
    return "install the plug-in that adds it, on all hosts"


def loading_package() -> str:
    """Return the package of the plug-in that is being loaded, '' if none is."""
    return _LOADING.get()


def name_plugin(kind: str, name: str, package: str) -> str:
    """Return `exporter 'markdown' of walk-ext`, or `exporter 'markdown'` without a package."""
    return f"{kind} {name!r}{f' of {package}' if package else ''}"


def is_builtin(call: object) -> bool:
    """Return True if a function or class is defined in pipefit."""
    return str(getattr(call, "__module__", "")).partition(".")[0] == "pipefit"


@contextmanager
def plugin_errors(subject: str, call: Callable[..., object]) -> Iterator[None]:
    """Turn an exception of `call`, a function of a plug-in, into a PluginError that names the plug-in and the line.

    A PipefitError is the plug-in's own message and stays. So does an exception of a function of pipefit: that is a
    fault of pipefit, with a traceback. `subject` is the text of `NamedRegistry.describe_entry`.
    """
    try:
        yield
    except PipefitError:
        raise
    except Exception as error:
        if is_builtin(call):
            raise
        raise PluginError(
            f"The {subject} failed.",
            where=_failed_line(call, error),
            seen=f"{type(error).__name__}: {error}",
            next_step=MEND_IT,
        ) from error


def call_plugin(
    subject: str, call: Callable[..., Result], *arguments: object, returns: type | tuple[type, ...] = object
) -> Result:
    """Return the result of a plug-in's function. Raises PluginError for its exceptions, as `plugin_errors` does, and
    for a result of another type than `returns`."""
    with plugin_errors(subject, call):
        result = call(*arguments)
    if not isinstance(result, returns):
        types = returns if isinstance(returns, tuple) else (returns,)
        raise PluginError(
            f"The {subject} returned a value of a wrong type.",
            where=call_name(call),
            seen=f"{type(result).__name__}: {str(result)[:200]}",
            allowed=" or ".join(kind.__name__ for kind in types),
            next_step=MEND_IT,
        )
    return result


def iterate_plugin(subject: str, call: Callable[..., Iterable[Result]], *arguments: object) -> Iterator[Result]:
    """Yield the results of a plug-in's function one by one. Raises PluginError for its exceptions."""
    with plugin_errors(subject, call):
        results = iter(call(*arguments))
    end = object()
    while True:
        with plugin_errors(subject, call):
            result = next(results, end)
        if result is end:
            return
        yield result  # type: ignore[misc]


def import_function(subject: str, module: str, name: str) -> Callable[..., Any]:
    """Return a function of a plug-in's module. Raises PluginError if the module or the function is missing."""
    try:
        function = getattr(importlib.import_module(module), name)
        if callable(function):
            return function  # type: ignore[no-any-return]
        raise TypeError(f"{name} is {type(function).__name__}")
    except PipefitError:
        raise
    except Exception as error:
        if module.startswith("pipefit."):
            raise
        raise PluginError(
            f"The {subject} names a builder that cannot be used.",
            where=f"builder {module!r}",
            seen=f"{type(error).__name__}: {error}",
            allowed=f"a module with a function {name}",
            next_step=MEND_IT,
        ) from error


def call_name(call: object) -> str:
    """Return `walk_ext.lanes.write_lanes` for messages."""
    return f"{getattr(call, '__module__', '?')}.{getattr(call, '__qualname__', type(call).__name__)}"


def _failed_line(call: Callable[..., object], error: Exception) -> str:
    """Return the file and the line that failed: the innermost one of the file of `call`, otherwise the first line of
    `call`, or the innermost line of all for a callable without a file."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(call, "__code__", None)
    if code is None:
        return f"{call_name(call)}, {frames[-1].filename}, line {frames[-1].lineno}"
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{call_name(call)}, {code.co_filename}, line {lines[-1] if lines else code.co_firstlineno}"


def _load_plugin(package: str, entry: EntryPoint) -> None:
    token = _LOADING.set(package)
    try:
        loaded = entry.load()
        if callable(loaded):
            loaded()
        elif not isinstance(loaded, ModuleType):
            raise TypeError(f"the entry point is {type(loaded).__name__}, neither a module nor a function")
    except Exception as error:
        raise PluginError(
            "A plug-in cannot be loaded.",
            where=f"package {package}, entry point {entry.name} = {entry.value}",
            seen=f"{type(error).__name__}: {error}",
            next_step=f"mend or uninstall {package}, or go on without plug-ins: {SWITCH}=off",
        ) from error
    finally:
        _LOADING.reset(token)


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
