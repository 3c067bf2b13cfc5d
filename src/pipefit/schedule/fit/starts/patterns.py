"""The building blocks of the published adaptive search, evaluated with the measured times and memory.

Qi et al. 2024 (arXiv 2405.15362, section 3.3 and appendix A) enumerate all blocks of six slots whose passes move from
lane to lane by hops that may change once, and rank them by one time each for F, I, W and transfers. Here the same
blocks, on any V whose stages can split, are built by a compiled loop and ranked by their time and memory under the cost
tables, so that none of the published ones is better than the best of these. The best ones are also starts for the
search.
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
"""Number of blocks that are kept: the best ones with different times."""

Whole = NDArray[np.int64]


def pattern_starts(instance: FitInstance, t: InstanceTables, loops: SearchLoops, kept: int = KEPT) -> list[TimedOrders]:
    """Return the orders of the best blocks that fit, best first.

    Empty if the placement is no V, if stages cannot split or if microbatches are sliced.
    """
    lanes = instance.lanes
    if lanes < 2 or instance.slices > 1 or not instance.may_split.all():
        return []
    if tuple(instance.placement.tolist()) != vee_placement(lanes):
        return []
    slots, hops = all_blocks(lanes)
    s, p = make_state(t, instance, [np.zeros(0, dtype=np.int32)] * lanes), make_scratch(lanes, instance.num_units)
    values = np.zeros(len(slots))
    loops.patterns(t, s, p, slots, hops, values)
    starts: list[TimedOrders] = []
    for n in np.argsort(values, kind="stable").tolist():
        if values[n] >= INFINITE or len(starts) == kept:
            break
        if starts and values[n] <= starts[-1].time_s * (1 + 1e-9):
            continue
        loops.patterns(t, s, p, slots[n : n + 1], hops[n : n + 1], values[n : n + 1])
        orders = [s.order[lane, : s.length[lane]].astype(np.int32) for lane in range(lanes)]
        name = "pattern " + "".join(map(str, slots[n])) + " hops " + ",".join(map(str, dict.fromkeys(hops[n].tolist())))
        starts.append(TimedOrders(float(values[n]), name, orders))
    return starts


@lru_cache(maxsize=32)
def all_blocks(lanes: int) -> tuple[Whole, Whole]:
    """Return ([block, 3] slots of lane 0, [block, lanes - 1] hops) of every block without collisions, once.

    A lane's passes in the direction away from lane 0 are in slots 0 and b plus all hops so far; those in the other
    direction are in slots a and c minus the lane. No two of them share a slot modulo the interval if the hops and the
    lane together avoid four residues.
    """
    hops = {
        tuple(hop if lane < switch else later for lane in range(lanes - 1))
        for hop in range(1, LONGEST_HOP + 1)
        for later in range(1, hop + 1)
        for switch in range(1, lanes)
    }
    hop_rows = np.array(sorted(hops), dtype=np.int64)
    moved = (
        np.concatenate([np.zeros((len(hop_rows), 1), dtype=np.int64), np.cumsum(hop_rows + 1, axis=1)], axis=1)
        % INTERVAL
    )
    occupied = np.bitwise_or.reduce(1 << moved, axis=1)
    slots, rows = [], []
    for a, b, c in permutations(range(1, INTERVAL), 3):
        barred = 0
        for residue in (a, c, a - b, c - b):
            barred |= 1 << residue % INTERVAL
        free = np.flatnonzero(occupied & barred == 0)
        slots += [(a, b, c)] * len(free)
        rows.append(hop_rows[free])
    return np.array(slots, dtype=np.int64).reshape(-1, 3), np.concatenate(rows)


def make_scratch(lanes: int, units: int) -> BlockScratch:
    """Return the arrays for blocks of this number of lanes and units."""
    capacity = max(units, 2 * lanes)
    row_size, slots = SORTS * capacity, SORTS * capacity + 20 * lanes + 64
    return BlockScratch(
        offset=np.zeros((lanes, SORTS), dtype=np.int64),
        at=np.zeros((lanes, INTERVAL), dtype=np.int64),
        row=np.zeros((lanes, row_size), dtype=np.int64),
        start=np.zeros((lanes, row_size), dtype=np.int64),
        length=np.zeros(lanes, dtype=np.int64),
        grid=np.zeros((lanes, slots), dtype=np.int64),
        stop=np.zeros((2, 2 * lanes, capacity), dtype=np.int64),
        count=np.zeros((lanes, SORTS), dtype=np.int64),
        left=np.zeros((lanes, SORTS), dtype=np.int64),
        place=np.zeros(lanes, dtype=np.int64),
        free=np.zeros(lanes, dtype=np.int64),
        peak=np.zeros(lanes, dtype=np.int64),
        queue=np.zeros(2 * capacity, dtype=np.int64),
    )
