"""Pulling the passes of a repeated block forward into the gaps before them, within its memory.

A pass of list scheduling: in order of time every pass moves into the earliest gap of its lane after what it needs. It
closes the gaps that slices leave, whose backwards all start later so that the last slice can go back first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from pipefit.schedule.blocks.building_block import LENGTH
from pipefit.schedule.blocks.passes import Lanes, TimedPass, required_pass
from pipefit.schedule.blocks.reorder import peak_held

FREES = ("W", "B")
"""What frees what a forward keeps."""


def pull_forward(lanes: Lanes, placement: Sequence[int], slices: int = 1) -> Lanes:
    """Every pass moved into the earliest gap that it fits in, in order of time; a forward only as far as the lane
    then holds no more units at once than the fullest lane did before. W's behind a lane's last forward come after
    everything else, into the gaps that are left: nothing waits for them.

    `lanes` are in time; so is the result, with the peak of `lanes`.
    """
    puller = _GapFiller(lanes, placement, slices)
    last_forward = [max(one.start for one in lane if one.kind == "F") for lane in lanes]
    late = []
    for one in sorted(one for lane in lanes for one in lane):
        if one.kind == "W" and one.start > last_forward[placement[one.stage]]:
            late.append(one)
        else:
            puller.place_pass(one)
    for one in late:
        puller.place_pass(one)
    return tuple(tuple(sorted(lane)) for lane in puller.moved)


class _GapFiller:
    """The lanes as far as they are placed: taken slots, and the units that lanes hold in every slot."""

    def __init__(self, lanes: Lanes, placement: Sequence[int], slices: int) -> None:
        self.placement, self.slices = placement, slices
        self.most = max(map(peak_held, lanes))
        end = max(one.start + LENGTH[one.kind] for lane in lanes for one in lane)
        self.held = [_units_held(lane, end) for lane in lanes]
        self.taken: list[set[int]] = [set() for _ in lanes]
        self.stops: dict[tuple[bool, int, int], int] = {}
        self.moved: list[list[TimedPass]] = [[] for _ in lanes]

    def place_pass(self, one: TimedPass) -> None:
        """Put a pass into its gap."""
        lane, length = self.placement[one.stage], LENGTH[one.kind]
        slot = self._earliest_slot(one)
        if one.kind == "F":
            full = (t for t in range(one.start - 1, slot - 1, -1) if self.held[lane][t] >= self.most)
            slot = max(slot, next(full, -1) + 1)
        while any(other in self.taken[lane] for other in range(slot, slot + length)):
            slot += 1
        self.taken[lane].update(range(slot, slot + length))
        self.moved[lane].append(TimedPass(slot, one.kind, one.stage, one.unit))
        if one.kind != "W":
            self.stops[one.kind == "F", one.stage, one.unit] = slot + length
        if one.kind == "F":
            for t in range(slot, one.start):
                self.held[lane][t] += 1
        elif one.kind in FREES:
            for t in range(slot + length, one.start + length):
                self.held[lane][t] -= 1

    def _earliest_slot(self, one: TimedPass) -> int:
        """After what it needs, and after the unit before it; a W after its own I."""
        if one.kind == "W":
            return self.stops[False, one.stage, one.unit]
        needed = required_pass(one.kind, one.stage, one.unit, len(self.placement) - 1, self.slices)
        before = self.stops.get((one.kind == "F", one.stage, one.unit - 1), 0)
        return max(before, self.stops[needed] if needed is not None else 0)


def _units_held(lane: Sequence[TimedPass], end: int) -> list[int]:
    """For every slot, the units alive on a lane."""
    changes = [0] * (end + 1)
    for one in lane:
        if one.kind == "F":
            changes[one.start] += 1
        elif one.kind in FREES:
            changes[one.start + LENGTH[one.kind]] -= 1
    return list(accumulate(changes))
