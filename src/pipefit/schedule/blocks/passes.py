"""From a building block to a schedule: repeat, squeeze, put slices in order, name the actions.

Between these passes a schedule is the passes of every lane in order, each with its slot. They are plain functions;
what `pipefit.schedule.blocks.reorder` does stands between `squeeze_lanes` and `order_slices`.
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
    "Counts a stage's passes of this kind. Unit n is slice n mod s of microbatch n // s, backwards from its last one."


Lanes = tuple[tuple[TimedPass, ...], ...]


def repeat_block(block: BuildingBlock, units: int) -> Lanes:
    """The block `units` times, one interval apart."""
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
    """Every pass as early as its lane and the chain of stages allow, in unchanged order."""
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
                made = (kind == "F", stage, unit)
                stops[made] = free[lane]
                if made in waiting:
                    ready.append(waiting.pop(made))
    assert not waiting, f"the order cannot run: {waiting}"
    return tuple(map(tuple, done))


def required_pass(kind: Kind, stage: int, unit: int, last: int, slices: int = 1) -> tuple[bool, int, int] | None:
    """(forward?, stage, unit) that a pass of a chain ending in stage `last` waits for; for W nothing, as its lane's
    order has its I before it. Backwards begin with a microbatch's last slice."""
    if kind == "F":
        return (True, stage - 1, unit) if stage else None
    if kind == "W":
        return None
    return (True, stage, _mirrored_unit(unit, slices)) if stage == last else (False, stage + 1, unit)


def number_passes(kinds: Iterable[tuple[Kind, int]]) -> tuple[TimedPass, ...]:
    """Passes from (kind, stage), in order: the n-th of its sort is unit n, and it starts in slot 0."""
    counts: dict[tuple[Kind, int], int] = {}
    passes = []
    for kind, stage in kinds:
        unit = counts.get((kind, stage), 0)
        counts[kind, stage] = unit + 1
        passes.append(TimedPass(0, kind, stage, unit))
    return tuple(passes)


def order_slices(lanes: Sequence[Sequence[TimedPass]], slices: int, interval: int) -> Lanes:
    """The lanes with all backwards so much later that the last slice of a microbatch can go back first.

    The keys and values of a slice collect gradients from later ones, so backwards go by descending slice. One delay
    for the I, B and W of all lanes leaves the order among them as it was; as whole intervals it keeps a steady state
    without collisions so. A stage then holds up to slices - 1 more units, as in Seq1F1B (Sun et al. 2024, arXiv
    2406.03488), or one more interval's. `num_lanes` must be in time.
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
    """The forward unit that a backward unit belongs to."""
    return unit - unit % slices + slices - 1 - unit % slices


def name_actions(lanes: Iterable[Iterable[TimedPass]], slices: int) -> tuple[tuple[Action, ...], ...]:
    """The passes by their names: microbatch and slice in place of units."""
    named = []
    for lane in lanes:
        row = []
        for _, kind, stage, unit in lane:
            place = unit if kind == "F" else _mirrored_unit(unit, slices)
            row.append(Action(kind, stage, place // slices, place % slices))
        named.append(tuple(row))
    return tuple(named)
