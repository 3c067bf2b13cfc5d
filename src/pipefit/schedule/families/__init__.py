"""The schedule families: one file each, found by walking this package.

A family's module defines `name` (what the user types) and `build(problem) -> Schedule`, a pure function that
returns a computed schedule: compute actions only, to be lowered by `pipefit.schedule.lower`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping

from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Schedule
from pipefit.schedule.problem import Problem

Family = Callable[[Problem], Schedule]


def family(name: str) -> Family:
    """The family that the user calls `name`. Raises ScheduleError that lists the known ones."""
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES, n=1)
        raise ScheduleError(
            "The schedule is unknown.",
            seen=repr(name),
            allowed=", ".join(sorted(FAMILIES)),
            next_step=f"did you mean {near[0]!r}?" if near else None,
        )
    return FAMILIES[name]


def _find() -> Mapping[str, Family]:
    found: dict[str, Family] = {}
    for entry in pkgutil.iter_modules(__path__):
        if entry.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{entry.name}")
        assert module.name not in found, f"two families are called {module.name}"
        found[module.name] = module.build
    return found


FAMILIES: Mapping[str, Family] = _find()
"""Every family by its name."""
