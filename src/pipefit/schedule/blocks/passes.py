"""Passes from a building block to a schedule: repeat, squeeze, order slices, name the actions.

Between these steps a schedule is a list of passes per lane, each with its slot. The steps are plain functions; those of
`pipefit.schedule.blocks.reorder` run between `squeeze_lanes` and `order_slices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from pipefit.schedule.actions import Action, Kind, make_actions
from pipefit.schedule.blocks.building_block import LENGTH, BuildingBlock


class TimedPass(NamedTuple):
    """One pass in time."""

    start: int
    kind: Kind
    stage: int
    unit: int
    """Number of the pass among those of its stage and kind. Unit n is slice n mod s of microbatch n // s; backwards
    start with the last slice."""


make_pass: Callable[[tuple[int, Kind, int, int]], TimedPass] = partial(tuple.__new__, TimedPass)
"""Build a pass from its fields, in a third of the time of `TimedPass(...)`."""

Lanes = tuple[tuple[TimedPass, ...], ...]


def repeat_block(block: BuildingBlock, units: int) -> Lanes:
    """Return the block `units` times, one interval apart."""
    return tuple(
        tuple(
            sorted(
                make_pass((offset.start + unit * block.interval, offset.kind, offset.stage, unit))
                for offset in block.lane_passes(lane)
                for unit in range(units)
            )
        )
        for lane in range(block.num_lanes)
    )


def squeeze_lanes(lanes: Sequence[Sequence[TimedPass]], placement: Sequence[int]) -> Lanes:
    """Move every pass as early as its lane and the chain of stages allow, in unchanged order."""
    last = len(placement) - 1
    stops: dict[tuple[bool, int, int], int] = {}
    free = [0] * len(lanes)
    done: list[list[TimedPass]] = [[] for _ in lanes]
    waiting: dict[tuple[bool, int, int], int] = {}
    ready = list(range(len(lanes)))
    while ready:
        lane = ready.pop()
        passes, squeezed, time = lanes[lane], done[lane], free[lane]
        for position in range(len(squeezed), len(passes)):
            _, kind, stage, unit = passes[position]
            if kind == "W":
                squeezed.append(make_pass((time, kind, stage, unit)))
                time += LENGTH[kind]
                continue
            forward = kind == "F"
            if not forward or stage:
                needed = (True, stage - 1, unit) if forward else (stage == last, min(stage + 1, last), unit)
                stop = stops.get(needed)
                if stop is None:
                    waiting[needed] = lane
                    break
                time = max(time, stop)
            squeezed.append(make_pass((time, kind, stage, unit)))
            time += LENGTH[kind]
            output = (forward, stage, unit)
            stops[output] = time
            if output in waiting:
                ready.append(waiting.pop(output))
        free[lane] = time
    assert not waiting, f"the order cannot run: {waiting}"
    return tuple(map(tuple, done))


def required_pass(kind: Kind, stage: int, unit: int, last: int, slices: int = 1) -> tuple[bool, int, int] | None:
    """Return (forward?, stage, unit) of the pass that a pass waits for, in a chain that ends in stage `last`.

    None for W, whose I precedes it on the same lane. Backwards begin with a microbatch's last slice.
    """
    if kind == "F":
        return (True, stage - 1, unit) if stage else None
    if kind == "W":
        return None
    return (True, stage, _mirrored_unit(unit, slices)) if stage == last else (False, stage + 1, unit)


def number_passes(kinds: Iterable[tuple[Kind, int]]) -> tuple[TimedPass, ...]:
    """Return passes from (kind, stage), in order: the n-th of its sort is unit n, and it starts in slot 0."""
    counts: dict[tuple[Kind, int], int] = {}
    passes = []
    for kind, stage in kinds:
        unit = counts.get((kind, stage), 0)
        counts[kind, stage] = unit + 1
        passes.append(make_pass((0, kind, stage, unit)))
    return tuple(passes)


def order_slices(lanes: Sequence[Sequence[TimedPass]], slices: int, interval: int) -> Lanes:
    """Delay all backwards so that the last slice of a microbatch can go back first.

    The keys and values of a slice collect gradients from later slices, so backwards go by descending slice. One common
    delay for the I, B and W of all lanes keeps the order among them; a delay of whole intervals also keeps a steady
    state free of collisions. A stage then holds up to slices - 1 more units, as in Seq1F1B (Sun et al. 2024, arXiv
    2406.03488), or up to one interval's units more. `lanes` must be in time.
    """
    if slices == 1:
        return tuple(map(tuple, lanes))
    stops = {(p.stage, p.unit): p.start + LENGTH["F"] for lane in lanes for p in lane if p.kind == "F"}
    delay = max(
        stops[p.stage, _mirrored_unit(p.unit, slices)] - p.start for lane in lanes for p in lane if p.kind in ("I", "B")
    )
    delay = -(-max(delay, 0) // interval) * interval
    shifted = (
        [p if p.kind == "F" else TimedPass(p.start + delay, p.kind, p.stage, p.unit) for p in lane] for lane in lanes
    )
    return tuple(tuple(sorted(lane)) for lane in shifted)


def _mirrored_unit(unit: int, slices: int) -> int:
    """Return the forward unit that corresponds to a backward unit."""
    return unit - unit % slices + slices - 1 - unit % slices


def name_actions(lanes: Iterable[Iterable[TimedPass]], slices: int) -> tuple[tuple[Action, ...], ...]:
    """Return the passes as actions: with microbatch and slice instead of units."""
    named = []
    for lane in lanes:
        row: list[tuple[object, ...]] = []
        for _, kind, stage, unit in lane:
            position = unit if kind == "F" else _mirrored_unit(unit, slices)
            row.append((kind, stage, position // slices, position % slices, -1, ""))
        named.append(tuple(make_actions(row)))
    return tuple(named)
