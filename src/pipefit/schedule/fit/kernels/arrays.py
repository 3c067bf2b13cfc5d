"""Arrays for the inner loops, built from an instance, and the compilation of these loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipefit.schedule.fit.instance import B, FitInstance, Floats, I, Ints
from pipefit.schedule.fit.kernels import block_passes as pattern_passes
from pipefit.schedule.fit.kernels import block_patterns as pattern_kernel
from pipefit.schedule.fit.kernels import greedy, moves
from pipefit.schedule.fit.kernels import sweep as kernel
from pipefit.schedule.fit.kernels.greedy import ConstructionScratch
from pipefit.schedule.fit.kernels.sweep import InstanceTables, OrderState, OrderTrial
from pipefit.schedule.taskgraph.kernel import compile_modules


def make_tables(instance: FitInstance) -> InstanceTables:
    """Return the tables of an instance."""
    stages, units = instance.num_stages, instance.num_units
    operation = np.arange(4 * stages * units)
    kind, stage, unit = operation // (stages * units), operation // units % stages, operation % units
    row = np.where(kind == B, I, kind) * stages + stage
    ins: list[list[tuple[int, int]]] = [[] for _ in range(3 * stages)]
    outs: list[list[int]] = [[] for _ in range(3 * stages)]
    edges = len(instance.edges)
    out_row, crosses = np.zeros(2 * edges, dtype=np.int64), np.zeros(2 * edges, dtype=np.bool_)
    for edge, (source, target) in enumerate(zip(instance.source.tolist(), instance.target.tolist(), strict=True)):
        for slot, (maker, user) in (
            (edge, (source, target)),
            (edges + edge, (stages + target, stages + source)),
        ):
            outs[maker].append(slot)
            ins[user].append((maker, slot))
            out_row[slot] = user
            crosses[slot] = instance.placement[source] != instance.placement[target]
    # Slots are sorted by producer, so that the slots of a row are contiguous.
    new = {slot: position for position, slot in enumerate(slot for row_ in outs for slot in row_)}
    by_new = np.array(sorted(new, key=lambda slot: new[slot]), dtype=np.int64)
    transit = np.concatenate((instance.forward_s, instance.backward_s))
    port = np.concatenate((instance.forward_port_s, instance.backward_port_s))
    limits = instance.limit_bytes
    held = instance.held_bytes.reshape(-1)
    return InstanceTables(
        lane=instance.placement[stage].astype(np.int64),
        stage=stage,
        unit=unit,
        row=row,
        node=row * units + unit,
        time=instance.time_s.reshape(-1).copy(),
        held=held.copy(),
        need=np.maximum(held, 0.0) + instance.passing_bytes.reshape(-1),
        row_lane=np.tile(instance.placement, 3).astype(np.int64),
        in_first=np.cumsum([0, *map(len, ins)]),
        in_slot=np.array([new[slot] for row_ in ins for _, slot in row_], dtype=np.int64),
        in_row=np.array([maker for row_ in ins for maker, _ in row_], dtype=np.int64),
        out_first=np.cumsum([0, *map(len, outs)]),
        out_row=out_row[by_new],
        crosses=crosses[by_new],
        whole=transit[by_new].reshape(-1, units).copy(),
        port=port[by_new].reshape(-1, units).copy(),
        limit=np.where(np.isfinite(limits), limits * (1 + 1e-12), 2 * kernel.INFINITE),
        turn=np.argsort(instance.backwards),
        toggles=instance.may_split & instance.may_merge,
        work=instance.work_s(),
        units=units,
        span=instance.objective == "span",
    )


def retime_tables(t: InstanceTables, instance: FitInstance) -> InstanceTables:
    """Return the tables of an instance that differs only in the times and memory of actions."""
    held = instance.held_bytes.reshape(-1)
    return t._replace(
        time=instance.time_s.reshape(-1).copy(),
        held=held.copy(),
        need=np.maximum(held, 0.0) + instance.passing_bytes.reshape(-1),
        toggles=instance.may_split & instance.may_merge,
        work=instance.work_s(),
    )


def make_state(t: InstanceTables, instance: FitInstance, orders: Sequence[Ints]) -> OrderState:
    """Return a state of these orders, without times."""
    lanes, capacity = instance.lanes, 3 * instance.num_units * max(np.bincount(instance.placement))
    order = np.zeros((lanes, capacity), dtype=np.int64)
    for lane, operations in enumerate(orders):
        order[lane, : len(operations)] = operations
    return OrderState(
        order=order,
        length=np.array(list(map(len, orders)), dtype=np.int64),
        start=np.zeros((lanes, capacity)),
        done=np.zeros((lanes, capacity)),
        sent=np.zeros((lanes, capacity)),
        begin=np.zeros(3 * instance.num_stages * instance.num_units),
        position=np.full(3 * instance.num_stages * instance.num_units, -1, dtype=np.int64),
        level=np.zeros((lanes, capacity + 1)),
        arrival=np.zeros(t.whole.shape),
        value=np.zeros(2),
        place=np.zeros(lanes, dtype=np.int64),
        free=np.zeros(lanes),
        port=np.zeros(lanes),
    )


def make_trial(t: InstanceTables, s: OrderState, seed: int) -> OrderTrial:
    """Return scratch space for changes of a state."""
    lanes = len(s.length)
    return OrderTrial(
        order=s.order.copy(),
        length=s.length.copy(),
        changed=np.zeros(lanes, dtype=np.bool_),
        stamp=np.full(len(s.begin), -1, dtype=np.int64),
        arrival=s.arrival.copy(),
        place=np.zeros(lanes, dtype=np.int64),
        free=np.zeros(lanes),
        ported=np.zeros(lanes),
        first=np.zeros(lanes),
        left=np.zeros(2 * lanes),
        waiting=np.zeros(lanes, dtype=np.int64),
        stack=np.zeros(lanes + 1, dtype=np.int64),
        numbers=np.array([0, 1 + seed * 7919 % 2147483646, 0], dtype=np.int64),
        path=np.zeros((len(s.begin), 2), dtype=np.int64),
        value=np.zeros(2),
        queue=np.zeros(8, dtype=np.int64),
    )


def make_scratch(instance: FitInstance, t: InstanceTables, merge: NDArray[np.bool_]) -> ConstructionScratch:
    """Return scratch space for constructions; `merge` is an array by stage: whether its backwards run as B."""
    lanes, stages, units = instance.lanes, instance.num_stages, instance.num_units
    held = [instance.lane_stages(lane) for lane in range(lanes)]
    return ConstructionScratch(
        backwards=instance.backwards.astype(np.int64),
        first=np.cumsum([0, *map(len, held)]),
        held=np.array([stage for lane_stages in held for stage in lane_stages], dtype=np.int64),
        merge=merge,
        slices=instance.slices,
        done=np.zeros(3 * stages, dtype=np.int64),
        count=np.zeros(3 * stages, dtype=np.int64),
        refused=np.zeros(3 * stages, dtype=np.int64),
        reserve=_reserve_bytes(instance),
        placed=np.zeros(3 * stages * units, dtype=np.bool_),
        arrival=np.zeros(t.whole.shape),
        free=np.zeros(lanes),
        port=np.zeros(lanes),
        level=np.zeros(lanes),
        begin=np.zeros(lanes),
        best=np.zeros(lanes, dtype=np.int64),
        key=np.zeros(lanes),
        at=np.zeros(lanes),
        dirty=np.zeros(lanes, dtype=np.bool_),
    )


def _reserve_bytes(instance: FitInstance) -> Floats:
    """Return, by lane, an upper bound on the memory of any single microbatch, with all its forwards first."""
    grown = np.maximum(instance.held_bytes, 0.0).max(axis=0) + np.maximum(instance.held_bytes[I], 0.0)
    by_stage = grown.reshape(instance.num_stages, instance.microbatches, instance.slices).sum(axis=2).max(axis=1)
    passing = instance.passing_bytes.max(axis=(0, 2))
    return np.array(
        [
            by_stage[list(held)].sum() + passing[list(held)].max()
            for held in map(instance.lane_stages, range(instance.lanes))
        ]
    )


INLINE = ("conflict", "draw", "idle_around", "choose_place", "safe", "choose_next")
"""Functions that are inlined: a call that passes the tables costs more than these functions do."""


@dataclass(frozen=True, slots=True)
class SearchLoops:
    """The inner loops that the search calls, plain or compiled."""

    sweep: Callable[..., Any]
    anneal: Callable[..., Any]
    construct: Callable[..., Any]
    patterns: Callable[..., Any]


PLAIN = SearchLoops(kernel.sweep, moves.anneal, greedy.construct, pattern_kernel.patterns)


def compile_loops() -> SearchLoops:
    """Return the compiled loops."""
    modules = (kernel, moves, greedy, pattern_passes, pattern_kernel)
    compiled = compile_modules(modules, ("sweep", "anneal", "construct", "patterns"), INLINE)
    return SearchLoops(compiled["sweep"], compiled["anneal"], compiled["construct"], compiled["patterns"])
