"""Initial orders of the search: schedule families with the same placement, and repeated blocks with real offsets.

Both give wishes: a start for every operation. `kernels.greedy.construct` turns wishes into orders that fit in memory,
under the measured times. A block is defined by the slowdown of its forwards and backwards from stage to stage, relative
to the minimum, once for odd and once for even passes over the lanes. These are the two offsets of Qi et al. 2024 (arXiv
2405.15362, eq. 2), as real numbers and for any placement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Schedule
from pipefit.schedule.fit.instance import B, F, FitInstance, Floats, I, Ints, W, orders_of
from pipefit.schedule.fit.kernels.arrays import SearchLoops, make_scratch, make_state
from pipefit.schedule.fit.kernels.sweep import InstanceTables, OrderState
from pipefit.schedule.fit.starts.patterns import pattern_starts
from pipefit.schedule.fit.starts.start import TimedOrders
from pipefit.schedule.problem import ScheduleProblem


class BlockSpeed(NamedTuple):
    """Parameters of a repeated block."""

    fast: float
    """Slowdown, relative to the minimum, of forward hops on odd passes over the lanes and of backward hops on even
    passes."""
    slow: float
    "The slowdown of all other hops."
    stretch: float
    "The period, in units of the busiest lane's work."


SPEEDS = tuple(
    BlockSpeed(*values) for values in product((1.0, 1.25, 1.6, 2.1, 2.8, 3.8), (1.0, 1.2, 1.5, 2.0), (1.0, 1.06))
)


FEW_SPEEDS = tuple(
    BlockSpeed(*values, 1.0) for values in ((1.0, 1.2), (1.25, 1.5), (1.6, 1.0), (2.1, 1.2), (2.8, 1.5), (3.8, 2.0))
)
"""For a quick evaluation, from little memory to much."""


class OrderBuilder:
    """Turns wishes into orders that fit in memory, reusing the same arrays.

    `merge` is an array by stage: whether its backwards run as B.
    """

    def __init__(self, instance: FitInstance, t: InstanceTables, loops: SearchLoops, merge: NDArray[np.bool_]) -> None:
        self.instance, self.t, self.loops = instance, t, loops
        self.plan = make_scratch(instance, t, merge)
        lanes, capacity = instance.lanes, 3 * instance.num_units * max(np.bincount(instance.placement))
        self.order = np.zeros((lanes, capacity), dtype=np.int64)
        self.length = np.zeros(lanes, dtype=np.int64)
        turns = np.argsort(instance.backwards)
        self.count = np.stack([np.arange(instance.num_units), turns, turns])[:, None, :].astype(np.float64)

    def wish_objective(self, wish: Floats) -> float:
        """Return the objective of the orders built from wished starts [row, unit]; inf if they do not fit in memory."""
        time_s = self.loops.construct(self.t, self.plan, wish, self.order, self.length)
        return math.inf if time_s >= 1e299 else float(time_s)

    def repeated_objective(self, offset: Floats, period: float) -> float:
        """Return the same for the offsets [kind, stage] of one unit, repeated every period."""
        wish = offset[:, :, None] + period * self.count
        return self.wish_objective(wish.reshape(-1, self.instance.num_units))

    def valued_start(self, time_s: float, name: str) -> TimedOrders:
        """Return the orders that were evaluated last."""
        orders = [self.order[lane, : self.length[lane]].astype(np.int32) for lane in range(self.instance.lanes)]
        return TimedOrders(time_s, name, orders)


def all_starts(
    instance: FitInstance, problem: ScheduleProblem | None, t: InstanceTables, loops: SearchLoops
) -> list[TimedOrders]:
    """Return all constructions that fit, best first, without duplicates; without a problem no families."""
    starts = list(family_starts(instance, problem, t, loops)) if problem is not None else []
    for merge in merge_choices(instance):
        starts += block_starts(instance, t, loops, merge)
    starts += pattern_starts(instance, t, loops)
    distinct: dict[bytes, TimedOrders] = {}
    for start in sorted(starts, key=lambda start: start.time_s):
        distinct.setdefault(b"".join(order.tobytes() for order in start.orders), start)
    return list(distinct.values())


def family_starts(
    instance: FitInstance, problem: ScheduleProblem, t: InstanceTables, loops: SearchLoops
) -> Iterator[TimedOrders]:
    """Yield every family that supports this placement: unchanged if it fits, and with its starts as wishes."""
    from pipefit.schedule.families import FAMILIES

    for family in FAMILIES.values():
        if family.is_fitted or instance.num_units < family.least_units(instance.lanes):
            continue
        try:
            schedule = family(problem)
        except ScheduleError:
            continue
        yield from schedule_starts(instance, schedule, t, loops)


def schedule_starts(
    instance: FitInstance, schedule: Schedule, t: InstanceTables, loops: SearchLoops
) -> Iterator[TimedOrders]:
    """Yield a schedule unchanged, if its actions are allowed and fit, and the orders built with its starts as
    wishes."""
    orders = allowed_orders(instance, orders_of(instance, schedule))
    s = make_state(t, instance, orders)
    if not loops.sweep(t, s):
        return
    if fits_in_memory(t, s, orders):
        yield TimedOrders(float(s.value[0]), schedule.name, orders)
    wish = wished_starts(instance, s)
    for merge in merge_choices(instance):
        built = build_orders(instance, t, loops, wish, merge)
        if built is not None:
            yield TimedOrders(built.time_s, f"{schedule.name} in memory", built.orders)


def wished_starts(instance: FitInstance, s: OrderState) -> Floats:
    """Return the starts [row, unit] of a swept state; for a W that is part of a B, the end of I."""
    begin = s.begin.reshape(3, instance.num_stages, instance.num_units)
    back_s = np.where(instance.may_split[:, None], instance.time_s[I], instance.time_s[B])
    weight = np.where(begin[W] < 1e299, begin[W], begin[I] + back_s)
    return np.concatenate((begin[F], begin[I], weight))


def allowed_orders(instance: FitInstance, orders: list[Ints]) -> list[Ints]:
    """Convert the backwards of orders to the kinds that each stage allows.

    On stages that may not split, I and W become B at the position of I. On stages that may not merge, B becomes I and
    the next W of the stage.
    """
    converted = []
    for order in orders:
        row: list[int] = []
        turns = {stage: iter(instance.backwards.tolist()) for stage in range(instance.num_stages)}
        for operation in order.tolist():
            kind, stage, unit = instance.operation_parts(operation)
            if kind == F or (instance.may_split[stage] and instance.may_merge[stage]):
                row.append(operation)
            elif instance.may_split[stage]:
                row += [] if kind == W else [instance.operation_number(I, stage, unit)]
                row += [] if kind == I else [instance.operation_number(W, stage, next(turns[stage]))]
            elif kind != W:
                row.append(instance.operation_number(B, stage, unit))
        converted.append(np.array(row, dtype=np.int32))
    return converted


def sweep_orders(instance: FitInstance, t: InstanceTables, loops: SearchLoops, orders: list[Ints]) -> OrderState:
    """Return the state of orders that can run to their ends, with its times."""
    s = make_state(t, instance, orders)
    ran = loops.sweep(t, s)
    assert ran
    return s


def merged_stages(instance: FitInstance, orders: list[Ints]) -> NDArray[np.bool_]:
    """Return, by stage, whether more than half of its backwards run as B."""
    operations = np.concatenate(orders)
    stages = (
        operations[operations >= B * instance.num_stages * instance.num_units]
        // instance.num_units
        % instance.num_stages
    )
    return np.asarray(2 * np.bincount(stages, minlength=instance.num_stages) > instance.num_units)


def fits_in_memory(t: InstanceTables, s: OrderState, orders: list[Ints]) -> bool:
    """Return whether swept orders fit in memory."""
    for lane, order in enumerate(orders):
        if (s.level[lane, : len(order)] + t.need[order] > t.limit[lane]).any():
            return False
    return True


def build_orders(
    instance: FitInstance, t: InstanceTables, loops: SearchLoops, wish: Floats, merge: NDArray[np.bool_]
) -> TimedOrders | None:
    """Return the orders built from wished starts [row, unit], or None if they do not fit in memory."""
    builder = OrderBuilder(instance, t, loops, merge)
    time_s = builder.wish_objective(wish)
    return builder.valued_start(time_s, "") if time_s < math.inf else None


def merge_choices(instance: FitInstance) -> list[NDArray[np.bool_]]:
    """Return choices of the stages whose backwards run as B.

    The choices are: nowhere and everywhere, within the allowed kinds. If B may pay on some stages only: also the stages
    on which it is quicker, and those whose memory is too small to split.
    """
    split, merged = ~instance.may_split, instance.may_merge.copy()
    time, held = instance.time_s, instance.held_bytes
    is_open = instance.open_stages()
    quicker = is_open & (time[B].sum(axis=1) < (time[I] + time[W]).sum(axis=1) * (1 - 1e-9))
    grown = np.maximum(held[F], held[F] + held[I]).sum(axis=1) + instance.passing_bytes.max(axis=(0, 2))
    needs = np.bincount(instance.placement, weights=grown, minlength=instance.lanes)
    choices = [split, merged, split | quicker, split | (is_open & (needs > instance.limit_bytes)[instance.placement])]
    return [
        np.frombuffer(packed, dtype=np.bool_).copy() for packed in dict.fromkeys(choice.tobytes() for choice in choices)
    ]


def block_starts(
    instance: FitInstance,
    t: InstanceTables,
    loops: SearchLoops,
    merge: NDArray[np.bool_],
    speeds: Sequence[BlockSpeed] = SPEEDS,
) -> Iterator[TimedOrders]:
    """Yield repeated blocks of several speeds that fit."""
    period = float((instance.work_s() / instance.num_units).max())
    builder = OrderBuilder(instance, t, loops, merge)
    for speed, offset in zip(speeds, block_offsets(instance, speeds), strict=True):
        time_s = builder.repeated_objective(offset, period * speed.stretch)
        if time_s < math.inf:
            yield builder.valued_start(time_s, f"block {speed.fast:g}, {speed.slow:g}")


def block_offsets(instance: FitInstance, speeds: Sequence[BlockSpeed]) -> Floats:
    """Return the offsets [speed, kind, stage] of one unit's F, I and W, with hops slowed down by the speeds."""
    stages = instance.num_stages
    fast, slow = np.array([[speed.fast, speed.slow] for speed in speeds]).T[:, :, None]
    seen: dict[int, int] = {}
    leg = np.zeros(stages, dtype=np.int64)
    for stage, lane in enumerate(instance.placement.tolist()):
        leg[stage] = seen.get(lane, 0)
        seen[lane] = leg[stage] + 1
    ahead = np.where(leg % 2 == 0, fast, slow)
    back = np.where(leg % 2 == 1, fast, slow) if leg.max() else np.broadcast_to(slow, ahead.shape)
    time_s = instance.time_s.mean(axis=2)
    back_s = np.where(instance.may_split, time_s[I], time_s[B])
    forward_s, backward_s = instance.forward_s.mean(axis=1), instance.backward_s.mean(axis=1)
    offset = np.zeros((len(speeds), 3, stages))
    pairs = list(zip(instance.source.tolist(), instance.target.tolist(), range(len(instance.source)), strict=True))
    for source, target, edge in sorted(pairs, key=lambda pair: pair[1]):
        hop = (time_s[F, source] + forward_s[edge]) * ahead[:, source]
        offset[:, F, target] = np.maximum(offset[:, F, target], offset[:, F, source] + hop)
    offset[:, I] = offset[:, F] + time_s[F]
    for source, target, edge in sorted(pairs, key=lambda pair: -pair[0]):
        hop = (back_s[target] + backward_s[edge]) * back[:, target]
        offset[:, I, source] = np.maximum(offset[:, I, source], offset[:, I, target] + hop)
    offset[:, W] = offset[:, I] + time_s[I]
    return offset
