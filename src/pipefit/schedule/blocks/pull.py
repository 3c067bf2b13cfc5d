"""Pulling the passes of a repeated block forward into earlier gaps, within its memory.

It is list scheduling: in order of time every pass moves into the earliest gap of its lane after its inputs. It closes
the gaps that slices leave, whose backwards are all delayed so that the last slice can go back first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from pipefit.schedule.blocks.building_block import LENGTH
from pipefit.schedule.blocks.passes import Lanes, TimedPass, required_pass
from pipefit.schedule.blocks.reorder import peak_held

FREES = ("W", "B")
"""Kinds of passes that free the tensors saved by a forward."""


def pull_forward(lanes: Lanes, placement: Sequence[int], slices: int = 1) -> Lanes:
    """Move every pass into the earliest gap that fits, in order of time.

    A forward moves only as far as the lane then holds no more units at once than the fullest lane did before. W's after
    a lane's last forward are placed after all other passes, into the remaining gaps, because nothing waits for them.
    `lanes` are in time; so is the result, with the peak of `lanes`.
    """
    puller = _GapFiller(lanes, placement, slices)
    last_forward = [max(timed_pass.start for timed_pass in lane if timed_pass.kind == "F") for lane in lanes]
    late = []
    for timed_pass in sorted(timed_pass for lane in lanes for timed_pass in lane):
        if timed_pass.kind == "W" and timed_pass.start > last_forward[placement[timed_pass.stage]]:
            late.append(timed_pass)
        else:
            puller.place_pass(timed_pass)
    for timed_pass in late:
        puller.place_pass(timed_pass)
    return tuple(tuple(sorted(lane)) for lane in puller.moved)


class _GapFiller:
    """The lanes with the passes placed so far: occupied slots, and the units held in every slot."""

    def __init__(self, lanes: Lanes, placement: Sequence[int], slices: int) -> None:
        self.placement, self.slices = placement, slices
        self.most = max(map(peak_held, lanes))
        end = max(timed_pass.start + LENGTH[timed_pass.kind] for lane in lanes for timed_pass in lane)
        self.held = [_units_held(lane, end) for lane in lanes]
        self.taken: list[set[int]] = [set() for _ in lanes]
        self.stops: dict[tuple[bool, int, int], int] = {}
        self.moved: list[list[TimedPass]] = [[] for _ in lanes]

    def place_pass(self, one: TimedPass) -> None:
        """Place a pass into its gap."""
        lane, length = self.placement[one.stage], LENGTH[one.kind]
        slot = self._earliest_slot(one)
        if one.kind == "F":
            full = (t for t in range(one.start - 1, slot - 1, -1) if self.held[lane][t] >= self.most)
            slot = max(slot, next(full, -1) + 1)
        while any(candidate in self.taken[lane] for candidate in range(slot, slot + length)):
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
        """Return the first slot after the pass's inputs and after the previous unit; for a W, after its own I."""
        if one.kind == "W":
            return self.stops[False, one.stage, one.unit]
        needed = required_pass(one.kind, one.stage, one.unit, len(self.placement) - 1, self.slices)
        before = self.stops.get((one.kind == "F", one.stage, one.unit - 1), 0)
        return max(before, self.stops[needed] if needed is not None else 0)


def _units_held(lane: Sequence[TimedPass], end: int) -> list[int]:
    """Return the units alive on a lane in every slot."""
    changes = [0] * (end + 1)
    for timed_pass in lane:
        if timed_pass.kind == "F":
            changes[timed_pass.start] += 1
        elif timed_pass.kind in FREES:
            changes[timed_pass.start + LENGTH[timed_pass.kind]] -= 1
    return list(accumulate(changes))
