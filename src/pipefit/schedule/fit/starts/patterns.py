"""The building blocks of the published adaptive search, judged by true times and true memory.

Qi et al. 2024 (arXiv 2405.15362, section 3.3 and appendix A) look at all blocks of six slots whose passes move from
lane to lane by hops that may change once, and rank them by one time each for F, I, W and transfers. Here the same
blocks, on any V whose stages can split, are built by a compiled loop and ranked by what they take and hold on the true
tables, so that none of theirs is better than the best of these. The first of them also are starts for the search.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from pipefit.schedule.fit.instance import FitInstance
from pipefit.schedule.fit.kernels.arrays import SearchLoops, make_state
from pipefit.schedule.fit.kernels.block_passes import INTERVAL, SORTS, BlockScratch
from pipefit.schedule.fit.kernels.sweep import INFINITE, InstanceTables
from pipefit.schedule.fit.starts.start import TimedOrders
from pipefit.schedule.problem import vee_placement

LONGEST_HOP = 5
KEPT = 6
"""Of all blocks, so many are kept: the best ones with different times."""

Whole = NDArray[np.int64]


def pattern_starts(instance: FitInstance, t: InstanceTables, loops: SearchLoops, kept: int = KEPT) -> list[TimedOrders]:
    """The orders of the best blocks that fit, best first; none where the placement is no V, where stages cannot split
    or where microbatches are sliced."""
    lanes = instance.lanes
    if lanes < 2 or instance.slices > 1 or not instance.may_split.all():
        return []
    if tuple(instance.placement.tolist()) != vee_placement(lanes):
        return []
    slots, hops = all_blocks(lanes)
    s, p = make_state(t, instance, [np.zeros(0, dtype=np.int32)] * lanes), make_scratch(lanes, instance.num_units)
    values = np.zeros(len(slots))
    loops.patterns(t, s, p, slots, hops, values)
    found: list[TimedOrders] = []
    for n in np.argsort(values, kind="stable").tolist():
        if values[n] >= INFINITE or len(found) == kept:
            break
        if found and values[n] <= found[-1].time_s * (1 + 1e-9):
            continue
        loops.patterns(t, s, p, slots[n : n + 1], hops[n : n + 1], values[n : n + 1])
        orders = [s.order[lane, : s.length[lane]].astype(np.int32) for lane in range(lanes)]
        name = "pattern " + "".join(map(str, slots[n])) + " hops " + ",".join(map(str, dict.fromkeys(hops[n].tolist())))
        found.append(TimedOrders(float(values[n]), name, orders))
    return found


@lru_cache(maxsize=32)
def all_blocks(lanes: int) -> tuple[Whole, Whole]:
    """([block, 3] slots of lane 0, [block, lanes - 1] hops) of every block without collisions, once.

    A lane's passes away from lane 0 stand in slots 0 and b plus all hops so far, those towards it in a and c less the
    lane: no two of them are one slot modulo the interval if the hops and the lane together avoid four residues.
    """
    hops = {
        tuple(hop if lane < switch else later for lane in range(lanes - 1))
        for hop in range(1, LONGEST_HOP + 1)
        for later in range(1, hop + 1)
        for switch in range(1, lanes)
    }
    every = np.array(sorted(hops), dtype=np.int64)
    moved = np.concatenate([np.zeros((len(every), 1), dtype=np.int64), np.cumsum(every + 1, axis=1)], axis=1) % INTERVAL
    taken = np.bitwise_or.reduce(1 << moved, axis=1)
    slots, rows = [], []
    for a, b, c in permutations(range(1, INTERVAL), 3):
        barred = 0
        for residue in (a, c, a - b, c - b):
            barred |= 1 << residue % INTERVAL
        free = np.flatnonzero(taken & barred == 0)
        slots += [(a, b, c)] * len(free)
        rows.append(every[free])
    return np.array(slots, dtype=np.int64).reshape(-1, 3), np.concatenate(rows)


def make_scratch(lanes: int, units: int) -> BlockScratch:
    """The arrays for blocks of so many lanes and units."""
    most = max(units, 2 * lanes)
    places, slots = SORTS * most, SORTS * most + 20 * lanes + 64
    return BlockScratch(
        offset=np.zeros((lanes, SORTS), dtype=np.int64),
        at=np.zeros((lanes, INTERVAL), dtype=np.int64),
        row=np.zeros((lanes, places), dtype=np.int64),
        start=np.zeros((lanes, places), dtype=np.int64),
        length=np.zeros(lanes, dtype=np.int64),
        grid=np.zeros((lanes, slots), dtype=np.int64),
        stop=np.zeros((2, 2 * lanes, most), dtype=np.int64),
        count=np.zeros((lanes, SORTS), dtype=np.int64),
        left=np.zeros((lanes, SORTS), dtype=np.int64),
        place=np.zeros(lanes, dtype=np.int64),
        free=np.zeros(lanes, dtype=np.int64),
        peak=np.zeros(lanes, dtype=np.int64),
        queue=np.zeros(2 * most, dtype=np.int64),
    )
