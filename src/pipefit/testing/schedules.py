"""The conformance suite of a schedule family; `check_schedule_family` runs all of it.

Every check builds orders of the family and compares them with the rules of schedules, with the simulator, or with the
facts that the family states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np

from pipefit.errors import ScheduleError
from pipefit.schedule import (
    Action,
    Edge,
    Schedule,
    ScheduleFamily,
    ScheduleProblem,
    check_schedule,
    find_deadlock,
    format_lanes,
    linear_placement,
    lower_schedule,
    parse_lanes,
    register_family,
    remove_family,
    uniform_costs,
    vee_placement,
)
from pipefit.schedule.problem import looped_placement
from pipefit.schedule.text.csv_io import from_csv, to_csv
from pipefit.schedule.text.grid import draw_grid, grid_rows
from pipefit.simulate import simulate_schedule
from pipefit.testing.labelled import call_labelled, require

SHAPES = (
    (1, 1, 1),
    (1, 5, 2),
    (2, 1, 1),
    (2, 7, 1),
    (3, 2, 3),
    (4, 4, 1),
    (4, 9, 2),
    (7, 3, 1),
    (8, 16, 1),
    (16, 5, 4),
)
"""(devices, microbatches, slices) of the orders that are built."""

PLACEMENTS = (linear_placement(3), vee_placement(3), looped_placement(3), (0, 0, 1, 2, 1), (2, 1, 0))
"""Stage placements for which a family builds an order or raises an error."""

MODULE_EDGES = ((0, 1, ""), (1, 4, ""), (2, 3, ""), (3, 4, "image"), (4, 5, ""), (0, 5, "skip"))
"""Edges of two modules, stages 0 to 1 and 2 to 3, that both feed stage 4, and of a skip from stage 0 to stage 5."""


@contextmanager
def temporary_family(family: ScheduleFamily) -> Iterator[ScheduleFamily]:
    """Register a schedule family within a `with` block. Raises ScheduleError for a name that another family has."""
    register_family(family)
    try:
        yield family
    finally:
        remove_family(family.name)


def check_schedule_family(family: ScheduleFamily) -> None:
    """Raise AssertionError if a schedule family violates a check of this module. It need not be registered."""
    check_family_fields(family)
    for shape in SHAPES:
        check_family_orders(family, shape)
    for placement in PLACEMENTS:
        check_family_placements(family, placement)
    check_family_graphs(family)
    check_family_facts(family)
    check_family_text(family)
    for devices in (1, 2, 5):
        for transfer_s in (0.0, 0.4):
            check_family_times(family, devices, transfer_s)


def check_family_fields(family: ScheduleFamily) -> None:
    """Raise AssertionError unless the fields of the family, and the results of its functions, have the types of
    `ScheduleFamily`."""
    require(isinstance(family, ScheduleFamily), f"a ScheduleFamily, not {type(family).__name__}")
    require(isinstance(family.name, str) and family.name != "", f"the name is a text, not {family.name!r}")
    for devices in range(1, 9):
        placement = _fact(family, "placement", tuple, devices)
        lanes = all(isinstance(lane, int) for lane in placement) and {*placement} == {*range(devices)}
        require(lanes, f"{family.name}: placement({devices}) names the lanes 0 to {devices - 1}, not {placement}")
        _fact(family, "least_units", int, devices)
        _fact(family, "in_flight", int, 0, devices, 1, 2 * devices)
        _fact(family, "warm_up", int, 0, devices, 1, 2 * devices, 1)
        if family.idle is not None:
            seconds = np.ones(1)
            idle_s = np.asarray(_fact(family, "idle", object, devices, seconds, seconds, seconds))
            numbers = idle_s.dtype.kind in "if" and bool(np.isfinite(idle_s).all())
            require(numbers, f"{family.name}: idle returns seconds, not {idle_s!r}")


def check_family_orders(family: ScheduleFamily, shape: tuple[int, int, int]) -> None:
    """Raise AssertionError unless the family builds a valid order for (devices, microbatches, slices), or refuses it.

    The order is repeatable, equal after parsing its text, and free of deadlocks once lowered. With fewer units than
    `least_units` the family raises ScheduleError that states the minimum.
    """
    devices, microbatches, slices = shape
    problem = ScheduleProblem(placement=family.placement(devices), microbatches=microbatches, slices=slices)
    where = f"{family.name} on {devices} devices, {microbatches} microbatches, {slices} slices"
    if microbatches * slices < family.least_units(devices):
        text = _refusal_text(family, problem, where)
        require(text is not None, f"{where}: builds an order with fewer units than least_units")
        require(f"seen: {microbatches} microbatches" in str(text), f"{where}: the error names the microbatches")
        require("allowed: at least" in str(text), f"{where}: the error names the minimum")
        return
    schedule = _build_unless_refused(family, problem, where)
    if schedule is None:
        return
    require(schedule.name == family.name, f"{where}: the order has the family's name, not {schedule.name!r}")
    sizes = (schedule.placement, schedule.microbatches, schedule.slices)
    require(sizes == (problem.placement, microbatches, slices), f"{where}: the order has the sizes of the problem")
    require(_build(family, problem, where) == schedule, f"{where}: a second call builds another order")
    _check_valid(schedule, where)
    lowered = lower_schedule(schedule)
    require(find_deadlock(lowered) is None, f"{where}: the lowered order has a deadlock")
    for order in (schedule, lowered):
        _check_valid(order, where)
        require(parse_lanes(format_lanes(order.lanes)) == order.lanes, f"{where}: the text of the order is parsed back")


def check_family_graphs(family: ScheduleFamily) -> None:
    """Raise AssertionError unless the family follows a DAG of six stages (`MODULE_EDGES`).

    A family whose placement never has six stages, on up to six lanes, is not checked.
    """
    placements = [family.placement(devices) for devices in range(1, 7)]
    placement = next((lanes for lanes in placements if len(lanes) == 6), None)
    if placement is None:
        return
    where = f"{family.name} on a DAG of stages"
    schedule = _build_some(
        family, lambda count: ScheduleProblem(placement=placement, microbatches=count, edges=MODULE_EDGES), 7, where
    )
    _check_valid(schedule, where, MODULE_EDGES)
    require(find_deadlock(lower_schedule(schedule, MODULE_EDGES)) is None, f"{where}: the lowered order has a deadlock")


def check_family_placements(family: ScheduleFamily, placement: tuple[int, ...]) -> None:
    """Raise AssertionError unless the family builds a valid order for a placement or refuses it.

    The error names the placements that the family supports, and an alternative.
    """
    problem = ScheduleProblem(placement=placement, microbatches=6)
    where = f"{family.name} on the placement {','.join(map(str, placement))}"
    try:
        schedule = _build(family, problem, where)
    except ScheduleError as error:
        if _is_refusal_of_size(error, problem, where):
            return
        require(placement != family.placement(max(placement) + 1), f"{where}: the family refuses its own placement")
        for part in ("is written for", "where: placement", "use gpipe, which takes any"):
            require(part in error.full_text(), f"{where}: the error says {part!r}")
        return
    _check_valid(schedule, where)
    require(schedule.placement == placement, f"{where}: the order has another placement")


def check_family_facts(family: ScheduleFamily) -> None:
    """Raise AssertionError if an order contradicts the facts that the planner reads from the family.

    No lane holds fewer stage-microbatches than `in_flight`, no lane runs fewer forwards before its first backward than
    `warm_up`, and with `fused` every backward is a B. Orders have up to 8 lanes.
    """
    for lanes in range(1, 9):
        placement = family.placement(lanes)
        for microbatches in range(1, 3 * lanes + 2):
            for slices in (1, 3) if microbatches % lanes < 2 and not family.is_fitted else (1,):
                if microbatches * slices >= family.least_units(lanes):
                    _check_lane_facts(
                        family, ScheduleProblem(placement=placement, microbatches=microbatches, slices=slices)
                    )


def _check_lane_facts(family: ScheduleFamily, problem: ScheduleProblem) -> None:
    lanes, placement = problem.num_lanes, problem.placement
    subject = f"{family.name}, {lanes} lanes, {problem.microbatches} microbatches, {problem.slices} slices"
    schedule = _build_unless_refused(family, problem, subject)
    if schedule is None:
        return
    for lane, actions in enumerate(schedule.lanes):
        where = f"{family.name}, lane {lane} of {lanes}, {problem.microbatches} microbatches, {problem.slices} slices"
        turns = placement.count(lane)
        kinds = [action.kind for action in actions]
        if problem.slices == 1:
            held = max(accumulate((kind == "F") - (kind in ("B", "I")) for kind in kinds))
            least = _fact(family, "in_flight", int, lane, lanes, turns, problem.microbatches)
            require(held >= least, f"{where}: in_flight is {least}, and the order holds {held}")
        ahead = next((index for index, kind in enumerate(kinds) if kind != "F"), len(kinds))
        warm_up = _fact(family, "warm_up", int, lane, lanes, turns, problem.microbatches, problem.slices)
        require(ahead >= warm_up, f"{where}: warm_up is {warm_up}, and the order runs {ahead} forwards")
        require(not family.fused or {*kinds} == {"F", "B"}, f"{where}: fused, and a backward is split")


def check_family_text(family: ScheduleFamily) -> None:
    """Raise AssertionError unless an order survives CSV and is drawn with every action once."""
    placement, where = family.placement(8), f"{family.name} on 8 devices"
    schedule = _build_some(family, lambda count: ScheduleProblem(placement=placement, microbatches=count), 16, where)
    require(from_csv(to_csv(schedule), family.name) == schedule, f"{family.name}: CSV is read back")
    require(to_csv(lower_schedule(schedule)) == to_csv(schedule), f"{family.name}: CSV of the lowered order is equal")
    rows = [[cell for cell in row if cell.action is not None] for row in grid_rows(schedule)]
    drawn = tuple(tuple(cell.action for cell in row) for row in rows)
    require(drawn == schedule.lanes, f"{family.name}: the drawing has every action once, in order")
    require(len(draw_grid(schedule).splitlines()) == 8, f"{family.name}: the drawing has one line a lane")


def check_family_times(family: ScheduleFamily, devices: int, transfer_s: float) -> None:
    """Raise AssertionError unless lowering keeps the simulated time, with transfers of `transfer_s` seconds and every
    F, I and W of one second."""
    placement, where = family.placement(devices), f"{family.name} on {devices} devices"
    costs = uniform_costs(placement, transfer_s=transfer_s, port_s=transfer_s / 2)
    computed = _build_some(
        family, lambda count: ScheduleProblem(placement=placement, microbatches=count, costs=costs), 11, where
    )
    lowered = lower_schedule(computed, costs=costs)
    times_s = [simulate_schedule(order, costs).makespan_s for order in (lowered, computed)]
    require(times_s[0] == times_s[1], f"{where}: lowering changes the time {times_s}")


def _build(family: ScheduleFamily, problem: ScheduleProblem, where: str) -> Schedule:
    """Return the family's order, of the right types but unchecked. Raises ScheduleError if the family refuses."""
    schedule = call_labelled(f"{where}: build", family.build, problem, passes=ScheduleError)
    require(isinstance(schedule, Schedule), f"{where}: build returns {type(schedule).__name__}, not a Schedule")
    lanes = schedule.lanes
    typed = isinstance(lanes, tuple) and all(isinstance(lane, tuple) for lane in lanes)
    require(typed, f"{where}: Schedule.lanes is a tuple of tuples")
    actions = all(isinstance(action, Action) for lane in lanes for action in lane)
    require(actions, f"{where}: Schedule.lanes holds objects that are no Action")
    return schedule


def _build_unless_refused(family: ScheduleFamily, problem: ScheduleProblem, where: str) -> Schedule | None:
    """Return the family's order, None if the family refuses the number of microbatches or slices."""
    try:
        return _build(family, problem, where)
    except ScheduleError as error:
        refused = _is_refusal_of_size(error, problem, where)
        require(refused, f"{where}: refused without where='microbatches' or 'slices'. {error.full_text()}")
        return None


def _build_some(
    family: ScheduleFamily, make_problem: Callable[[int], ScheduleProblem], least: int, where: str
) -> Schedule:
    """Return an order of `least` microbatches, or of the next number that the family does not refuse."""
    for microbatches in range(least, 4 * least + 8):
        schedule = _build_unless_refused(family, make_problem(microbatches), where)
        if schedule is not None:
            return schedule
    raise AssertionError(f"{where}: refuses {least} to {4 * least + 7} microbatches")


def _is_refusal_of_size(error: ScheduleError, problem: ScheduleProblem, where: str) -> bool:
    """Return True if a family refuses the number of microbatches or slices, in the words of the how-to page."""
    if error.where not in ("microbatches", "slices"):
        return False
    require(bool(error.allowed), f"{where}: the error states the allowed values. {error.full_text()}")
    require(error.where != "slices" or problem.slices > 1, f"{where}: a single slice is refused")
    least = problem.slices == 1 and str(error.allowed).startswith("at least")
    require(not least, f"{where}: least_units does not state this minimum. {error.full_text()}")
    return True


def _fact(family: ScheduleFamily, field: str, returns: type, *arguments: Any) -> Any:
    """Return the result of a family's function, which has a given type."""
    call = f"{family.name}: {field}({', '.join(map(str, arguments))})"
    value = call_labelled(call, getattr(family, field), *arguments, passes=ScheduleError)
    require(isinstance(value, returns), f"{call} returns {value!r}, not a {returns.__name__}")
    return value


def _check_valid(schedule: Schedule, where: str, edges: Sequence[Edge] | None = None) -> None:
    try:
        check_schedule(schedule, edges)
    except ScheduleError as error:
        raise AssertionError(f"{where}: {error.full_text()}") from error


def _refusal_text(family: ScheduleFamily, problem: ScheduleProblem, where: str) -> str | None:
    """Return the text of the error with which a family refuses a problem; None if it builds an order."""
    try:
        _build(family, problem, where)
    except ScheduleError as error:
        return error.full_text()
    return None
