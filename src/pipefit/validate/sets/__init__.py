"""The data sets, one module each, found by iterating over this package.

A module defines `name` (the command-line name) and `results() -> tuple[ValidationResult, ...]`, which fits and
predicts.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping

from pipefit.errors import PipefitError, suggest_name
from pipefit.validate.records import ValidationResult


def find_sets() -> Mapping[str, Callable[[], tuple[ValidationResult, ...]]]:
    """Return every data set by its name."""
    sets = {}
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        sets[module.name] = module.results
    return sets


def select_sets(names: list[str]) -> Mapping[str, Callable[[], tuple[ValidationResult, ...]]]:
    """Return the sets of these names, or all sets if `names` is empty. Raises PipefitError that lists the known
    names."""
    known = find_sets()
    for name in names:
        if name not in known:
            raise PipefitError(
                "There is no data set of this name.",
                where="--set",
                seen=repr(name),
                allowed=", ".join(sorted(known)),
                next_step=suggest_name(name, known),
            )
    return {name: known[name] for name in names or sorted(known)}
