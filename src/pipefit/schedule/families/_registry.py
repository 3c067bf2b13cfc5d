"""A schedule family: the function that builds its orders, and every fact about it that other rooms use.

The fields of `ScheduleFamily` are the only place for such facts. No other file lists family names or compares with one.
`register_family` is the public hook for families from outside this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType, ModuleType

import numpy as np

from pipefit.cost.types import Array
from pipefit.errors import ScheduleError, suggest_name
from pipefit.plugins import call_plugin, is_builtin, loading_package, name_plugin, plugin_errors
from pipefit.schedule.actions import Schedule
from pipefit.schedule.blocks.building_block import BuildingBlock
from pipefit.schedule.check.rules import check_schedule
from pipefit.schedule.problem import ScheduleProblem, linear_placement


def _one_unit(lanes: int) -> int:
    return 1


def _one_in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    return 1


def _unknown_warm_up(lane: int, lanes: int, stages_per_lane: int, microbatches: int, slices: int) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFamily:
    """A pipeline schedule family; call it with a problem to get a schedule.

    Only `name` and `build` are required. Without the other fields the planner uses bounds that hold for any order.
    """

    name: str
    "The name of the family for users, as in `--fix schedule=NAME`."
    build: Callable[[ScheduleProblem], Schedule]
    """A pure function that returns a computed schedule (compute actions only). It raises ScheduleError for a problem
    that the family does not support."""
    placement: Callable[[int], tuple[int, ...]] = linear_placement
    "Number of lanes -> the stage placement that the family is meant for."
    least_units: Callable[[int], int] = _one_unit
    "Number of lanes -> the minimum of microbatches times slices; with fewer, `build` raises."
    block: Callable[[int], BuildingBlock] | None = None
    "Number of lanes -> the building block that the family repeats, if any."
    knows_turns: bool = False
    """Whether it supports stages that take turns (`ScheduleProblem.turns`) or several microbatches together. For the
    other families `pipefit.schedule.modules.multiplexed` inserts such stages."""

    fused: bool = False
    "Whether every backward is a B, so that the last action of a lane is one."
    in_flight: Callable[[int, int, int, int], int] = _one_in_flight
    """(lane, lanes, stages per lane, microbatches) -> a lower bound of the stage-microbatches that the lane holds at
    once."""
    warm_up: Callable[[int, int, int, int, int], int] = _unknown_warm_up
    """(lane, lanes, stages per lane, microbatches, slices) -> the forward units of the lane before its first backward;
    0 if unknown."""
    idle: Callable[[int | Array, Array, Array, Array], Array] | None = None
    """(lanes, F, I, W of one stage in seconds) -> estimated idle seconds of the busiest lane. It sets the order of the
    search and excludes nothing. None is the estimate of 1F1B if `fused`, otherwise of a V."""

    searched: bool = True
    "Whether the planner's search tries it without a request."
    searched_with_slices: bool = True
    "The same for sliced sequences; True wherever `searched` is."
    searched_with_modules: bool = False
    "Whether the planner tries it besides the default family for models of several modules, one stage per lane."
    guest_units_ahead: tuple[int, ...] = ()
    "Units that modules on shared devices run ahead, in the first attempts of this family."
    more_guest_units_ahead: tuple[int, ...] = ()
    "The same for further attempts with the best layouts."
    shown_in_trade: bool = True
    "Whether the report compares its memory and time with other families."
    is_fitted: bool = False
    "Whether `build` searches an order for the costs and the memory of the problem."

    def __call__(self, problem: ScheduleProblem) -> Schedule:
        if problem.turns and not self.knows_turns:
            raise ScheduleError(
                "This schedule is written for stages that all take every microbatch.",
                where=self.name,
                seen="stages that take turns, or several microbatches together",
                allowed=", ".join(name for name, family in sorted(FAMILIES.items()) if family.knows_turns),
                next_step="order the other stages with it, and put these in with pipefit.schedule.modules.multiplexed",
            )
        if is_builtin(self.build):
            return self.build(problem)
        return self._checked_order(problem)

    def _checked_order(self, problem: ScheduleProblem) -> Schedule:
        """Return the order of a family from outside pipefit. Raises ScheduleError if it is invalid, PluginError if
        `build` fails. Tests prove the orders of the built-in families."""
        subject = name_plugin("schedule family", self.name, _packages.get(self.name, ""))
        schedule = call_plugin(subject, self.build, problem, returns=Schedule)
        expected = {
            "name": self.name,
            "placement": problem.placement,
            "microbatches": problem.microbatches,
            "slices": problem.slices,
        }
        for field, value in expected.items():
            seen = getattr(schedule, field)
            if seen != value:
                raise _wrong_order(subject, problem, f"{field!r} differs", f"{field}={seen!r}", f"{field}={value!r}")
        with plugin_errors(subject, self.build):
            if schedule.is_lowered:
                raise _wrong_order(subject, problem, "it has transfers", None, "the actions F, I, W and B")
            try:
                check_schedule(schedule, problem.edges)
            except ScheduleError as error:
                raise _wrong_order(subject, problem, error.what, error.seen, error.allowed) from error
        return schedule

    def idle_s(self, lanes: int | Array, held: Array, forward_s: Array, input_s: Array, weight_s: Array) -> Array:
        """Return the estimated idle time of the busiest lane of equal stages, from the times of one stage.

        Without `idle` and `fused` it is the idle time of a V with `held` stage-microbatches on the fullest lane,
        max(0, 6 d - 3 k - 1) slots (Qi et al. 2024, arXiv 2405.15362, appendix). A slot is a third of F, I and W.
        """
        if self.idle is not None:
            return self.idle(lanes, forward_s, input_s, weight_s)
        stage_s = forward_s + input_s + weight_s
        if self.fused:
            return (lanes - 1) * stage_s
        return np.maximum(0, 6 * lanes - 3 * held - 1) * stage_s / 3


DEFAULT_FAMILY = "1f1b"
"""The family of a plan without a request or a search, and of a single lane, where no family is faster."""


def find_family(name: str) -> ScheduleFamily:
    """Return the family of this name. Raises ScheduleError that lists the known names."""
    if name not in FAMILIES:
        raise ScheduleError(
            "The schedule is unknown.",
            seen=repr(name),
            allowed=", ".join(sorted(FAMILIES)),
            next_step=suggest_name(name, FAMILIES),
        )
    return FAMILIES[name]


def family_facts(name: str) -> ScheduleFamily:
    """Return the family of this name; for an order that no family builds, the facts of any order."""
    return FAMILIES.get(name, _ANY_ORDER)


def register_family(source: ScheduleFamily | ModuleType) -> ScheduleFamily:
    """Add a family, or the family that a module defines, to `FAMILIES`, and return it.

    The planner, the simulator and the command line then use it like a built-in family. Families are sorted by the
    names of their modules, whatever the order of registration, so that a search tries them in one order everywhere. A
    `ScheduleFamily` is sorted by its own name. Raises ScheduleError for a name that another family has.
    """
    if isinstance(source, ScheduleFamily):
        family, origin = source, source.name
    else:
        defined = [field.name for field in fields(ScheduleFamily) if hasattr(source, field.name)]
        family, origin = ScheduleFamily(**{name: getattr(source, name) for name in defined}), source.__name__
    known_origin, known = _origins.get(family.name, (origin, family))
    if known_origin != origin or (known != family and isinstance(source, ScheduleFamily)):
        raise ScheduleError(
            "Two schedule families have one name.",
            where=origin,
            seen=family.name,
            allowed=f"a name other than {', '.join(sorted(_origins))}",
        )
    _origins[family.name] = (origin, family)
    _packages[family.name] = loading_package()
    _sort_families()
    return family


def remove_family(name: str) -> None:
    """Remove a family from `FAMILIES`, for tests of families. Raises ScheduleError that lists the known names."""
    find_family(name)
    del _origins[name]
    _sort_families()


def _sort_families() -> None:
    ordered = sorted(_origins.values(), key=lambda entry: entry[0].removesuffix(".family").rpartition(".")[2])
    _families.clear()
    _families.update({family.name: family for _, family in ordered})


def _wrong_order(
    subject: str, problem: ScheduleProblem, fault: str, seen: object | None, allowed: str | None
) -> ScheduleError:
    return ScheduleError(
        f"The {subject} builds an invalid order: {fault}",
        where=f"placement {','.join(map(str, problem.placement))}, {problem.microbatches} microbatches, "
        f"{problem.slices} slices",
        seen=seen,
        allowed=allowed,
        next_step="check the family with pipefit.testing.check_schedule_family",
    )


def _build_nothing(problem: ScheduleProblem) -> Schedule:
    raise AssertionError("an order written by hand has no family")


_ANY_ORDER = ScheduleFamily(name="", build=_build_nothing, is_fitted=True)

_origins: dict[str, tuple[str, ScheduleFamily]] = {}
"""Name of a family -> (its module, or its own name; the family)."""
_packages: dict[str, str] = {}
"""Name of a family -> the plug-in package that registered it, '' if none did."""
_families: dict[str, ScheduleFamily] = {}

FAMILIES: Mapping[str, ScheduleFamily] = MappingProxyType(_families)
"""Every family by its name."""
