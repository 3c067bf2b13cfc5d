"""An instance in integers, as CP-SAT requires, and the earliest times of an order in it.

The three **nodes** of a unit on a stage are its forward, its backward (I, or B if I and W are merged) and its W, as
integers (node kind * stages + stage) * units + unit. If one quantum divides all times, they are exact. Otherwise a
quantum is chosen, and times are rounded to the nearest multiple (for searching: the simulator decides) or down (for
bounds: no time and no distance exceeds the true one, so no optimum does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipefit.schedule.fit.instance import B, F, FitInstance, I, Ints, W

Whole = NDArray[np.int64]

FORWARD, BACK, WEIGHT = range(3)

FINEST = 20_000
"""Quanta in the longest lane's work if no quantum divides all times."""

FINEST_MEMORY = 1_000_000
"""Quanta in the largest limit if no quantum divides all memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledInstance:
    """An instance in whole quanta of time and of memory."""

    instance: FitInstance
    quantum_s: float
    exact: bool
    "Whether every time is a whole number of quanta."
    time: Whole
    "[kind, stage, unit], as in the instance."
    forward: Whole
    "[edge, unit]."
    backward: Whole
    held: Whole
    "[kind, stage, unit]."
    passing: Whole
    limit: Whole
    "By lane; -1 is no limit. Raised by the quanta that rounding may have added."
    position: Ints
    "[unit]: its position in the order of backwards."
    is_open: NDArray[np.bool_]
    """[stage]: whether each unit may run B or I with W: if B may pay, or if the W's differ, so that they are not
    interchangeable."""

    @staticmethod
    def from_instance(instance: FitInstance, down: bool = False) -> ScaledInstance:
        """Return an instance in quanta: rounded to the nearest, or all times rounded down."""
        times = (instance.time_s, instance.forward_s, instance.backward_s)
        longest = float(instance.work_s().max())
        quantum, exact = common_quantum(np.concatenate([table.ravel() for table in times]), longest / FINEST)

        def to_quanta(array: NDArray[np.float64]) -> Whole:
            lower = np.floor(array / quantum + 1e-6) if down and not exact else np.rint(array / quantum)
            return lower.astype(np.int64)

        finite = instance.limit_bytes[np.isfinite(instance.limit_bytes)]
        memory = np.concatenate([instance.held_bytes.ravel(), instance.passing_bytes.ravel()])
        largest = float(max(np.abs(memory).max(), finite.max(initial=0.0), 1e-300))
        grain, even = common_quantum(memory, largest / FINEST_MEMORY)
        slack = 0 if even else 6 * instance.num_units
        limit = np.full(instance.lanes, -1, dtype=np.int64)
        bounded = np.isfinite(instance.limit_bytes)
        limit[bounded] = np.floor(instance.limit_bytes[bounded] / grain * (1 + 1e-9) + 1e-6).astype(np.int64) + slack
        return ScaledInstance(
            instance=instance,
            quantum_s=quantum,
            exact=exact,
            time=to_quanta(times[0]),
            forward=to_quanta(times[1]),
            backward=to_quanta(times[2]),
            held=np.rint(instance.held_bytes / grain).astype(np.int64),
            passing=np.rint(instance.passing_bytes / grain).astype(np.int64),
            limit=limit,
            position=np.argsort(instance.backwards).astype(np.int32),
            is_open=instance.open_stages() | (instance.may_split & instance.may_merge & ~_uniform_weights(instance)),
        )

    @property
    def rounding_slack(self) -> int:
        """Quanta by which rounding may have moved the objective below a true bound."""
        return 0 if self.exact else 4 * self.instance.num_stages + 2 * self.instance.num_units + 8

    def node_number(self, kind: int, stage: int, unit: int) -> int:
        return (kind * self.instance.num_stages + stage) * self.instance.num_units + unit

    def node_parts(self, node: int) -> tuple[int, int, int]:
        """Return (node kind, stage, unit)."""
        row, unit = divmod(node, self.instance.num_units)
        return row // self.instance.num_stages, row % self.instance.num_stages, unit

    def node_duration(self, kind: int, stage: int, unit: int, merged: bool) -> int:
        """Return the duration of a node; a merged W takes no time."""
        if kind == BACK:
            return int(self.time[B if merged else I, stage, unit])
        return int(self.time[F, stage, unit] if kind == FORWARD else 0 if merged else self.time[W, stage, unit])

    def data_predecessors(self, kind: int, stage: int, unit: int) -> list[tuple[int, int]]:
        """Return (node, distance from its end) of all data dependencies of a node."""
        instance = self.instance
        if kind == WEIGHT:
            return [(self.node_number(BACK, stage, unit), 0)]
        if kind == FORWARD:
            edges = np.flatnonzero(instance.target == stage)
            return [
                (self.node_number(FORWARD, int(instance.source[edge]), unit), int(self.forward[edge, unit]))
                for edge in edges
            ]
        edges = np.flatnonzero(instance.source == stage)
        consumers = [
            (self.node_number(BACK, int(instance.target[edge]), unit), int(self.backward[edge, unit])) for edge in edges
        ]
        return [(self.node_number(FORWARD, stage, unit), 0), *consumers]


def _uniform_weights(instance: FitInstance) -> NDArray[np.bool_]:
    """Return, by stage, whether the W's of all units are alike."""
    weights = np.stack([table[W] for table in (instance.time_s, instance.held_bytes, instance.passing_bytes)])
    return np.asarray((weights == weights[:, :, :1]).all(axis=(0, 2)))


def common_quantum(values: NDArray[np.float64], finest: float) -> tuple[float, bool]:
    """Return (quantum, whether all values are multiples of it), at least `finest`, which is the fallback."""
    distinct = np.unique(np.abs(values))
    distinct = distinct[distinct > 0]
    if not len(distinct):
        return finest or 1.0, True
    tolerance = float(distinct[-1]) * 1e-9
    quantum = float(distinct[0])
    for value in distinct.tolist():
        rest = value
        while rest > tolerance:
            quantum, rest = rest, quantum % rest
            if quantum - rest < tolerance:
                rest = 0.0
        if quantum < finest:
            return finest, False
    multiples = distinct / quantum
    quantum = float((distinct / np.maximum(np.rint(multiples), 1)).mean())
    off = np.abs(distinct / quantum - np.rint(distinct / quantum)).max()
    return (quantum, True) if off < 1e-6 else (finest, False)


def nodes_of(scaled: ScaledInstance, orders: Sequence[Ints]) -> tuple[list[list[int]], NDArray[np.bool_]]:
    """Return (nodes of every lane in order, [stage, unit] whether merged) of orders of operations."""
    instance = scaled.instance
    merged = np.zeros((instance.num_stages, instance.num_units), dtype=np.bool_)
    lanes = []
    for order in orders:
        lane = []
        for operation in order.tolist():
            kind, stage, unit = instance.operation_parts(operation)
            merged[stage, unit] |= kind == B
            lane.append(scaled.node_number((FORWARD, BACK, WEIGHT, BACK)[kind], stage, unit))
        lanes.append(lane)
    return lanes, merged


def orders_from(scaled: ScaledInstance, lanes: Sequence[Sequence[int]], merged: NDArray[np.bool_]) -> list[Ints]:
    """Return the orders of `nodes_of` again. W's of a stage take their units in the order of backwards."""
    instance = scaled.instance
    waiting = {
        stage: [int(unit) for unit in instance.backwards if not merged[stage, unit]]
        for stage in range(instance.num_stages)
    }
    orders = []
    for lane in lanes:
        row = []
        for node in lane:
            kind, stage, unit = scaled.node_parts(node)
            if kind == WEIGHT:
                row.append(instance.operation_number(W, stage, waiting[stage].pop(0)))
            else:
                row.append(
                    instance.operation_number(F if kind == FORWARD else B if merged[stage, unit] else I, stage, unit)
                )
        orders.append(np.array(row, dtype=np.int32))
    return orders


def earliest_starts(
    scaled: ScaledInstance, lanes: Sequence[Sequence[int]], merged: NDArray[np.bool_]
) -> dict[int, int] | None:
    """Return the earliest start of every node in these orders; None if they contradict the dependencies."""
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    cursor, free = [0] * len(lanes), [0] * len(lanes)
    moved = True
    while moved:
        moved = False
        for lane_number, lane in enumerate(lanes):
            while cursor[lane_number] < len(lane):
                node = lane[cursor[lane_number]]
                kind, stage, unit = scaled.node_parts(node)
                waits = scaled.data_predecessors(kind, stage, unit)
                if any(earlier not in end for earlier, _ in waits):
                    break
                start[node] = max([free[lane_number], *(end[earlier] + distance for earlier, distance in waits)])
                end[node] = free[lane_number] = start[node] + scaled.node_duration(
                    kind, stage, unit, bool(merged[stage, unit])
                )
                cursor[lane_number] += 1
                moved = True
    return start if all(cursor[lane_number] == len(lane) for lane_number, lane in enumerate(lanes)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSchedule:
    """A schedule: the nodes of every lane in order, the merged backwards, and all starts."""

    lanes: list[list[int]]
    merged: NDArray[np.bool_]
    start: dict[int, int]


def state_of(scaled: ScaledInstance, lanes: Sequence[Sequence[int]], merged: NDArray[np.bool_]) -> NodeSchedule | None:
    """Return the state of these orders, every node as early as possible; None if they contradict the dependencies."""
    start = earliest_starts(scaled, lanes, merged)
    return None if start is None else NodeSchedule(lanes=[list(lane) for lane in lanes], merged=merged, start=start)


def end_of(scaled: ScaledInstance, state: NodeSchedule, node: int) -> int:
    """Return the end of a node."""
    kind, stage, unit = scaled.node_parts(node)
    return state.start[node] + scaled.node_duration(kind, stage, unit, bool(state.merged[stage, unit]))


def objective_of(scaled: ScaledInstance, state: NodeSchedule) -> int:
    """Return the objective in quanta."""
    ends = [end_of(scaled, state, lane[-1]) for lane in state.lanes]
    if scaled.instance.objective == "makespan":
        return max(ends)
    return max(end - state.start[lane[0]] for lane, end in zip(state.lanes, ends, strict=True))


@dataclass(slots=True)
class WindowModel:
    """The model of a window while it is being built."""

    scaled: ScaledInstance
    state: NodeSchedule
    "The schedule of which the window is a part."
    free: set[int]
    "The nodes that may move."
    horizon: int
    cp: Any
    start: dict[int, Any] = field(default_factory=dict)
    "Node -> variable, or an integer if its start is the same in every solution."
    end: dict[int, Any] = field(default_factory=dict)
    merge: dict[tuple[int, int], Any] = field(default_factory=dict)
    "(stage, unit) -> literal, if merging is open."
    intervals: dict[int, Any] = field(default_factory=dict)
    span: Any = None

    def is_merged(self, stage: int, unit: int) -> bool:
        return bool(self.state.merged[stage, unit])

    def is_parted(self, stage: int, unit: int) -> Any:
        """Return the literal of not merging, or None if that is not open."""
        return ~self.merge[stage, unit] if (stage, unit) in self.merge else None
