"""The schedule families: one file each, collected by walking this package.

The module of a family defines `name`, `build`, and any other field of `ScheduleFamily` by its name. A family from
outside this package is a `ScheduleFamily` passed to `register_family`.
"""

from __future__ import annotations

import importlib
import pkgutil

from pipefit.schedule.families._registry import (
    DEFAULT_FAMILY,
    FAMILIES,
    ScheduleFamily,
    family_facts,
    find_family,
    register_family,
    remove_family,
)

__all__ = [
    "DEFAULT_FAMILY",
    "FAMILIES",
    "ScheduleFamily",
    "family_facts",
    "find_family",
    "register_family",
    "remove_family",
]

for _entry in pkgutil.iter_modules(__path__):
    if not _entry.name.startswith("_"):
        register_family(importlib.import_module(f"{__name__}.{_entry.name}"))
