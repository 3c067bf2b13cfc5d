"""Lower bounds on the time of every schedule of an instance, computed without search.

The backward of a unit is its I and W, or its B.

Heads and tails. The **head** of an operation is a time before which it cannot start. It is the longest path over data
dependencies, the order of units on its stage, and memory (a stage that can hold K units starts the forward of unit j
only when unit j - K is freed). The **tail** is the same backwards in time: the least time from an operation's end to
the end.

Idle time. Let a lane run from time 0 to C, and let A(t) be an upper bound on its work by time t: only operations with
heads below t count, and at the last allocation before t the units begun and not freed fit in memory. Then the lane
idles at least t - A(t) by time t. Let Z(t) be the same bound for the last t before C, from tails: units whose backward
is wholly or partly in that window, and whose forward is not, were all held at the start of the window. Then C >= work +
t - A(t) and C >= work + u - Z(u). If a bound on C implies that the two windows do not overlap, t + u <= C,

    C >= work + (t - A(t)) + (u - Z(u)).

In unit time, with k units of memory on the lanes of a V of d, the lane of the turn has t = 3 d - 1 (its first backward)
with A <= k, and u = 3 d (from its last forward) with Z <= 2 k: 6 d - 3 k - 1 idle slots (Qi et al. 2024, arXiv
2405.15362). With one stage per lane, lane 0 has t = d F + (d - 1)(I + 2 transfers) and A <= k F: the chain of appendix
B of the zero-bubble paper (arXiv 2401.10241).

The span. Let S be the longest time from a lane's first operation to its last. On lane l, time counts from its first
operation: heads are longest paths from the operations of l. The lane ends at S or earlier. Work that must still reach
lane r must do so within S of the first operation of r, which starts at least delta(r, l) before the first one of l. A
tail is therefore the maximum, over r, of delta(r, l) + the longest path to the end of lane r.

Work. A unit's backward counts as the quicker of I with W and B. If only a part of it lies in a window, its work there
is reduced by the additional time of the slower choice, so that the inequality holds for every choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray

from pipefit.schedule.fit.instance import B, F, FitInstance, Floats, I, W

Windows = list[tuple[float, float]]
"""(length, least idle time in it), both increasing, from (0, 0)."""

CANDIDATES = 160
"""Window lengths tried for each lane."""
ROUNDING = 1e-6
"""Relative amount by which rounding of times to quanta may raise a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """A lower bound on the objective, with its parts."""

    time_s: float
    lane: int
    "The lane for which it was derived."
    work_s: float
    "The work of the lane."
    before_s: float
    "Its minimum idle time at the beginning."
    after_s: float
    "Its minimum idle time at the end."


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastTimes:
    """Minimum times and memory by [stage, unit] over all choices of I and W or B."""

    instance: FitInstance
    back: Floats
    "From the start of a backward until its gradient can be sent."
    whole: Floats
    "The work of a backward."
    weight: Floats
    "The work in the last window of a backward with only its W there: the rest of `whole` after I."
    keep: Floats
    "The least memory held by a unit between its F and its end."
    between: Floats
    "The memory held by a unit between I and W."
    any_order: NDArray[np.bool_]
    """[stage]: whether units may be freed in another order than they arrive: if only some run as B, or if slices go
    back in reverse order."""
    room: NDArray[np.int64]
    "[stage]: the maximum number of units held at once."


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestPaths:
    """Longest paths by [source lane, stage, unit]: heads from the first operation of a lane, and tails to its end.

    -inf without a path. For the makespan there is one source, before and after all operations.
    """

    forward: Floats
    "Heads."
    back: Floats
    from_forward: Floats
    "Tails, from an operation's start."
    from_back: Floats


def lower_bound(instance: FitInstance) -> LowerBound:
    """Return the largest bound over lanes."""
    least = _least_times(instance)
    paths = _longest_paths(least)
    return max((_lane_bound(least, paths, lane) for lane in range(instance.lanes)), key=lambda bound: bound.time_s)


def check_bound(bound_s: float, time_s: float) -> float:
    """Return the bound, capped at the time of a schedule. Raises AssertionError if it exceeds that time by more than
    rounding: then a proof is wrong."""
    assert bound_s <= time_s * (1 + ROUNDING), f"a bound of {bound_s!r} s for a schedule that takes {time_s!r} s"
    return min(bound_s, time_s)


def _least_times(instance: FitInstance) -> LeastTimes:
    split, merge = instance.may_split[:, None], instance.may_merge[:, None]
    time, held = instance.time_s, instance.held_bytes
    apart = np.where(split, time[I] + time[W], np.inf)
    work = np.minimum(apart, np.where(merge, time[B], np.inf))
    back = np.minimum(np.where(split, time[I], np.inf), np.where(merge, time[B], np.inf))
    between = np.where(split, held[F] + held[I], held[F])
    keep = np.minimum(held[F], between)
    least_kept = keep.min(axis=1)
    limit = instance.limit_bytes[instance.placement] * (1 + 1e-9)
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.where((least_kept > 0) & np.isfinite(limit), np.floor(limit / least_kept), instance.num_units)
    return LeastTimes(
        instance=instance,
        back=back,
        whole=work,
        weight=np.where(split, np.maximum(work - time[I], 0.0), 0.0),
        keep=keep,
        between=between,
        any_order=(instance.may_split & instance.may_merge) | (instance.slices > 1),
        room=np.clip(room, 1, instance.num_units).astype(np.int64),
    )


def _longest_paths(least: LeastTimes) -> LongestPaths:
    """Return longest paths by repeated sweeps over the stages.

    Each sweep passes memory delays on to later units; any number of sweeps gives valid lower bounds.
    """
    instance = least.instance
    stages, units = instance.num_stages, instance.num_units
    sources = instance.lanes if instance.objective == "span" else 1
    inside = np.ones((1, stages), dtype=np.bool_)
    if instance.objective == "span":
        inside = instance.placement[None, :] == np.arange(sources)[:, None]
    base = np.where(inside[:, :, None], 0.0, -np.inf) + np.zeros((sources, stages, units))
    paths = LongestPaths(
        forward=base.copy(),
        back=base.copy(),
        from_forward=base + instance.time_s[F],
        from_back=base + least.whole,
    )
    for _ in range(4 + units):
        before = [float(path_s[np.isfinite(path_s)].sum()) for path_s in (paths.forward, paths.from_back)]
        _sweep_heads(least, paths)
        _sweep_tails(least, paths)
        if before == [float(path_s[np.isfinite(path_s)].sum()) for path_s in (paths.forward, paths.from_back)]:
            break
    return paths


def _in_order(head: Floats, duration: Floats) -> Floats:
    """Return heads [..., unit] if unit j waits for unit j - 1, which takes `duration`."""
    done = np.concatenate([[0.0], np.cumsum(duration)[:-1]])
    ordered: Floats = np.maximum.accumulate(head - done, axis=-1) + done
    return ordered


def _sweep_heads(least: LeastTimes, paths: LongestPaths) -> None:
    instance, order = least.instance, least.instance.backwards
    forward_s = instance.time_s[F]
    for stage in range(instance.num_stages):
        head = paths.forward[:, stage]
        for edge in np.flatnonzero(instance.target == stage):
            source = instance.source[edge]
            arrival = paths.forward[:, source] + forward_s[source] + instance.forward_s[edge]
            head = np.maximum(head, arrival)
        room = least.room[stage]
        if room < instance.num_units:
            freed = np.sort((paths.back[:, stage] + least.whole[stage])[:, order], axis=1)
            head[:, room:] = np.maximum(head[:, room:], freed[:, : instance.num_units - room])
        paths.forward[:, stage] = _in_order(head, forward_s[stage])
    for stage in reversed(range(instance.num_stages)):
        head = np.maximum(paths.back[:, stage], paths.forward[:, stage] + forward_s[stage])
        for edge in np.flatnonzero(instance.source == stage):
            target = instance.target[edge]
            head = np.maximum(head, paths.back[:, target] + least.back[target] + instance.backward_s[edge])
        paths.back[:, stage, order] = _in_order(head[:, order], least.back[stage, order])


def _sweep_tails(least: LeastTimes, paths: LongestPaths) -> None:
    instance, order = least.instance, least.instance.backwards
    turned = order[::-1]
    for stage in range(instance.num_stages):
        tail = paths.from_back[:, stage]
        for edge in np.flatnonzero(instance.target == stage):
            hop_s = least.back[stage] + instance.backward_s[edge]
            tail = np.maximum(tail, hop_s + paths.from_back[:, instance.source[edge]])
        room = least.room[stage]
        if room < instance.num_units and instance.slices == 1:
            # At least one of the units from j on is freed before unit j + room begins. Its backward starts with the
            # backward of j, or later.
            shortest = np.minimum.accumulate(least.whole[stage, ::-1])[::-1][: instance.num_units - room]
            freed_before = shortest + paths.from_forward[:, stage, room:]
            tail[:, : instance.num_units - room] = np.maximum(tail[:, : instance.num_units - room], freed_before)
        paths.from_back[:, stage, turned] = _tails_to_end(tail[:, turned], least.back[stage, turned])
    for stage in reversed(range(instance.num_stages)):
        forward_s = instance.time_s[F, stage]
        tail = np.maximum(paths.from_forward[:, stage], forward_s + paths.from_back[:, stage])
        for edge in np.flatnonzero(instance.source == stage):
            hop_s = forward_s + instance.forward_s[edge]
            tail = np.maximum(tail, hop_s + paths.from_forward[:, instance.target[edge]])
        paths.from_forward[:, stage, ::-1] = _tails_to_end(tail[:, ::-1], forward_s[::-1])


def _tails_to_end(tail: Floats, duration: Floats) -> Floats:
    """Return tails from starts, in reverse order, if each operation ends before the start of the previous one in that
    order."""
    done = np.cumsum(duration)
    tails: Floats = np.maximum.accumulate(tail - done, axis=-1) + done
    return tails


def _lane_bound(least: LeastTimes, paths: LongestPaths, lane: int) -> LowerBound:
    """Return the bound of one lane: see the module docstring."""
    instance = least.instance
    stages = list(instance.lane_stages(lane))
    work = float((instance.time_s[F] + least.whole)[stages].sum())
    source, shift = 0, np.zeros(1)
    if instance.objective == "span":
        source, shift = lane, paths.forward[:, stages].min(axis=(1, 2))
        shift[lane] = 0.0
    limit = float(instance.limit_bytes[lane]) * (1 + 1e-9)
    before = _idle_windows([_begin_side(least, paths, stage, source) for stage in stages], limit)
    after = _idle_windows([_end_side(least, paths, stage, shift) for stage in stages], limit)
    best, parts = _join_windows(work, before, after)
    return LowerBound(time_s=best, lane=lane, work_s=work, before_s=parts[0], after_s=parts[1])


def _join_windows(work: float, before: Windows, after: Windows) -> tuple[float, tuple[float, float]]:
    """Return (bound, idle times before and after): both windows count together once they cannot overlap."""
    parts = max((before[-1][1], 0.0), (0.0, after[-1][1]), key=sum)
    best = work + fsum(parts)
    while True:
        pairs = [(idle, late) for length, idle in before for late_length, late in after if length + late_length <= best]
        top = max(pairs, key=sum)
        if fsum(top) <= fsum(parts):
            return best, parts
        best, parts = work + fsum(top), top


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSide:
    """The possible work of one stage in a window at the beginning or the end of its lane, counted in units.

    Three operations of a unit enter the window in turn: F, the first part of the backward and its rest; counted from
    the end, W, the first part of the backward and F. The first operation holds memory, the last one frees it.
    """

    enter_s: tuple[Floats, Floats, Floats]
    "[unit], ascending: a longer window can contain a part of the first, second, third operation."
    over_s: tuple[Floats, Floats]
    "[unit], ascending: in a window of that length the second, third may be over (from the end: may have entered)."
    gain: tuple[Floats, Floats, Floats]
    "[unit]: the work that each operation adds."
    held: tuple[Floats, Floats]
    "[unit]: the memory held until the second operation is over, and from then on."

    def work_tables(self, lengths: Floats) -> tuple[Floats, Floats]:
        """Return the maximum work and the minimum memory level by [length, number of units in the window].

        -inf and inf for more units than can enter the window.
        """
        units = len(self.gain[0])
        counts = np.arange(units + 1)[None, :]
        entering = [np.searchsorted(enter, lengths)[:, None] for enter in self.enter_s]
        second, third = (np.minimum(counts, limit) for limit in entering[1:])
        work = (
            _prefix_sums(self.gain[0])[counts] + _prefix_sums(self.gain[1])[second] + _prefix_sums(self.gain[2])[third]
        )
        over = [np.searchsorted(over_s, lengths, "right")[:, None] for over_s in self.over_s]
        changed = np.minimum(counts, over[0])
        freed = np.minimum(np.minimum(counts, over[1]), changed)
        first, then = (_prefix_sums(held) for held in self.held)
        level = first[counts] - first[changed] + then[changed] - then[freed]
        entered = counts <= entering[0]
        return np.where(entered, work, -np.inf), np.where(entered, level, np.inf)


def _prefix_sums(array: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(array)])


def _begin_side(least: LeastTimes, paths: LongestPaths, stage: int, source: int) -> WindowSide:
    """Return the side of a stage in the first window of its lane."""
    instance, order = least.instance, least.instance.backwards
    back, part, work = (row[order] for row in (paths.back[source, stage], least.back[stage], least.whole[stage]))
    rest = np.maximum(work - part, 0.0)
    fresh, keep = instance.held_bytes[F, stage], least.keep[stage]
    if least.any_order[stage]:
        rest, fresh, keep = -np.sort(-rest), np.full_like(fresh, fresh.min()), np.full_like(keep, keep.min())
    over = np.sort(back + part)
    return WindowSide(
        enter_s=(paths.forward[source, stage], back, over),
        over_s=(over, np.sort(back + work)),
        gain=(instance.time_s[F, stage], np.minimum(part, work), rest),
        held=(fresh, keep),
    )


def _end_side(least: LeastTimes, paths: LongestPaths, stage: int, shift: Floats) -> WindowSide:
    """Return the side of a stage in the last window of its lane, with its units reversed.

    A window contains a part of an operation if it is longer than the time that must follow that operation's end.
    """
    instance, order = least.instance, least.instance.backwards
    follows = _tail_after_backward(least, paths, stage)
    after_back = np.maximum.accumulate((shift[:, None] + follows).max(axis=0)[order][::-1])
    after_forward = (shift[:, None] + paths.from_forward[:, stage]).max(axis=0) - instance.time_s[F, stage]
    turned = order[::-1]
    weight, rest = least.weight[stage, turned], (least.whole - least.weight)[stage, turned]
    between, keep = least.between[stage, turned], least.keep[stage, turned]
    if least.any_order[stage]:
        weight, rest = -np.sort(-weight), -np.sort(-rest)
        between, keep = np.full_like(between, between.min()), np.full_like(keep, keep.min())
    after_forward = np.sort(after_forward)
    return WindowSide(
        enter_s=(np.zeros(instance.num_units), after_back, after_forward),
        over_s=(np.nextafter(after_back, np.inf), np.nextafter(after_forward, np.inf)),
        gain=(weight, rest, instance.time_s[F, stage, ::-1]),
        held=(between, keep),
    )


def _tail_after_backward(least: LeastTimes, paths: LongestPaths, stage: int) -> Floats:
    """Return the time by [source, unit] that must follow the end of a backward, without its own W."""
    instance, order = least.instance, least.instance.backwards
    tails: Floats = np.zeros_like(paths.from_back[:, stage])
    if instance.objective == "span":
        tails[np.arange(instance.lanes) != instance.placement[stage]] = -np.inf
    for edge in np.flatnonzero(instance.target == stage):
        tails = np.maximum(tails, paths.from_back[:, instance.source[edge]] + instance.backward_s[edge])
    tails[:, order[:-1]] = np.maximum(tails[:, order[:-1]], paths.from_back[:, stage, order[1:]])
    return tails


def _idle_windows(sides: list[WindowSide], limit: float) -> Windows:
    """Return (length, least idle time) of windows, with strictly increasing idle time."""
    moments = np.unique(np.concatenate([times for side in sides for times in (*side.enter_s, *side.over_s)]))
    moments = moments[np.isfinite(moments) & (moments >= 0)]
    if len(moments) > CANDIDATES:
        moments = moments[np.linspace(0, len(moments) - 1, CANDIDATES).round().astype(int)]
    windows = [(0.0, 0.0)]
    idle = moments - _most_work([side.work_tables(moments) for side in sides], limit)
    for length, least in zip(moments.tolist(), idle.tolist(), strict=True):
        if least > windows[-1][1]:
            windows.append((length, least))
    return windows


def _most_work(tables: list[tuple[Floats, Floats]], limit: float) -> Floats:
    """Return the maximum work by [length] of all stages together within the memory limit; an upper bound for more than
    two stages."""
    if not np.isfinite(limit):
        return np.asarray(sum(work.max(axis=1) for work, _ in tables))
    if len(tables) == 1:
        work, level = tables[0]
        return np.asarray(np.where(level <= limit, work, 0.0).max(axis=1, initial=0.0))
    if len(tables) == 2:
        (work, level), (second_work, height) = tables
        totals = np.zeros(len(work))
        for n in range(len(work)):
            fits = level[n][:, None] + height[n][None, :] <= limit
            totals[n] = np.where(fits, work[n][:, None] + second_work[n][None, :], 0.0).max()
        return totals
    return np.array([_priced_work([(w[n], v[n]) for w, v in tables], limit) for n in range(len(tables[0][0]))])


def _priced_work(tables: list[tuple[Floats, Floats]], limit: float) -> float:
    """Return an upper bound on the work by Lagrangian relaxation: any price of memory gives a bound."""
    tables = [(work[np.isfinite(level)], level[np.isfinite(level)]) for work, level in tables]
    prices = np.unique(np.concatenate([[0.0], *(_memory_prices(work, level) for work, level in tables)]))
    if len(prices) > 40:
        prices = prices[np.linspace(0, len(prices) - 1, 40).round().astype(int)]
    return min(
        float(price * limit + fsum(float((work - price * level).max()) for work, level in tables))
        for price in prices.tolist()
    )


def _memory_prices(work: Floats, level: Floats) -> Floats:
    """Return the work gained per byte."""
    gained, added = np.diff(work), np.diff(level)
    return np.asarray(gained[added > 0] / added[added > 0])
