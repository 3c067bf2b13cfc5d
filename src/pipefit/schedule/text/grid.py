"""A schedule as a grid over time: one row per lane, a cell per action as wide as its duration, dots for idle time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from pipefit.cost.types import CostTable
from pipefit.schedule.actions import COMPUTE, Action, Schedule
from pipefit.schedule.problem import Edge, uniform_costs
from pipefit.schedule.taskgraph.contended import evaluate_schedule

WIDEST = 4_000
"""Row width in characters beyond which cells are drawn in proportion to time only, without full labels."""

Placed = tuple[Action, float, float]
"""A compute action, its start and its end in seconds."""

COLOURS = {
    "F": ("white on blue", "black on bright_blue"),
    "I": ("black on cyan", "black on bright_cyan"),
    "W": ("black on green", "black on bright_green"),
    "B": ("black on yellow", "black on bright_yellow"),
}
"""Colours of a lane's first stage and of its later stages, from the 16 colours that every terminal has."""


@dataclass(frozen=True, slots=True)
class GridCell:
    """One cell of a row: an action, or idle time if `action` is None."""

    text: str
    action: Action | None


def grid_rows(
    schedule: Schedule, costs: CostTable | None = None, edges: tuple[Edge, ...] | None = None
) -> tuple[tuple[GridCell, ...], ...]:
    """Return the cells of every lane's row. Without `costs`, F, I and W take one unit each and B two.

    Only compute actions are shown, each at least as wide as its label. If all times are multiples of one unit, every
    column is that unit; otherwise a row has about `WIDEST / 16` characters and times are rounded. If the labels alone
    would make a row wider than `WIDEST`, actions whose label does not fit show only their letter.
    """
    costs = costs or uniform_costs(schedule.placement, edges)
    graph, times = evaluate_schedule(schedule, None if schedule.is_lowered else edges, costs)
    placed: list[list[Placed]] = []
    for lane, actions in enumerate(schedule.lanes):
        offset = int(graph.table.offset[lane])
        tasks = [int(graph.task[offset + step]) for step in range(len(actions))]
        placed.append(
            [
                (action, float(times.start_s[task]), float(times.stop_s[task]))
                for action, task in zip(actions, tasks, strict=True)
                if action.kind in COMPUTE
            ]
        )
    crowded = schedule.num_stages > len(schedule.lanes)
    labels = {action: _action_label(action, crowded) for lane in placed for action, _, _ in lane}
    columns, end = _column_bounds(placed, {action: len(label) + 1 for action, label in labels.items()})
    if end > WIDEST:
        columns, end = _column_bounds(placed, dict.fromkeys(labels, 2))
    return tuple(_draw_row(lane, labels, columns, end) for lane in placed)


def draw_grid(
    schedule: Schedule,
    costs: CostTable | None = None,
    edges: tuple[Edge, ...] | None = None,
    colour: bool = False,
    held: Sequence[str] = (),
) -> str:
    """Return the grid as text; with `colour`, cells are set in the markup of rich, which its console prints in colour.

    `held` is a text for every lane with its memory; it stands in a column before the cells.
    """
    rows = grid_rows(schedule, costs, edges)
    first = {lane: stage for stage, lane in reversed(list(enumerate(schedule.placement)))}
    labels = [f"lane {lane}" for lane in range(len(rows))]
    lines = []
    if held:
        wide = max(map(len, ("held", *held)))
        labels = [
            f"{label.ljust(len(labels[-1]))}  {text.rjust(wide)}" for label, text in zip(labels, held, strict=True)
        ]
        lines.append("held".rjust(len(labels[-1])))
    for lane, row in enumerate(rows):
        cells = "".join(_cell_markup(cell, first[lane]) if colour else cell.text for cell in row)
        lines.append(f"{labels[lane].ljust(len(labels[-1]))}  {cells}".rstrip())
    return "\n".join(lines)


def _action_label(action: Action, crowded: bool) -> str:
    """Return the label of an action: `F3`, or `7F3` with the stage if a lane holds several."""
    text = f"{action.kind}{action.microbatch}" + (f"/{action.slice}" if action.slice else "")
    return f"{action.stage}{text}" if crowded else text


def _column_bounds(
    placed: Sequence[Sequence[Placed]], least: Mapping[Action, int]
) -> tuple[dict[Action, tuple[int, int]], int]:
    """Return (first column, column after the last) of every action, and the width of all.

    Columns are in proportion to time, except that everything after an action that would be narrower than `least` is
    moved to the right. An action of negligible duration is drawn at its position in the lane.
    """
    end_s = max((stop for lane in placed for _, _, stop in lane), default=0.0) or 1.0
    width = _row_width(placed, least, end_s)
    events = sorted(
        (start, stop, lane, step) for lane, row in enumerate(placed) for step, (_, start, stop) in enumerate(row)
    )
    starting = {time: list(group) for time, group in groupby(events, key=lambda event: event[0])}
    columns: dict[Action, tuple[int, int]] = {}
    ends: dict[float, list[Action]] = {}
    reached = [0] * len(placed)
    shift = floor = 0
    for time in sorted({value for start, stop, _, _ in events for value in (start, stop)}):
        wanted = round(time / end_s * width) + shift
        column = max(wanted, floor, *(columns[ending][0] + least[ending] for ending in ends.get(time, ())), 0)
        shift += column - wanted
        for ending in ends.get(time, ()):
            columns[ending] = columns[ending][0], column
        for _, stop, lane, step in starting.get(time, ()):
            action = placed[lane][step][0]
            first = max(column, reached[lane])
            columns[action] = first, first + least[action]
            if stop > time:
                ends.setdefault(stop, []).append(action)
            else:
                floor = max(floor, first + least[action])
            reached[lane] = first + least[action]
    return columns, max((last for _, last in columns.values()), default=0)


def _row_width(placed: Sequence[Sequence[Placed]], least: Mapping[Action, int], end_s: float) -> float:
    """Return the characters of a row: enough for every label if the times have a common unit."""
    spans = [(least[action], start, stop) for lane in placed for action, start, stop in lane]
    unit = _common_unit({start for _, start, _ in spans}, {stop - start for _, start, stop in spans})
    if unit is not None:
        width = max(math.ceil(wide / round((stop - start) / unit)) for wide, start, stop in spans)
        if end_s / unit * width <= WIDEST:
            return end_s / unit * width
    return WIDEST / 16


def _common_unit(starts: set[float], lengths: set[float]) -> float | None:
    """Return the largest number that divides all values, or None if there is none large enough to draw."""
    from fractions import Fraction

    values = sorted({round(value, 12) for value in (*starts, *lengths)} - {0.0})
    if not values or any(round(length, 12) <= 0 for length in lengths):
        return None
    exact = [Fraction(value).limit_denominator(10_000) for value in values]
    if any(abs(float(e) - v) > 1e-9 * min(1.0, v) for e, v in zip(exact, values, strict=True)):
        return None
    denominator = math.lcm(*(value.denominator for value in exact))
    return math.gcd(*(int(value * denominator) for value in exact)) / denominator or None


def _draw_row(
    lane: Sequence[Placed], labels: Mapping[Action, str], columns: Mapping[Action, tuple[int, int]], end: int
) -> tuple[GridCell, ...]:
    cells, reached = [], 0
    for action, _, _ in lane:
        first, last = columns[action]
        if first > reached:
            cells.append(GridCell("." * (first - reached - 1) + " ", None))
        width = last - first - 1
        text = labels[action] if len(labels[action]) <= width else action.kind
        cells.append(GridCell(text.ljust(width, "-") + " ", action))
        reached = last
    if end > reached:
        cells.append(GridCell("." * (end - reached - 1) + " ", None))
    return tuple(cells)


def _cell_markup(cell: GridCell, first: int) -> str:
    if cell.action is None:
        return cell.text
    return f"[{COLOURS[cell.action.kind][cell.action.stage != first]}]{cell.text[:-1]}[/] "
