"""The published adaptive search for V schedules under a memory cap (Qi et al. 2024, arXiv 2405.15362, section 3.3 and
appendix A; the authors' program is sail-sg/zero-bubble-pipeline-parallelism, `v_auto_schedule.py` at 39f2c186).

It knows one F, one I, one W and one transfer time. A block is given by the slots of lane 0's four chain passes modulo
6 and by the hops from lane to lane: the ways away from lane 0 hop k slots, another k' <= k behind lane K; the ways
back hop one. Every block is repeated, squeezed, reordered at both ends; holes are filled as far as the peak allows;
W's go by first in, first out. What exceeds the cap falls out, and of the rest the one with the shortest span under
the scalar times is kept. Repeating, squeezing, warm-up and cool-down are pipefit's block passes, which do the same.

Where it differs from the program, never to its disadvantage:

- a block that several (k, k', K) describe is looked at once;
- K is tried to its end where the program leaves the loop at the first block over the cap;
- a block whose cool-down would put two passes into one slot is dropped, as the program's validity check does later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from pipefit.schedule.actions import Schedule
from pipefit.schedule.blocks.building_block import BuildingBlock, place_weights
from pipefit.schedule.blocks.passes import (
    Lanes,
    TimedPass,
    name_actions,
    number_passes,
    repeat_block,
    required_pass,
    squeeze_lanes,
)
from pipefit.schedule.blocks.reorder import Sort, peak_held, reorder_cool_down, reorder_warm_up
from pipefit.schedule.problem import vee_placement

INTERVAL = 6
LONGEST_HOP = 5


@dataclass(frozen=True, slots=True)
class Means:
    """What the search knows of times: one of each, the same for all stages and edges."""

    forward_s: float
    input_s: float
    weight_s: float
    transfer_s: float

    def of(self, kind: str) -> float:
        """The time of an F, I or W."""
        return {"F": self.forward_s, "I": self.input_s, "W": self.weight_s}[kind]


@dataclass(frozen=True, slots=True)
class Found:
    """What the search returns."""

    schedule: Schedule
    span_s: float
    "Of the lane that takes longest from its first start to its last end, under the mean times."
    peak: int
    "Most stage-microbatches on a lane."
    block: BuildingBlock
    candidates: int
    "Blocks that led to a schedule within the cap."


def search(devices: int, microbatches: int, cap: int, means: Means) -> Found | None:
    """The schedule with the shortest span under `means` that holds at most `cap` stage-microbatches on a lane, or None
    where no block leads to one. `devices` at least 2."""
    best: tuple[float, Lanes, BuildingBlock] | None = None
    count = 0
    for block in blocks(devices):
        lanes = schedule_block(block, microbatches, cap)
        if lanes is None:
            continue
        count += 1
        span_s = span(lanes, means)
        if best is None or span_s < best[0]:
            best = span_s, lanes, block
    if best is None:
        return None
    span_s, lanes, block = best
    schedule = Schedule(
        name="adaptive",
        placement=vee_placement(devices),
        microbatches=microbatches,
        slices=1,
        lanes=name_actions(lanes, 1),
    )
    return Found(schedule, span_s, max(map(peak_held, lanes)), block, count)


def blocks(devices: int) -> Iterator[BuildingBlock]:
    """Every block of the search space without collisions, once."""
    seen = set()
    for first in permutations(range(1, INTERVAL), 3):
        for hop in range(1, LONGEST_HOP + 1):
            for later in range(1, hop + 1):
                for switch in range(1, devices):
                    hops = [hop if lane < switch else later for lane in range(devices - 1)]
                    block = _block(first, hops)
                    if block is not None and block not in seen:
                        seen.add(block)
                        yield block


def _block(first: Sequence[int], hops: Sequence[int]) -> BuildingBlock | None:
    """The block whose lane 0 has its F of the way up, its I of the way up and its I of the way down in the slots
    `first` modulo 6, and lane i + 1 has its passes `hops[i]` slots later (chain away from lane 0) or one earlier (chain
    towards it). None if passes of a lane claim one slot."""
    depth = len(hops) + 1
    down = [sum(hops[:lane]) for lane in range(depth)]
    on_lane_0 = (0, *first)
    slots = [
        [(slot + (down[lane] if sort % 2 == 0 else -lane)) % INTERVAL for sort, slot in enumerate(on_lane_0)]
        for lane in range(depth)
    ]
    if any(len(set(row)) < 4 for row in slots):
        return None
    starts: list[list[int]] = []
    reached = -1
    for sort in range(4):
        row = [0] * depth
        for lane in range(depth) if sort % 2 == 0 else reversed(range(depth)):
            reached += 1 + (slots[lane][sort] - reached - 1) % INTERVAL
            row[lane] = reached
        starts.append(row)
    return place_weights(
        BuildingBlock(
            placement=vee_placement(depth),
            interval=INTERVAL,
            forward=(*starts[0], *reversed(starts[1])),
            backward=(*starts[3], *reversed(starts[2])),
        )
    )


def schedule_block(block: BuildingBlock, microbatches: int, cap: int) -> Lanes | None:
    """Repeat, squeeze, reorder, fill: the passes of every lane in order, or None where the cap or the chain of stages
    is violated. Units are at least two a lane until the cool-down; what is too much then falls away."""
    depth = block.num_lanes
    units = max(microbatches, 2 * depth)
    most = min(cap, 2 * depth)
    lanes = repeat_block(block, units)
    first_peak = max(map(peak_held, lanes))
    if first_peak > 2 * depth or (units == microbatches and first_peak > most):
        return None
    lanes = reorder_warm_up(squeeze_lanes(lanes, block.placement), first_peak)
    if max(map(peak_held, lanes)) > first_peak:
        return None
    if units > microbatches:
        lanes = tuple(tuple(one for one in lane if one.unit < microbatches) for lane in lanes)
        if microbatches <= depth and 2 * microbatches <= cap:
            lanes = _delay_weights(lanes, min(2 * depth, max(map(peak_held, lanes))))
        lanes = squeeze_lanes(lanes, block.placement)
        first_peak = max(map(peak_held, lanes))
        if first_peak > most:
            return None
    lanes = reorder_cool_down(lanes, first_peak)
    lanes = in_order_of_inputs(fill_holes(lanes, block.placement))
    return None if max(map(peak_held, lanes)) > first_peak else lanes


def _delay_weights(lanes: Lanes, most: int) -> Lanes:
    """The first W's of every lane at its end, as many as its peak may grow: for so few units that the memory is
    there."""
    moved = []
    for lane in lanes:
        spare = most - peak_held(lane)
        early = [place for place, one in enumerate(lane) if one.kind == "W"][:spare]
        kept = [one for place, one in enumerate(lane) if place not in early]
        moved.append(number_passes((one.kind, one.stage) for one in [*kept, *(lane[place] for place in early)]))
    return tuple(moved)


def fill_holes(lanes: Lanes, placement: Sequence[int]) -> Lanes:
    """Slot by slot, every hole filled with a later pass of its lane, if one can move: what it needs is done, and no
    F takes the lane above the peak it had. Of each sort only the next one is looked at, nearest first."""
    depth = len(lanes)
    most = max(map(peak_held, lanes))
    end = 1 + max(one.start for lane in lanes for one in lane)
    rows: list[list[Sort | None]] = [[None] * end for _ in lanes]
    for row, lane in zip(rows, lanes, strict=True):
        for one in lane:
            row[one.start] = (one.kind, one.stage)
    last = [{sort: slot for slot, sort in enumerate(row) if sort is not None} for row in rows]
    done: dict[tuple[bool, int, int], int] = {}
    counts: list[dict[Sort, int]] = [dict.fromkeys(own, 0) for own in last]
    held = [0] * depth
    for slot in range(end):
        for lane, row in enumerate(rows):
            if row[slot] is None:
                found = _movable(row, slot, last[lane], counts[lane], done, most - held[lane], len(placement) - 1)
                if found is None:
                    continue
                row[slot], row[found] = row[found], None
            kind, stage = row[slot]  # type: ignore[misc]
            unit = counts[lane][kind, stage]
            counts[lane][kind, stage] = unit + 1
            held[lane] += (kind == "F") - (kind == "W")
            if kind != "W":
                done[kind == "F", stage, unit] = slot
    return tuple(map(_passes, rows))


def _movable(
    row: Sequence[Sort | None],
    hole: int,
    last: dict[Sort, int],
    counts: dict[Sort, int],
    done: dict[tuple[bool, int, int], int],
    room: int,
    end: int,
) -> int | None:
    """The slot of the first later pass that may move into the hole."""
    left = {sort for sort, slot in last.items() if slot > hole}
    change = highest = 0
    for slot in range(hole + 1, len(row)):
        if not left:
            return None
        sort = row[slot]
        if sort is None:
            continue
        kind, stage = sort
        before = highest
        change += (kind == "F") - (kind == "W")
        highest = max(highest, change)
        if sort not in left:
            continue
        left.remove(sort)
        if kind == "F" and before >= room:
            continue
        unit = counts[sort]
        if kind == "W":
            ready = counts["I", stage] > unit
        else:
            needed = required_pass(kind, stage, unit, end)
            ready = needed is None or done.get(needed, hole) < hole
        if ready:
            return slot
    return None


def _passes(row: Sequence[Sort | None]) -> tuple[TimedPass, ...]:
    slots = [slot for slot, sort in enumerate(row) if sort is not None]
    named = number_passes(sort for sort in row if sort is not None)
    return tuple(one._replace(start=slot) for one, slot in zip(named, slots, strict=True))


def in_order_of_inputs(lanes: Lanes) -> Lanes:
    """The lanes with their W's renamed: first in, first out over both stages of a lane."""
    renamed = []
    for lane in lanes:
        waiting = [(one.stage, one.unit) for one in lane if one.kind == "I"]
        renamed.append(tuple(TimedPass(one.start, "W", *waiting.pop(0)) if one.kind == "W" else one for one in lane))
    return tuple(renamed)


def span(lanes: Lanes, means: Means) -> float:
    """From the first start to the last end of the lane that takes longest, every pass as early as its lane and the
    chain of stages allow; a hop between lanes takes `means.transfer_s` more."""
    depth = len(lanes)
    last = 2 * depth - 1
    time_s = {kind: means.of(kind) for kind in "FIW"}
    stops: dict[tuple[bool, int, int], float] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    reached, place, first = [0.0] * depth, [0] * depth, [0.0] * depth
    ready = list(range(depth))
    while ready:
        lane = ready.pop()
        row = lanes[lane]
        while place[lane] < len(row):
            _, kind, stage, unit = row[place[lane]]
            needed = required_pass(kind, stage, unit, last)
            start = reached[lane]
            if needed is not None:
                if needed not in stops:
                    waiting[needed] = lane
                    break
                other = needed[1]
                same = min(other, last - other) == lane
                start = max(start, stops[needed] + (0.0 if same else means.transfer_s))
            if not place[lane]:
                first[lane] = start
            place[lane] += 1
            reached[lane] = start + time_s[kind]
            if kind != "W":
                made = (kind == "F", stage, unit)
                stops[made] = reached[lane]
                if made in waiting:
                    ready.append(waiting.pop(made))
    assert not waiting, f"the order cannot run: {waiting}"
    return max(stop - start for stop, start in zip(reached, first, strict=True))
