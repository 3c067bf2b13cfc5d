"""The schedule families: one file each, found by walking this package.

A family's module defines `name` (as users type it) and `build(problem) -> Schedule`, a pure function that returns a
computed schedule (compute actions only, to be lowered by `pipefit.schedule.lower_schedule`). Optional definitions:

- `placement(devices)`: the placement it is meant for, if it is not one stage per lane;
- `least_units(lanes)`: the minimum of microbatches (or slices of them), if it is more than one;
- `block(lanes)`: its building block, if it repeats one;
- `searched = False`: the planner uses it only on request;
- `searched_with_slices = True`: the planner nevertheless tries it for sliced sequences;
- `knows_turns = True`: it supports stages that take turns (`ScheduleProblem.turns`). For the other families
  `pipefit.schedule.modules.multiplexed` inserts such stages into the family's schedule of the rest.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

from pipefit.errors import ScheduleError, most_like
from pipefit.schedule.actions import Schedule
from pipefit.schedule.blocks.building_block import BuildingBlock
from pipefit.schedule.problem import ScheduleProblem, linear_placement


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """A pipeline schedule family; call it with a problem to get a schedule."""

    name: str
    build: Callable[[ScheduleProblem], Schedule]
    placement: Callable[[int], tuple[int, ...]]
    "Number of devices -> the placement that the family is meant for."
    least_units: Callable[[int], int]
    "Number of lanes -> the minimum of microbatches times slices; with fewer, `build` raises."
    searched: bool
    "Whether the planner's search tries it without a request."
    searched_with_slices: bool
    "The same for sliced sequences."
    knows_turns: bool = False
    "Whether it supports stages that take turns or several microbatches together."
    block: Callable[[int], BuildingBlock] | None = None
    "Number of lanes -> the building block that it repeats, if any."

    def __call__(self, problem: ScheduleProblem) -> Schedule:
        if problem.turns and not self.knows_turns:
            raise ScheduleError(
                "This schedule is written for stages that all take every microbatch.",
                where=self.name,
                seen="stages that take turns, or several microbatches together",
                allowed=", ".join(name for name, family in sorted(FAMILIES.items()) if family.knows_turns),
                next_step="order the other stages with it, and put these in with pipefit.schedule.modules.multiplexed",
            )
        return self.build(problem)


def find_family(name: str) -> ScheduleFamily:
    """Return the family of this name. Raises ScheduleError that lists the known names."""
    if name not in FAMILIES:
        near = most_like(name, FAMILIES)
        raise ScheduleError(
            "The schedule is unknown.",
            seen=repr(name),
            allowed=", ".join(sorted(FAMILIES)),
            next_step=f"did you mean {near[0]!r}?" if near else None,
        )
    return FAMILIES[name]


def register_family(module: ModuleType) -> ScheduleFamily:
    """Add the family that a module defines to `FAMILIES`, and return it. Raises ScheduleError for a duplicate name.

    Families are ordered by their modules' names, whatever the order of registration, so that a search tries them in one
    order everywhere.
    """
    if module.name in _modules and _modules[module.name][0] != module.__name__:
        raise ScheduleError(
            "Two schedule families have one name.",
            where=module.__name__,
            seen=module.name,
            allowed=f"a name other than {', '.join(sorted(_modules))}",
        )
    family = ScheduleFamily(
        name=module.name,
        build=module.build,
        placement=getattr(module, "placement", linear_placement),
        least_units=getattr(module, "least_units", _one_unit),
        searched=getattr(module, "searched", True),
        searched_with_slices=getattr(module, "searched_with_slices", getattr(module, "searched", True)),
        knows_turns=getattr(module, "knows_turns", False),
        block=getattr(module, "block", None),
    )
    _modules[family.name] = (module.__name__, family)
    ordered = sorted(_modules.values(), key=lambda entry: entry[0].removesuffix(".family").rpartition(".")[2])
    _families.clear()
    _families.update({family.name: family for _, family in ordered})
    return family


def _one_unit(lanes: int) -> int:
    return 1


_modules: dict[str, tuple[str, ScheduleFamily]] = {}
"""Name of a family -> (module, family)."""
_families: dict[str, ScheduleFamily] = {}

FAMILIES: Mapping[str, ScheduleFamily] = MappingProxyType(_families)
"""Every family by its name."""

for _entry in pkgutil.iter_modules(__path__):
    if not _entry.name.startswith("_"):
        register_family(importlib.import_module(f"{__name__}.{_entry.name}"))
