"""All numbers of a placement search in three arrays, the arguments of its compiled functions.

`whole` (int64) and `real` (float64) hold many arrays in sequence. `at[NAME]` is the offset of NAME in one of them, or a
number by itself. Compiling functions that pass dozens of arrays to each other takes numba 20 s, these three a few. In
the lists below, [a, b] is an array with these axes, last one fastest.

Words: a `slot` is a position of the plan (lane, replica, shard; idle ones follow); a `message` goes from slot to slot;
a `flow` is a set of messages that start together; a `term` is a collective of a lane's replicas, or its part not hidden
by a backward; a `row` is a time that depends on the kinds of devices on a lane; an `entry` is one of the searched
times, which form one vector x of ticks: the full time of every flow, its port time, terms, rows. A `cut` is a critical
path: a constant and a weight for every entry; the estimate is the largest cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipefit.cost.types import Array
from pipefit.plan.placement.links import Ints

(
    DEVICES, HOSTS, MATRICES, RAILS, SINGLE, KINDS,
    LANE_COUNT, REPLICAS, SHARDS, SLOTS, FLOWS, MESSAGES, TERMS, ENTRIES, CUT_ROOM,
    LEVELS, RACK_COUNT, RACK_SIZE, FIRST_LEVEL, AIMED,
    STAMP, CHANGES, USED, LEADING, KEEPS, ARRIVED, TOUCHED, NEW_LEADING,
) = range(28)  # fmt: skip
"""Numbers: sizes of the cluster and of the plan; limits of moves; and the changing state: the number of the move, the
entries it changes, the cuts in use, the largest of them, whether the move keeps the devices of every lane, whether it
swaps two devices, the flows it touches, and the cut that leads after it."""

HOST, RAIL, MATRIX, SHARED, LATENCY, BUSY, INSIDE_LATENCY, INSIDE_BUSY, KIND = range(28, 37)
"""Links: [device], [device], [rail], [rail], [matrix, host, host], [size, matrix, host, host], [host], [size, host],
[device]. See `links.LinkArrays`."""

FLOW_START, SOURCE, TARGET, SIZE, FLOW_OF, SLOT_START, SLOT_MESSAGES = range(37, 44)
"""Transfers: [flow + 1], [message] four times, [slot + 1], the messages of every slot."""

TERM_START, PASSES, MORE, LINE_START, ROW_START, ROW_TIME, ALLOWED = range(44, 51)
"""Lanes: [lane + 1], [term], [term], [term + 1], [lane + 1], [row, kind], [lane + 1, kind]. See `shape`."""

BLOCK_START, BLOCKS, BLOCK_WIDTH, BLOCK_SLOTS, BLOCK_OF, RACK_DEVICES, UNTIL = range(51, 58)
"""Moves: [level] three times, [block, slot] of all levels, [level, slot], [rack, device], [kind of move]."""

WEIGHT, CONSTANT = 58, 59
"""Cuts: [entry, cut], [cut]."""

DEVICE, SLOT_OF, MESSAGE_BUSY, MESSAGE_LATENCY, ORDER, X, VALUE, TOP, LOAD = range(60, 69)
"""State: the device at every slot, the slot of every device, ticks of every message twice, [lane, shard, replica] the
slots of a lane sorted by device, [entry], [cut], [flow, 4] the largest busy ticks of its ports and their message, the
largest latency and its message; [port] scratch, always left at 0."""

MOVED_SLOT, MOVED_DEVICE, SEEN_FLOW, SEEN_LANE, FLOW_LIST, LANE_LIST = range(69, 75)
"""Scratch of a move: slots and their new devices, marks and lists of the affected flows and lanes."""

CHANGED_ENTRY, CHANGED_BY, NEW_VALUE, NEW_TOP, RESCAN = range(75, 80)
"""Changes of a noted move: entries of x and their differences, [cut], [flow, 4], and whether to rescan a flow."""

PER_BYTE, INSIDE_PER_BYTE, LATENCY_FACTOR, BYTE_FACTOR, BYTES, SHARE, LINE_SHARE, LINE_BESIDE = range(80, 88)
"""In `real`: [matrix, host, host], [host], [term] four times, [line] twice."""

RING, LOAD_PER_BYTE = 88, 89
"""In `real`: ten values of the rings of a lane (`rings.ring_facts`), and [port] scratch."""

(
    EDGE_START, EDGE_FLOWS, EDGE_OF, FORWARD, PAIR_OF, PAIR,
    PARTNER, BACK, DISTANCE, PARENT, AHEAD, KEPT_EDGE, KEPT_PAIRS, LAYOUT, KEPT_EDGES, TOUCHED_EDGE, HOP,
) = range(90, 107)  # fmt: skip
"""The search over sets (`sets`, `chains`), where edge k is the boundary between the lanes k and k + 1. Constants: [edge
+ 1], the flows of every edge, [flow] its edge, [flow] whether it goes forward, [edge] its matrix of [matrix, device,
device] ticks of a pair. State: [edge, replica] the right position of every left position, and the inverse. Scratch:
[replica] three times, [4] edges and [4, replica] their PARTNER before a move, [slot] the placement pipeline by
pipeline; and the number of saved edges."""

COUNT = 107


@dataclass(frozen=True, slots=True)
class KernelArena:
    """The three arrays of a search, and the sizes of the arrays in them."""

    whole: Ints
    real: Array
    at: Ints
    sizes: Mapping[int, int]

    def array_view(self, name: int) -> Ints:
        """Return an array of `whole` as a view: writes to it change the arena."""
        start = int(self.at[name])
        return self.whole[start : start + self.sizes[name]]

    def fill_array(self, name: int, values: Ints) -> None:
        """Fill an array of `whole`, from its beginning."""
        flat = values.reshape(-1)
        assert len(flat) <= self.sizes[name]
        self.array_view(name)[: len(flat)] = flat


def make_arena(numbers: Mapping[int, int], whole: Mapping[int, Ints], real: Mapping[int, Array]) -> KernelArena:
    """Return the arena of these numbers and arrays by name."""
    offsets = np.zeros(COUNT, dtype=np.int64)
    for name, number in numbers.items():
        offsets[name] = number
    sizes: dict[int, int] = {}
    for arrays in (whole, real):
        start = 0
        for name, values in arrays.items():
            offsets[name], sizes[name] = start, values.size
            start += values.size
    ints = np.concatenate([np.asarray(values, dtype=np.int64).reshape(-1) for values in whole.values()])
    floats = np.concatenate([np.asarray(values, dtype=np.float64).reshape(-1) for values in real.values()])
    return KernelArena(ints, floats, offsets, sizes)
