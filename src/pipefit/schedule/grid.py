"""A schedule as a grid in time: a row a lane, a cell an action as wide as it takes, dots where the lane is idle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pipefit.cost.types import CostTable
from pipefit.schedule.actions import COMPUTE, Action, Schedule
from pipefit.schedule.compile import task_graph
from pipefit.schedule.problem import Edge, uniform_costs
from pipefit.schedule.times import Times, run

WIDEST = 4_000
"""Characters of a row beyond which times are drawn in proportion only."""

COLOURS = {
    "F": ("white on blue", "black on bright_blue"),
    "I": ("black on cyan", "black on bright_cyan"),
    "W": ("black on green", "black on bright_green"),
    "B": ("black on yellow", "black on bright_yellow"),
}
"""Of a lane's first stage, and of its later ones; all of them among the 16 that every terminal has."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of a row: an action, or idle time where `action` is None."""

    text: str
    action: Action | None


def grid_rows(
    schedule: Schedule, costs: CostTable | None = None, edges: tuple[Edge, ...] | None = None
) -> tuple[tuple[Cell, ...], ...]:
    """The cells of every lane's row. Without `costs`, F, I and W take one unit each and B two.

    Compute actions are shown. If all times are multiples of one unit, every column is that unit; otherwise
    a row has about `WIDEST / 16` characters and times are rounded to them.
    """
    costs = costs or uniform_costs(schedule.placement, edges)
    graph = task_graph(schedule, None if schedule.is_lowered else edges)
    times = run(graph, costs)
    placed = []
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
    crowded = schedule.stages > len(schedule.lanes)
    labels = {action: _label(action, crowded) for lane in placed for action, _, _ in lane}
    per_second = _scale(placed, labels, times)
    end = round(max((stop for lane in placed for _, _, stop in lane), default=0.0) * per_second)
    return tuple(_row(lane, labels, per_second, end) for lane in placed)


def draw_grid(
    schedule: Schedule,
    costs: CostTable | None = None,
    edges: tuple[Edge, ...] | None = None,
    colour: bool = False,
    held: Sequence[str] = (),
) -> str:
    """The grid as text; with `colour`, cells are set in the markup of rich, which its console prints in colour.

    `held` says for every lane how much memory it uses; it stands in a column before the cells.
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
        cells = "".join(_markup(cell, first[lane]) if colour else cell.text for cell in row)
        lines.append(f"{labels[lane].ljust(len(labels[-1]))}  {cells}".rstrip())
    return "\n".join(lines)


def _label(action: Action, crowded: bool) -> str:
    """`F3`; with the stage before it, `7F3`, where a lane holds several."""
    text = f"{action.kind}{action.microbatch}" + (f"/{action.slice}" if action.slice else "")
    return f"{action.stage}{text}" if crowded else text


def _scale(placed: Sequence[Sequence[tuple[Action, float, float]]], labels: dict[Action, str], times: Times) -> float:
    """Characters per second: enough for every label where the times have a common unit."""
    spans = [(labels[action], start, stop) for lane in placed for action, start, stop in lane if stop > start]
    end = max((stop for _, _, stop in spans), default=1.0)
    unit = _common_unit({round(value, 12) for _, start, stop in spans for value in (start, stop - start)})
    if unit is not None:
        width = max(math.ceil((len(label) + 1) / round((stop - start) / unit)) for label, start, stop in spans)
        if end / unit * width <= WIDEST:
            return width / unit
    return WIDEST / 16 / end


def _common_unit(values: set[float]) -> float | None:
    """The largest number that all values are multiples of, if there is one worth drawing."""
    exact = [Fraction(value).limit_denominator(10_000) for value in values if value > 0]
    if not exact or any(abs(float(e) - v) > 1e-9 for e, v in zip(exact, [v for v in values if v > 0], strict=True)):
        return None
    denominator = math.lcm(*(value.denominator for value in exact))
    return math.gcd(*(int(value * denominator) for value in exact)) / denominator


def _row(
    lane: Sequence[tuple[Action, float, float]], labels: dict[Action, str], per_second: float, end: int
) -> tuple[Cell, ...]:
    cells, reached = [], 0
    for action, start, stop in lane:
        first, last = round(start * per_second), round(stop * per_second)
        if last <= first:
            continue
        if first > reached:
            cells.append(Cell("." * (first - reached - 1) + " ", None))
        width = last - first - 1
        cells.append(Cell(labels[action][:width].ljust(width, "-") + " ", action))
        reached = last
    if end > reached:
        cells.append(Cell("." * (end - reached - 1) + " ", None))
    return tuple(cells)


def _markup(cell: Cell, first: int) -> str:
    if cell.action is None:
        return cell.text
    return f"[{COLOURS[cell.action.kind][cell.action.stage != first]}]{cell.text[:-1]}[/] "
