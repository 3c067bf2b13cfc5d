"""Drawings of faults in a schedule: the cells around the faulty one, lanes down, steps across, with an arrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Action

E = TypeVar("E", bound=ScheduleError)

Cell = tuple[int, int]
"""(lane, step): the step-th action of the lane."""


def bad_cell_error(
    error: type[E],
    what: str,
    lanes: Sequence[Sequence[Action]],
    cell: Cell,
    *,
    allowed: str | None = None,
    next_step: str | None = None,
    notes: Mapping[int, str] | None = None,
    steps: Mapping[int, int] | None = None,
) -> E:
    """Build the error with the text `what`, the cell's position and a drawing. See `draw_cells` for `notes` and
    `steps`."""
    lane, step = cell
    there = lanes[lane][step] if step < len(lanes[lane]) else "the end of the lane"
    return error(
        f"{what}\n{draw_cells(lanes, cell, notes=notes, steps=steps)}",
        where=f"lane {lane}, step {step}",
        seen=there,
        allowed=allowed,
        next_step=next_step,
    )


def draw_cells(
    lanes: Sequence[Sequence[Action]],
    cell: Cell,
    *,
    notes: Mapping[int, str] | None = None,
    steps: Mapping[int, int] | None = None,
    around: int = 4,
) -> str:
    """Draw the neighbourhood of `cell` as text.

    Every lane shows the steps around the step of `cell`, or, with `steps`, around the lane's own step, which is then
    marked `[...]`. The cell itself is marked `>...<` and has an arrow below it. `notes` are written at the end of
    lanes.
    """
    bad_lane, bad_step = cell
    centre = dict.fromkeys(range(len(lanes)), bad_step) | dict(steps or {})
    centre[bad_lane] = bad_step
    shown = [lane for lane in range(len(lanes)) if abs(lane - bad_lane) <= 8 or lane in (steps or {})][:24]
    rows: dict[int, list[str]] = {}
    for lane in shown:
        near = range(centre[lane] - around, centre[lane] + around + 1)
        rows[lane] = [_marked_text(lanes, (lane, step), cell, steps or {}) for step in near]
    widths = [max(len(row[column]) for row in rows.values()) for column in range(2 * around + 1)]
    label = len(f"lane {shown[-1]}")
    lines = []
    if not steps:
        first = bad_step - around
        used = [any(row[column] for row in rows.values()) for column in range(2 * around + 1)]
        numbers = [str(first + column) if here else "" for column, here in enumerate(used)]
        widths = [max(width, len(number)) for width, number in zip(widths, numbers, strict=True)]
        lines.append(" ".join(["step".ljust(label), *_pad_columns(numbers, widths)]).rstrip())
    if shown[0] > 0:
        lines.append("...")
    for lane in shown:
        note = f"   {notes[lane]}" if notes and lane in notes else ""
        lines.append(" ".join([f"lane {lane}".ljust(label), *_pad_columns(rows[lane], widths)]).rstrip() + note)
        if lane == bad_lane:
            indent = label + 1 + sum(width + 1 for width in widths[:around])
            lines.append(" " * indent + "^" * len(rows[lane][around]))
    if shown[-1] < len(lanes) - 1:
        lines.append("...")
    return "\n".join("  " + line for line in lines)


def _marked_text(lanes: Sequence[Sequence[Action]], shown: Cell, cell: Cell, steps: Mapping[int, int]) -> str:
    """Return the text of a cell, with marks around it if it is `cell` or at its lane's own step."""
    lane, step = shown
    text = _cell_text(lanes[lane], step)
    if shown == cell:
        return f">{text}<"
    return f"[{text}]" if steps.get(lane) == step else text


def _cell_text(lane: Sequence[Action], step: int) -> str:
    if 0 <= step < len(lane):
        return str(lane[step])
    return "(end)" if step == len(lane) else ""


def _pad_columns(texts: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [text.ljust(width) for text, width in zip(texts, widths, strict=True)]
