"""The conformance suite of a schedule family; `check_schedule_family` runs all of it.

Every check builds orders of the family and compares them with the rules of schedules, with the simulator, or with the
facts that the family states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

from pipefit.errors import ScheduleError
from pipefit.schedule import (
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


def check_family_orders(family: ScheduleFamily, shape: tuple[int, int, int]) -> None:
    """Raise AssertionError unless the family builds a valid order for (devices, microbatches, slices).

    The order is repeatable, equal after parsing its text, and free of deadlocks once lowered. With fewer units than
    `least_units` the family raises ScheduleError that states the minimum.
    """
    devices, microbatches, slices = shape
    problem = ScheduleProblem(placement=family.placement(devices), microbatches=microbatches, slices=slices)
    where = f"{family.name} on {devices} devices, {microbatches} microbatches, {slices} slices"
    if microbatches * slices < family.least_units(devices):
        text = _refusal_text(family, problem)
        _require(text is not None, f"{where}: builds an order with fewer units than least_units")
        _require(f"seen: {microbatches} microbatches" in str(text), f"{where}: the error names the microbatches")
        _require("allowed: at least" in str(text), f"{where}: the error names the minimum")
        return
    schedule = family(problem)
    _require(schedule.name == family.name, f"{where}: the order has the family's name, not {schedule.name!r}")
    sizes = (schedule.placement, schedule.microbatches, schedule.slices)
    _require(sizes == (problem.placement, microbatches, slices), f"{where}: the order has the sizes of the problem")
    _require(family(problem) == schedule, f"{where}: a second call builds another order")
    lowered = lower_schedule(schedule)
    _require(find_deadlock(lowered) is None, f"{where}: the lowered order has a deadlock")
    for order in (schedule, lowered):
        _check_valid(order, where)
        _require(
            parse_lanes(format_lanes(order.lanes)) == order.lanes, f"{where}: the text of the order is parsed back"
        )


def check_family_graphs(family: ScheduleFamily) -> None:
    """Raise AssertionError unless the family follows a DAG of six stages (`MODULE_EDGES`).

    A family whose placement never has six stages, on up to six lanes, is not checked.
    """
    placements = [family.placement(devices) for devices in range(1, 7)]
    placement = next((lanes for lanes in placements if len(lanes) == 6), None)
    if placement is None:
        return
    schedule = family(ScheduleProblem(placement=placement, microbatches=7, edges=MODULE_EDGES))
    where = f"{family.name} on a DAG of stages"
    try:
        check_schedule(schedule, MODULE_EDGES)
    except ScheduleError as error:
        raise AssertionError(f"{where}: {error.full_text()}") from error
    _require(
        find_deadlock(lower_schedule(schedule, MODULE_EDGES)) is None, f"{where}: the lowered order has a deadlock"
    )


def check_family_placements(family: ScheduleFamily, placement: tuple[int, ...]) -> None:
    """Raise AssertionError unless the family builds a valid order for a placement or refuses it.

    The error names the placements that the family supports, and an alternative.
    """
    problem = ScheduleProblem(placement=placement, microbatches=6)
    where = f"{family.name} on the placement {','.join(map(str, placement))}"
    text = _refusal_text(family, problem)
    if text is None:
        schedule = family(problem)
        _check_valid(schedule, where)
        _require(schedule.placement == placement, f"{where}: the order has another placement")
        return
    _require(placement != family.placement(max(placement) + 1), f"{where}: the family refuses its own placement")
    for part in ("is written for", "where: placement", "use gpipe, which takes any"):
        _require(part in text, f"{where}: the error says {part!r}")


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
    for lane, actions in enumerate(family(problem).lanes):
        where = f"{family.name}, lane {lane} of {lanes}, {problem.microbatches} microbatches, {problem.slices} slices"
        turns = placement.count(lane)
        kinds = [action.kind for action in actions]
        if problem.slices == 1:
            held = max(accumulate((kind == "F") - (kind in ("B", "I")) for kind in kinds))
            least = family.in_flight(lane, lanes, turns, problem.microbatches)
            _require(held >= least, f"{where}: in_flight is {least}, and the order holds {held}")
        ahead = next(index for index, kind in enumerate(kinds) if kind != "F")
        warm_up = family.warm_up(lane, lanes, turns, problem.microbatches, problem.slices)
        _require(ahead >= warm_up, f"{where}: warm_up is {warm_up}, and the order runs {ahead} forwards")
        _require(not family.fused or {*kinds} == {"F", "B"}, f"{where}: fused, and a backward is split")


def check_family_text(family: ScheduleFamily) -> None:
    """Raise AssertionError unless an order survives CSV and is drawn with every action once."""
    schedule = family(ScheduleProblem(placement=family.placement(8), microbatches=16))
    _require(from_csv(to_csv(schedule), family.name) == schedule, f"{family.name}: CSV is read back")
    _require(to_csv(lower_schedule(schedule)) == to_csv(schedule), f"{family.name}: CSV of the lowered order is equal")
    rows = [[cell for cell in row if cell.action is not None] for row in grid_rows(schedule)]
    drawn = tuple(tuple(cell.action for cell in row) for row in rows)
    _require(drawn == schedule.lanes, f"{family.name}: the drawing has every action once, in order")
    _require(len(draw_grid(schedule).splitlines()) == 8, f"{family.name}: the drawing has one line a lane")


def check_family_times(family: ScheduleFamily, devices: int, transfer_s: float) -> None:
    """Raise AssertionError unless lowering keeps the simulated time, with transfers of `transfer_s` seconds and every
    F, I and W of one second."""
    placement = family.placement(devices)
    costs = uniform_costs(placement, transfer_s=transfer_s, port_s=transfer_s / 2)
    computed = family(ScheduleProblem(placement=placement, microbatches=11, costs=costs))
    lowered = lower_schedule(computed, costs=costs)
    times_s = [simulate_schedule(order, costs).makespan_s for order in (lowered, computed)]
    _require(times_s[0] == times_s[1], f"{family.name} on {devices} devices: lowering changes the time {times_s}")


def _check_valid(schedule: Schedule, where: str) -> None:
    try:
        check_schedule(schedule)
    except ScheduleError as error:
        raise AssertionError(f"{where}: {error.full_text()}") from error


def _refusal_text(family: ScheduleFamily, problem: ScheduleProblem) -> str | None:
    """Return the text of the error with which a family refuses a problem; None if it builds an order."""
    try:
        family(problem)
    except ScheduleError as error:
        return error.full_text()
    return None


def _require(condition: bool, requirement: str) -> None:
    if not condition:
        raise AssertionError(requirement)
