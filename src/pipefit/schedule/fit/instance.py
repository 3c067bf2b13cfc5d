"""A checked scheduling problem as flat arrays, shared by the constructions, the local search and the exact solver.

A **unit** is one slice of one microbatch, numbered microbatch * slices + slice. All stages run their forwards by
ascending unit and their backwards in the order `backwards`: by ascending microbatch, the slices of one microbatch in
descending order, because the keys and values of a slice collect gradients from later ones. W's that are not part of a B
keep that order, too. An **operation** is an action as an integer, (kind * stages + stage) * units + unit, with kinds 0
to 3 for F, I, W, B; the **orders** of a schedule are one array of operations for each lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import ActionTable, CostTable
from pipefit.errors import ScheduleError
from pipefit.schedule.actions import COMPUTE, Action, Schedule
from pipefit.schedule.problem import Edge, ScheduleProblem
from pipefit.schedule.taskgraph.times import edge_table, match_edges

Objective = Literal["makespan", "span"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

F, I, W, B = range(4)  # noqa: E741


@dataclass(frozen=True, slots=True, kw_only=True)
class FitInstance:
    """A scheduling problem with times in seconds and memory in bytes, by [kind, stage, unit] with kinds F, I, W, B."""

    placement: Ints
    "`placement[s]` is the lane that holds stage s."
    lanes: int
    microbatches: int
    slices: int
    backwards: Ints
    "The order of units in the backwards of every stage; forwards go by ascending unit."
    time_s: Floats
    "The duration in the simulator, with the overhead of an action."
    held_bytes: Floats
    "The bytes that stay allocated after the operation (negative: freed bytes)."
    passing_bytes: Floats
    "The transient bytes while it runs."
    may_split: NDArray[np.bool_]
    "By stage: whether I and W may run separately."
    may_merge: NDArray[np.bool_]
    "By stage: whether they may run as B."
    edges: tuple[Edge, ...]
    source: Ints
    "[edge], as all following fields; edges between stages of one lane are included."
    target: Ints
    forward_s: Floats
    "[edge, unit]: from the end of the producer until the tensor can be used, on a free port; 0 within a lane."
    backward_s: Floats
    forward_port_s: Floats
    "The part of it that keeps the sender's port busy; a lane has one port."
    backward_port_s: Floats
    forward_bytes: Floats
    "The receive buffer; 0 within a lane."
    backward_bytes: Floats
    limit_bytes: Floats
    "By lane: the memory for actions, without the static bytes; inf is no limit."
    objective: Objective
    "Makespan: the end of the last action. Span: the longest time from a lane's first action to its last."

    @staticmethod
    def from_problem(problem: ScheduleProblem, objective: Objective = "makespan") -> FitInstance:
        """Build the instance of a problem with costs. Raises ScheduleError for invalid times."""
        costs = problem.costs
        if costs is None:
            raise ScheduleError(
                "Fitting a schedule needs the times and the memory of its actions.",
                where="costs",
                seen="none",
                allowed="a cost table, or `--times F,I,W`",
            )
        shape = (problem.num_stages, problem.microbatches, problem.slices)
        _check_times(costs, shape)
        time_s, held, passing = np.zeros((3, 4, problem.num_stages, problem.microbatches * problem.slices))
        for kind, name in enumerate(COMPUTE):
            if name in costs.actions:
                time_s[kind] = _dense_table(costs.actions[name].time_s, shape) + costs.overhead_s
                held[kind] = _dense_table(costs.actions[name].held_bytes, shape)
                passing[kind] = _dense_table(costs.actions[name].peak_bytes, shape)
        limits = np.full(problem.num_lanes, np.inf) if problem.limit_bytes is None else np.array(problem.limit_bytes)
        ahead = _transfer_tables(problem, costs, "forward")
        back = _transfer_tables(problem, costs, "backward")
        return FitInstance(
            placement=np.array(problem.placement, dtype=np.int32),
            lanes=problem.num_lanes,
            microbatches=problem.microbatches,
            slices=problem.slices,
            backwards=backward_order(problem.microbatches, problem.slices),
            time_s=time_s,
            held_bytes=held,
            passing_bytes=passing,
            may_split=_may_split(costs, shape),
            may_merge=np.full(problem.num_stages, "B" in costs.actions),
            edges=problem.stage_edges,
            source=np.array([edge[0] for edge in problem.stage_edges], dtype=np.int32),
            target=np.array([edge[1] for edge in problem.stage_edges], dtype=np.int32),
            forward_s=ahead[0],
            backward_s=back[0],
            forward_port_s=ahead[1],
            backward_port_s=back[1],
            forward_bytes=ahead[2],
            backward_bytes=back[2],
            limit_bytes=limits - costs.static_bytes,
            objective=objective,
        )

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_units(self) -> int:
        return self.microbatches * self.slices

    def operation_number(self, kind: int, stage: int, unit: int) -> int:
        """Return an action as an integer."""
        return (kind * self.num_stages + stage) * self.num_units + unit

    def operation_parts(self, operation: int) -> tuple[int, int, int]:
        """Return (kind, stage, unit) of an operation."""
        row, unit = divmod(int(operation), self.num_units)
        return row // self.num_stages, row % self.num_stages, unit

    def lane_stages(self, lane: int) -> tuple[int, ...]:
        """Return the stages of a lane, ascending."""
        return tuple(np.flatnonzero(self.placement == lane).tolist())

    def open_stages(self) -> NDArray[np.bool_]:
        """Return, by stage, whether it may pay to run some backwards as B and some as I and W.

        It cannot pay if I followed at once by W takes no longer than B and, with a limit, no more memory, during and
        after it.
        """
        time, held, near = self.time_s, self.held_bytes, 1 + 1e-9
        no_longer = (time[I] + time[W] <= time[B] * near).all(axis=1)
        grain = 1e-9 * max(float(np.abs(held).max()), float(self.passing_bytes.max()))
        need = np.maximum(held, 0.0) + self.passing_bytes
        no_more = np.maximum(need[I], held[I] + need[W]) <= need[B] + grain
        no_more &= held[I] + held[W] <= held[B] + grain
        bounded = np.isfinite(self.limit_bytes)[self.placement]
        is_open: NDArray[np.bool_] = self.may_split & self.may_merge & ~(no_longer & (no_more.all(axis=1) | ~bounded))
        return is_open

    def work_s(self) -> Floats:
        """Return, by lane, the minimum time of its actions, with each unit's backward split or merged, whichever is
        quicker."""
        split = np.where(self.may_split[:, None], self.time_s[I] + self.time_s[W], np.inf)
        merged = np.where(self.may_merge[:, None], self.time_s[B], np.inf)
        by_stage = (self.time_s[F] + np.minimum(split, merged)).sum(axis=1)
        return np.bincount(self.placement, weights=by_stage, minlength=self.lanes).astype(np.float64)


def backward_order(microbatches: int, slices: int) -> Ints:
    """Return the units in the order of backwards: microbatches ascending, the slices of each descending."""
    return np.arange(microbatches * slices, dtype=np.int32).reshape(microbatches, slices)[:, ::-1].reshape(-1)


def orders_of(instance: FitInstance, schedule: Schedule) -> list[Ints]:
    """Return the orders of a computed schedule of the instance."""
    codes = {name: kind for kind, name in enumerate(COMPUTE)}
    return [
        np.array(
            [instance.operation_number(codes[a.kind], a.stage, a.microbatch * instance.slices + a.slice) for a in lane],
            dtype=np.int32,
        )
        for lane in schedule.lanes
    ]


def schedule_of(instance: FitInstance, orders: Sequence[Ints], name: str = "fit") -> Schedule:
    """Return the computed schedule with these orders."""
    lanes = []
    for order in orders:
        row = []
        for operation in order.tolist():
            kind, stage, unit = instance.operation_parts(operation)
            row.append(Action(COMPUTE[kind], stage, *divmod(unit, instance.slices)))
        lanes.append(tuple(row))
    return Schedule(
        name=name,
        placement=tuple(instance.placement.tolist()),
        microbatches=instance.microbatches,
        slices=instance.slices,
        lanes=tuple(lanes),
    )


def _dense_table(table: Floats, shape: tuple[int, int, int]) -> Floats:
    """Return [stage, unit] of an array that broadcasts over [stage, microbatch, slice]."""
    return np.broadcast_to(table, shape).reshape(shape[0], -1)


def _may_split(costs: CostTable, shape: tuple[int, int, int]) -> NDArray[np.bool_]:
    """Return, by stage, whether I and W can run separately.

    If no W takes time, splitting delays nothing; then stages are split only if B takes more time or memory than I.
    """
    if "I" not in costs.actions or "W" not in costs.actions:
        return np.zeros(shape[0], dtype=np.bool_)
    if "B" not in costs.actions:
        return np.ones(shape[0], dtype=np.bool_)
    time_s, held, passing = (
        {kind: _dense_table(getattr(costs.actions[kind], field), shape) for kind in "IWB"}
        for field in ("time_s", "held_bytes", "peak_bytes")
    )
    need = {kind: np.maximum(held[kind], 0.0) + passing[kind] for kind in "IWB"}
    split_need = np.maximum(need["I"], held["I"] + need["W"])
    grain = 1e-9 * max(float(np.abs(held["B"]).max()), float(split_need.max()))
    merges = (time_s["W"] == 0) & (time_s["B"] <= time_s["I"] * (1 + 1e-9))
    merges &= (need["B"] <= split_need + grain) & (held["B"] <= held["I"] + held["W"] + grain)
    return np.asarray(~merges.all(axis=1))


def _transfer_tables(problem: ScheduleProblem, costs: CostTable, way: str) -> tuple[Floats, Floats, Floats]:
    """Return (time, port time, receive buffer) by [edge, unit] of one direction; zeros for edges within a lane."""
    shape = (len(problem.stage_edges), problem.microbatches, problem.slices)
    transit, port, size = np.zeros((3, shape[0], shape[1] * shape[2]))
    crossing = [
        edge for edge, (s, t, _) in enumerate(problem.stage_edges) if problem.placement[s] != problem.placement[t]
    ]
    matched = match_edges([problem.stage_edges[edge] for edge in crossing], costs)
    if crossing:
        part = (len(crossing), *shape[1:])
        for table, field in ((transit, "s"), (port, "port_s"), (size, "bytes")):
            table[crossing] = _dense_table(edge_table(matched, f"{way}_{field}"), part)
    return transit, port, size


def _check_times(costs: CostTable, shape: tuple[int, int, int]) -> None:
    """Raise ScheduleError for a negative time, or for a zero time of an action that must have work."""
    for name in COMPUTE:
        if name in costs.actions:
            _check_time(name, costs.actions[name], shape, zero=name in "IW")
    if "F" not in costs.actions or not ("B" in costs.actions or {"I", "W"} <= costs.actions.keys()):
        raise ScheduleError(
            "The cost table lacks the times of a forward or a backward.",
            where="costs",
            seen=", ".join(costs.actions) or "none",
            allowed="F, and B or both of I and W",
        )
    if "B" not in costs.actions:
        split = ActionTable(
            time_s=costs.actions["I"].time_s + costs.actions["W"].time_s,
            held_bytes=costs.actions["I"].held_bytes,
            peak_bytes=costs.actions["I"].peak_bytes,
        )
        _check_time("I and W together", split, shape, zero=False)


def _check_time(name: str, table: ActionTable, shape: tuple[int, int, int], zero: bool) -> None:
    time_s = _dense_table(table.time_s, shape)
    wrong = ~np.isfinite(time_s) | ((time_s < 0) if zero else (time_s <= 0))
    if wrong.any():
        stage, unit = (int(index) for index in np.argwhere(wrong)[0])
        raise ScheduleError(
            "An action has a time that no schedule can be made for.",
            where=f"{name} of stage {stage}, microbatch {unit // shape[2]}",
            seen=f"{time_s[stage, unit]:g} s",
            allowed="0 s or more" if zero else "more than 0 s",
            next_step="give the times of one F, one I and one W, for example `--times 28,28,20`",
        )
