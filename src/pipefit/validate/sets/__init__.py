"""The data sets: one file each, found by walking this package.

A module defines `name` (what the user types) and `results() -> tuple[Result, ...]`, which fits and predicts.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping

from pipefit.errors import PipefitError, most_like
from pipefit.validate.records import ValidationResult


def find_sets() -> Mapping[str, Callable[[], tuple[ValidationResult, ...]]]:
    """Every data set by its name."""
    found = {}
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        found[module.name] = module.results
    return found


def select_sets(names: list[str]) -> Mapping[str, Callable[[], tuple[ValidationResult, ...]]]:
    """The sets of these names, or all where none is given. Raises PipefitError that lists the known ones."""
    known = find_sets()
    for name in names:
        if name not in known:
            near = most_like(name, known)
            raise PipefitError(
                "There is no data set of this name.",
                where="--set",
                seen=repr(name),
                allowed=", ".join(sorted(known)),
                next_step=f"did you mean {near[0]!r}?" if near else None,
            )
    return {name: known[name] for name in names or sorted(known)}
