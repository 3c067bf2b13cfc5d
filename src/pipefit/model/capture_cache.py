"""A cache of captured models in the user's cache folder. No torch is imported: a model in the cache is read in
milliseconds, where its capture takes seconds.

A captured model depends on its family or class, its configuration, the code that captures it, and the installed
versions. The key of a file is a digest of all of these, so a change of any of them gives a fresh capture. Users' own
modules (`FILE.py:FUNCTION`) and models with opaque layers are never stored. The cache may lose files at any time;
nothing in this module fails because of the disk.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipefit import codec
from pipefit.errors import CaptureWarning, FormatError
from pipefit.model.any_class import FIELDS, library_example, library_fields
from pipefit.model.families import FAMILIES
from pipefit.model.families.build import USER
from pipefit.model.graph import Model
from pipefit.model.ops import KINDS
from pipefit.plugins import loaded_modules

CACHE_VARIABLE = "PIPEFIT_CACHE"
"""The environment variable that names the cache folder, or turns the cache off."""

MOST_FILES = 64
"""Captured models that the folder keeps: the newest ones."""

_FORMAT = 1
"""Number of the file format, part of the key."""

_PACKAGE = Path(str(codec.__file__)).resolve().parent
_STARTED_S = time.time()
"""About the time when this process imported its code, in seconds since the epoch."""

_TRACERS = ("torch", "sympy")
"""Packages whose versions decide the capture of a built-in family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedFile:
    """The contents of one file of the cache."""

    key: str
    "The `cache_key` of the model, as in the file's name."
    hash: str
    "`Model.hash` of the model; a damaged file has another one."
    model: Model
    warnings: tuple[str, ...] = ()
    "Texts of the capture's warnings (`CaptureWarning`), which every opening of the model repeats."


def cache_folder() -> Path | None:
    """Return the folder of captured models; None if the cache is off or the user has no home folder."""
    choice = os.environ.get(CACHE_VARIABLE, "")
    if choice == "off":
        return None
    shared = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if choice:
            return Path(choice).expanduser() / "models"
        folder = Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # no home folder
        return None
    return folder / "pipefit" / "models"


def cache_key(family: str, config: Mapping[str, Any]) -> str | None:
    """Return a digest of everything that the capture of this model depends on; None if it is not known completely.

    For a built-in family without plug-ins: the configuration, pipefit's source, the versions of Python, torch and
    sympy, and the machine type. A plug-in adds the files of its packages and the versions of all installed packages.
    The key of a class of `transformers` has the versions of all installed packages, too.
    """
    read: Callable[..., Any]
    if family in FAMILIES:
        builder, read = FAMILIES[family].builder, FAMILIES[family].read
    elif family == USER and FIELDS in config:
        builder, read = f"{library_example.__module__}:{library_example.__qualname__}", library_fields
    else:
        return None
    reader = [getattr(read, name, None) for name in ("__module__", "__qualname__")]
    modules = {builder, str(reader[0])}
    packages = {name.partition(".")[0] for name in modules if not name.startswith("pipefit.model.")}
    packages.update(name.partition(".")[0] for name in loaded_modules())
    versions = _installed_versions(() if packages or family == USER else _TRACERS)
    sources = _digest_sources(sorted(packages))
    if None in reader or sources is None or not any(name.startswith("torch-") for name in versions):
        return None
    facts = {
        "format": _FORMAT,
        "family": [family, builder, *reader],
        "config": config,
        "sources": sources,
        "versions": versions,
        "python": [sys.version, platform.machine()],
    }
    try:
        return codec.content_digest(facts)
    except (TypeError, ValueError):  # a configuration that is not plain JSON data
        return None


def load_captured(key: str) -> Model | None:
    """Return the model of this key, and repeat the warnings of its capture; None if the folder has no such file or the
    file is damaged."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        stored = codec.load_file(CapturedFile, folder / f"{key}.json")
    except (FormatError, ValueError, RecursionError):
        return None
    if stored.key != key or stored.model.hash != stored.hash:
        return None
    for text in stored.warnings:
        warnings.warn(text, CaptureWarning, stacklevel=2)
    return stored.model


def store_captured(key: str, model: Model, texts: Sequence[str] = ()) -> None:
    """Write a model to the cache folder and remove the oldest files above `MOST_FILES`.

    Models with opaque layers, models that JSON does not give back equal, and folders that cannot be written are
    skipped.
    """
    folder = cache_folder()
    operators = (operator for graph in model.graphs.values() for operator in graph.operators)
    if folder is None or any(KINDS[operator.kind].is_module for operator in operators):
        return
    try:
        text = codec.dump_text(CapturedFile(key=key, hash=model.hash, model=model, warnings=tuple(texts)))
        if codec.load_text(CapturedFile, text, key).model != model:
            return
    except (FormatError, TypeError, ValueError):
        return
    try:
        _replace_file(folder, f"{key}.json", text)
        _remove_oldest(folder)
    except OSError:
        return


def _replace_file(folder: Path, name: str, text: str) -> None:
    """Write a file under another name and rename it, so that readers see all of it or none. Raises OSError."""
    import tempfile

    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f"{name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, folder / name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _remove_oldest(folder: Path) -> None:
    """Keep the newest `MOST_FILES` files of the folder. Other processes may remove files at the same time."""
    ages: list[tuple[int, str]] = []
    for entry in os.scandir(folder):
        try:
            if entry.is_file():
                ages.append((entry.stat().st_mtime_ns, entry.path))
        except FileNotFoundError:
            continue
    for _, path in sorted(ages, reverse=True)[MOST_FILES:]:
        Path(path).unlink(missing_ok=True)


def _digest_sources(packages: Sequence[str]) -> str | None:
    """Return a digest of the files of pipefit that decide a capture and of top-level packages: the contents of Python
    files, size and time of others.

    Returns None if a package has no files, a file cannot be read, or a file changed after this process began: the
    process may still run the older code.
    """
    paths = [Path(__file__), *_PACKAGE.glob("*.py"), *(_PACKAGE / "model").rglob("*.py")]
    total = hashlib.sha256()
    try:
        for name in packages:
            paths += _package_files(name)
        for path in sorted(paths):
            status = path.stat()
            if status.st_mtime > _STARTED_S:
                return None
            contents = path.read_bytes() if path.suffix == ".py" else f"{status.st_size} {status.st_mtime_ns}".encode()
            total.update(f"{path} {len(contents)}\n".encode())
            total.update(contents)
    except (OSError, ImportError, ValueError):
        return None
    return total.hexdigest()


def _package_files(name: str) -> list[Path]:
    """Return the files of an importable top-level package or module, except compiled ones. Raises ImportError or
    ValueError if it has none."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"{name} is not installed")
    folders = spec.submodule_search_locations or ()
    paths = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file()]
    if not folders and spec.origin is not None:
        paths = [Path(spec.origin)]
    if not paths:
        raise ImportError(f"{name} has no files")
    return [path for path in paths if "__pycache__" not in path.parts]


def _installed_versions(names: Sequence[str]) -> list[str]:
    """Return `NAME-VERSION` of installed packages by the names of their metadata folders, in the order of `sys.path`.

    `names` () selects all packages. A listing takes a millisecond; importlib.metadata takes forty.
    """
    listed: list[str] = []
    for folder in dict.fromkeys(path or "." for path in sys.path):
        try:
            entries = sorted(os.listdir(folder))
        except OSError:
            continue
        for entry in entries:
            stem, dot, suffix = entry.rpartition(".")
            if dot and suffix in ("dist-info", "egg-info") and (not names or stem.partition("-")[0] in names):
                listed.append(stem)
    return listed
