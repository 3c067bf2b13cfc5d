"""Schedules for many microbatches from schedules for few, by repeating the middle.

A schedule for few microbatches is searched well in little time. Its starts, cut at a microbatch in the middle and
stretched by the missing periods, are good wishes for many microbatches: warm-up and cool-down stay, and the steady
state is repeated.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np

from pipefit.schedule.fit.fit_budget import FIT_BUDGET
from pipefit.schedule.fit.instance import FitInstance, Floats, I, W, backward_order
from pipefit.schedule.fit.kernels.arrays import SearchLoops
from pipefit.schedule.fit.kernels.sweep import InstanceTables
from pipefit.schedule.fit.starts.construct import OrderBuilder, merged_stages, sweep_orders
from pipefit.schedule.fit.starts.start import TimedOrders


def initial_microbatches(instance: FitInstance) -> int:
    """Return the number of microbatches of the first search: enough for a steady state between both ends."""
    passes = int(np.bincount(instance.placement).max())
    enough = 2 * instance.lanes if passes > 1 else instance.lanes + 8
    least = max(8, -(-enough // instance.slices))
    return least if instance.microbatches >= 1.5 * least else instance.microbatches


def shorten_instance(instance: FitInstance, microbatches: int) -> FitInstance:
    """Return the instance with its first microbatches only."""
    units = microbatches * instance.slices
    cut = {
        field.name: getattr(instance, field.name)[..., :units]
        for field in fields(instance)
        if isinstance(getattr(instance, field.name), np.ndarray) and getattr(instance, field.name).ndim > 1
    }
    return replace(instance, microbatches=microbatches, backwards=backward_order(microbatches, instance.slices), **cut)


def extend_starts(
    instance: FitInstance,
    t: InstanceTables,
    loops: SearchLoops,
    short: FitInstance,
    short_t: InstanceTables,
    best: TimedOrders,
) -> list[TimedOrders]:
    """Return starts for the instance from orders for its first microbatches, best first."""
    s = sweep_orders(short, short_t, loops, best.orders)
    begin = s.begin.reshape(3, short.num_stages, short.microbatches, short.slices).copy()
    gone = begin[W] >= 1e299
    back_s = short.time_s[I].reshape(begin[I].shape)
    begin[W] = np.where(gone, begin[I] + back_s, begin[W])
    builder = OrderBuilder(instance, t, loops, merged_stages(short, best.orders))
    middle = short.microbatches // 2
    starts = []
    for cut in range(
        max(1, middle - FIT_BUDGET.middle_cuts // 2), min(short.microbatches - 4, middle + FIT_BUDGET.middle_cuts // 2)
    ):
        for count in (1, 2, 3, 4):
            wish = stretch_starts(begin, cut, count, instance.microbatches)
            time_s = builder.wish_objective(wish.reshape(3 * instance.num_stages, instance.num_units))
            if time_s < math.inf:
                starts.append(builder.valued_start(time_s, f"{best.name}, extended"))
    return sorted(starts, key=lambda start: start.time_s)


def stretch_starts(begin: Floats, cut: int, count: int, microbatches: int) -> Floats:
    """Return starts [kind, stage, microbatch, slice] in which the `count` microbatches from `cut` on are repeated until
    there are `microbatches`."""
    period = float((begin[:, :, cut + count] - begin[:, :, cut]).mean()) / count
    more = microbatches - begin.shape[2]
    n = np.arange(microbatches)
    inside = np.where(n < cut, n, np.where(n >= cut + count + more, n - more, cut + (n - cut) % count))
    shift = (n - inside) * period
    moved: Floats = begin[:, :, inside] + shift[None, None, :, None]
    return moved
