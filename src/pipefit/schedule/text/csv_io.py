"""Schedules in the compute-only CSV format of `torch.distributed.pipelining`: one row per lane, one cell per action.

That runtime derives the placement from the rows and inserts transfers itself. Its grammar has no slices (it silently
reads `0F0/2` as `0F0`), so schedules with slices are refused.
"""

from __future__ import annotations

import csv
import io

from pipefit.errors import ScheduleError
from pipefit.schedule.actions import COMPUTE, Action, Schedule, parse_action
from pipefit.schedule.check.rules import check_schedule


def to_csv(schedule: Schedule) -> str:
    """Return the compute actions of a schedule, computed or lowered. Raises ScheduleError if it has slices."""
    if schedule.slices > 1:
        raise ScheduleError(
            "A schedule with slices cannot be written as CSV: PyTorch's grammar has none and would misread it.",
            where=schedule.name,
            seen=f"{schedule.slices} slices per microbatch",
            allowed="1",
            next_step="write it as JSON instead",
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for lane in schedule.lanes:
        writer.writerow([str(action) for action in lane if action.kind in COMPUTE])
    return text.getvalue()


def from_csv(text: str, name: str = "csv", where: str = "csv") -> Schedule:
    """Return the computed schedule of the rows. Blank cells are idle slots and are ignored.

    Raises ScheduleError with row and column for a cell that is no compute action, and the errors of `check_schedule`.
    """
    lanes = []
    for number, row in enumerate(csv.reader(io.StringIO(text)), start=1):
        cells = ((column, cell.strip()) for column, cell in enumerate(row, start=1))
        lanes.append(
            tuple(_parse_cell(cell, f"{where}, row {number}, column {column}") for column, cell in cells if cell)
        )
    placement: dict[int, int] = {}
    for lane, actions in enumerate(lanes):
        for action in actions:
            if placement.setdefault(action.stage, lane) != lane:
                raise ScheduleError(
                    "A stage stands in two rows.",
                    where=where,
                    seen=f"stage {action.stage} in rows {placement[action.stage] + 1} and {lane + 1}",
                )
    if not placement or sorted(placement) != list(range(len(placement))):
        raise ScheduleError(
            "The stages are not numbered from 0 without gaps.", where=where, seen=sorted(placement) or "no actions"
        )
    schedule = Schedule(
        name=name,
        placement=tuple(placement[stage] for stage in range(len(placement))),
        microbatches=1 + max(action.microbatch for lane in lanes for action in lane),
        slices=1,
        lanes=tuple(lanes),
    )
    check_schedule(schedule)
    return schedule


def _parse_cell(text: str, where: str) -> Action:
    try:
        action = parse_action(text)
    except ScheduleError as error:
        raise ScheduleError(error.what, where=where, seen=error.seen, allowed="0F0, 2I3, 1W4, 0B2") from None
    if action.kind not in COMPUTE or action.slice or action.what or action.peer >= 0:
        raise ScheduleError(
            "Only compute actions without slices stand in a CSV.", where=where, seen=repr(text), allowed="F, I, W, B"
        )
    return action
