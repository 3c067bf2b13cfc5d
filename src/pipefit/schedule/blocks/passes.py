"""Passes from a building block to a schedule: repeat, squeeze, order slices, name the actions.

Between these steps a schedule is a list of passes per lane, each with its slot. The steps are plain functions; those of
`pipefit.schedule.blocks.reorder` run between `squeeze_lanes` and `order_slices`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipefit.schedule.actions import Action, Kind
from pipefit.schedule.blocks.building_block import LENGTH, BuildingBlock


class TimedPass(NamedTuple):
    """One pass in time."""

    start: int
    kind: Kind
    stage: int
    unit: int
    """Number of the pass among those of its stage and kind. Unit n is slice n mod s of microbatch n // s; backwards
    start with the last slice."""


Lanes = tuple[tuple[TimedPass, ...], ...]


def repeat_block(block: BuildingBlock, units: int) -> Lanes:
    """Return the block `units` times, one interval apart."""
    return tuple(
        tuple(
            sorted(
                TimedPass(offset.start + unit * block.interval, offset.kind, offset.stage, unit)
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
        while len(done[lane]) < len(lanes[lane]):
            _, kind, stage, unit = lanes[lane][len(done[lane])]
            needed = required_pass(kind, stage, unit, last)
            if needed is not None and needed not in stops:
                waiting[needed] = lane
                break
            start = max(free[lane], stops[needed] if needed is not None else 0)
            done[lane].append(TimedPass(start, kind, stage, unit))
            free[lane] = start + LENGTH[kind]
            if kind != "W":
                output = (kind == "F", stage, unit)
                stops[output] = free[lane]
                if output in waiting:
                    ready.append(waiting.pop(output))
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
        passes.append(TimedPass(0, kind, stage, unit))
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
        row = []
        for _, kind, stage, unit in lane:
            position = unit if kind == "F" else _mirrored_unit(unit, slices)
            row.append(Action(kind, stage, position // slices, position % slices))
        named.append(tuple(row))
    return tuple(named)
