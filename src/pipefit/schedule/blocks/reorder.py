"""Reordering of both ends of a repeated V block: a warm-up that fills the memory, and a cool-down without gaps.

Both keep the steady state between them, and the peak (Qi et al. 2024, arXiv 2405.15362, section 3.3 and appendix; the
counts are those of the authors' program). Lane i of d holds stages i (the way down) and 2d-1-i (the way up). Times are
slots of one F, I or W. With both, the slowest lane of the V family idles max(0, 6d - 3k - 1) slots with k
stage-microbatches of memory, which is the paper's lower bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipefit.schedule.actions import Kind
from pipefit.schedule.blocks.passes import Lanes, TimedPass, number_passes, squeeze_lanes

Sort = tuple[Kind, int]
"""(kind, stage)."""


def peak_held(passes: Sequence[TimedPass]) -> int:
    """Return the maximum number of stage-microbatches that a lane holds at once, in this order."""
    held = peak = 0
    for timed_pass in passes:
        held += (timed_pass.kind == "F") - (timed_pass.kind in ("W", "B"))
        peak = max(peak, held)
    return peak


def reorder_warm_up(lanes: Lanes, most: int) -> Lanes:
    """Reorder the passes of every lane before the first backward of its down stage so that memory fills sooner.

    Before the first backward of its up stage, lane i runs forwards until `most` units are alive, min(i + 1, most / 2)
    of them of the up stage; then follow I, W and a forward in turn. Returns squeezed lanes.
    """
    depth = len(lanes)
    most = min(most, 2 * depth)
    reordered = []
    for i, lane in enumerate(lanes):
        down, up = i, 2 * depth - 1 - i
        end = next(index for index, timed_pass in enumerate(lane) if (timed_pass.kind, timed_pass.stage) == ("I", down))
        head = _warm_up(Counter((timed_pass.kind, timed_pass.stage) for timed_pass in lane[:end]), i, depth, most)
        assert all(timed_pass.stage == up or timed_pass.kind == "F" for timed_pass in lane[:end])
        reordered.append(number_passes([*head, *((timed_pass.kind, timed_pass.stage) for timed_pass in lane[end:])]))
    return squeeze_lanes(reordered, _vee_stages(depth))


def _warm_up(left: Counter[Sort], i: int, depth: int, most: int) -> list[Sort]:
    """Return an order of the passes counted in `left`."""
    down: Sort = ("F", i)
    up: Sort = ("F", 2 * depth - 1 - i)
    backward: tuple[Sort, Sort] = ("I", up[1]), ("W", up[1])
    order: list[Sort] = []

    def take_pass(sort: Sort) -> bool:
        if not left[sort]:
            return False
        left[sort] -= 1
        order.append(sort)
        return True

    early_up = min(i + 1, most // 2, left[up])
    early_down = min(most - min(i + 1, most // 2), left[down])
    for position in range(2 * (depth - 1 - i) + i + 1):
        if early_down:
            early_down -= take_pass(down)
        if early_up and position >= 2 * (depth - 1 - i):
            early_up -= take_pass(up)
    while left.total():
        for sort in backward:
            take_pass(sort)
        if not take_pass(up):
            take_pass(down)
    return order


def without_weights(lanes: Lanes) -> Lanes:
    """Return the lanes without W's, which `reorder_cool_down` inserts into idle slots. For unit counts so small that
    all of them fit in memory."""
    return tuple(tuple(timed_pass for timed_pass in lane if timed_pass.kind != "W") for lane in lanes)


def reorder_cool_down(lanes: Lanes, most: int) -> Lanes:
    """Move the last backwards of every lane as close together as the chain of stages allows, with W's in the remaining
    slots.

    `lanes` are squeezed and `most` is their peak; missing W's are inserted. After lane 0's last forward the last (most
    + 1) / 2 backwards of the down stage end two slots apart, with up to i + 1 of the up stage between them. Returns
    squeezed lanes.
    """
    depth = len(lanes)
    units = 1 + max(timed_pass.unit for timed_pass in lanes[0])
    downs = min((most + 1) // 2, units)
    turn = max(
        timed_pass.start for timed_pass in lanes[0] if (timed_pass.kind, timed_pass.stage) == ("F", 2 * depth - 1)
    )
    reordered = []
    for i, lane in enumerate(lanes):
        down, up = i, 2 * depth - 1 - i
        ups = min(i + 1, most - downs, units)
        grid = {timed_pass.start: (timed_pass.kind, timed_pass.stage) for timed_pass in lane}
        _lift_passes(grid, ("I", down), downs)
        _lift_passes(grid, ("I", up), ups)
        _lift_weights(grid, {("W", down): downs, ("W", up): ups}, most)
        for k in range(downs):
            _put_pass(grid, turn + 2 * depth - i - 2 * k, ("I", down))
        for k in range(ups):
            _put_pass(grid, turn + 1 + i - 2 * k, ("I", up))
        _fill_weights(grid, down, up)
        reordered.append(number_passes(grid[slot] for slot in sorted(grid)))
    return squeeze_lanes(reordered, _vee_stages(depth))


def _lift_passes(grid: dict[int, Sort], sort: Sort, count: int) -> None:
    """Remove the last `count` passes of a sort."""
    for slot in sorted((slot for slot, placed in grid.items() if placed == sort), reverse=True)[:count]:
        del grid[slot]


def _lift_weights(grid: dict[int, Sort], least: dict[Sort, int], total: int) -> None:
    """Remove W's from the end until at least `least[sort]` of each sort and `total` in all have been removed."""
    lifted = dict.fromkeys(least, 0)
    for slot in sorted(grid, reverse=True):
        if all(lifted[sort] >= least[sort] for sort in least) and sum(lifted.values()) >= total:
            return
        if grid[slot] in lifted:
            lifted[grid.pop(slot)] += 1


def _put_pass(grid: dict[int, Sort], slot: int, sort: Sort) -> None:
    assert slot not in grid, f"{sort} and {grid[slot]} claim slot {slot}"
    grid[slot] = sort


def _fill_weights(grid: dict[int, Sort], down: int, up: int) -> None:
    """Insert the removed W's into empty slots after the last remaining one, and at the end, up before down."""
    start = 1 + max((slot for slot, (kind, _) in grid.items() if kind == "W"), default=-1)
    pending = {up: 0, down: 0}
    slot, last = 0, max(grid)
    while slot <= last or any(pending.values()):
        if slot in grid:
            kind, stage = grid[slot]
            pending[stage] += (kind == "I") - (kind == "W")
        elif slot >= start and any(pending.values()):
            stage = up if pending[up] else down
            grid[slot] = ("W", stage)
            pending[stage] -= 1
        slot += 1


def _vee_stages(depth: int) -> tuple[int, ...]:
    return (*range(depth), *reversed(range(depth)))
