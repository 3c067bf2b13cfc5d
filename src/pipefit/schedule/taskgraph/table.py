"""A schedule as columns of small integers, read by the task graph compiler and other array code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Ints
from pipefit.schedule.actions import Schedule
from pipefit.schedule.problem import Edge

F, I, W, B, SEND_F, SEND_B, RECV_F, RECV_B, REDUCE, GATHER, NORM, STEP, FREE, BARRIER = range(14)  # noqa: E741
CODE = {
    "F": F,
    "I": I,
    "W": W,
    "B": B,
    "SEND_F": SEND_F,
    "SEND_B": SEND_B,
    "RECV_F": RECV_F,
    "RECV_B": RECV_B,
    "REDUCE": REDUCE,
    "GATHER": GATHER,
    "NORM": NORM,
    "STEP": STEP,
    "FREE": FREE,
}
"""Small integers for the kinds; compute kinds come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTable:
    """A schedule as columns: one entry per action, lane after lane."""

    kind: Ints
    stage: Ints
    microbatch: Ints
    slice: Ints
    edge: Ints
    "Index into `edges` for transfers, else -1."
    plain: NDArray[np.bool_]
    "Whether `what` is empty."
    lane: Ints
    offset: Ints
    "The first row of each lane, and the total number of rows."
    edges: tuple[Edge, ...]
    "The edges that cross lanes."


def schedule_columns(schedule: Schedule, edges: Sequence[Edge] | None = None) -> ScheduleTable:
    """Return the schedule as columns. `edges` adds edges that no SEND of the schedule names (computed schedules)."""
    flat = [action for lane in schedule.lanes for action in lane]
    kinds, stages, microbatches, slices, peers, whats = (list(map(itemgetter(field), flat)) for field in range(6))
    kind = np.array([CODE[text] for text in kinds], dtype=np.int64)
    stage = np.array(stages, dtype=np.int64)
    offset = np.cumsum([0, *(len(lane) for lane in schedule.lanes)])
    index = {edge: i for i, edge in enumerate(_crossing_edges(schedule, edges or ()))}
    edge = np.full(len(flat), -1, dtype=np.int64)
    transfers = np.flatnonzero((kind >= SEND_F) & (kind <= RECV_B))
    if len(transfers):
        away = (kind == SEND_F) | (kind == RECV_B)
        edge[transfers] = [
            index.setdefault((stages[i], peers[i], whats[i]) if out else (peers[i], stages[i], whats[i]), len(index))
            for i, out in zip(transfers.tolist(), away[transfers].tolist(), strict=True)
        ]
    return ScheduleTable(
        kind=kind,
        stage=stage,
        microbatch=np.array(microbatches, dtype=np.int64),
        slice=np.array(slices, dtype=np.int64),
        edge=edge,
        plain=np.array([not what for what in whats], dtype=np.bool_),
        lane=np.repeat(np.arange(len(schedule.lanes)), np.diff(offset)),
        offset=offset,
        edges=tuple(index),
    )


def _crossing_edges(schedule: Schedule, edges: Sequence[Edge]) -> list[Edge]:
    return [edge for edge in edges if schedule.placement[edge[0]] != schedule.placement[edge[1]]]
