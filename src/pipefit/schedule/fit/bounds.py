"""What no schedule of an instance can go below, found without any search.

Heads and tails. The **head** of an operation is a time before which it cannot start: its longest path of data, the
order of units on its stage, and memory (a stage that can hold K units starts the forward of unit j only when unit j - K
is freed). The **tail** is the same backwards in time: what must pass between its end and the end.

Idle time. Let a lane run from time 0 to C, and let A(t) be the most work that it can have done by time t: only
operations with heads below t count, and at the last allocation before t the units that were begun and not freed fit in
its memory. Then it idles at least t - A(t) by then. Let Z(t) be the same for the last t before C, from tails: units
whose way back is wholly or partly in that window, and whose forward is not, were all held when the window began. Then
C >= work + t - A(t) and C >= work + u - Z(u), and where a bound on C already tells that the two windows do not overlap,
t + u <= C,

    C >= work + (t - A(t)) + (u - Z(u)).

In unit time, with k units of memory on the lanes of a V of d, the lane of the turn has t = 3 d - 1 (its first way back)
with A <= k, and u = 3 d (from its last forward) with Z <= 2 k: 6 d - 3 k - 1 idle slots (Qi et al. 2024, arXiv
2405.15362). With one stage a lane, lane 0 has t = d F + (d - 1)(I + 2 transfers) and A <= k F: the chain of appendix B
of the zero-bubble paper (arXiv 2401.10241).

The span. Let S be the longest time from a lane's first operation to its last. On lane l, time counts from its first
operation: heads are longest paths from the operations of l. Its end is S later, or earlier. What must still reach lane
r must do so within S of the first operation of r, which comes at least delta(r, l) before that of l, so a tail is the
largest, over r, of delta(r, l) + the longest path to the end of lane r.

Work. A unit's way back counts as the quicker of I with W and B. Where only a part of it lies in a window, its work
there is counted less what the slower choice costs more in all, so that the inequality holds for every choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipefit.schedule.fit.instance import B, F, FitInstance, Floats, I, W

Windows = list[tuple[float, float]]
"""(length, least idle time in it), both rising, from (0, 0)."""

CANDIDATES = 160
"""Window lengths that are tried for each lane."""
ROUNDING = 1e-6
"""Relative: what times in whole quanta may add to a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """A lower bound on the objective, and what it comes from."""

    time_s: float
    lane: int
    "The lane that it holds for."
    work_s: float
    "Its work."
    before_s: float
    "Its least idle time in the beginning."
    after_s: float
    "Its least idle time in the end."


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastTimes:
    """[stage, unit]: the least that any choice of I and W or B takes, and paths made of it."""

    instance: FitInstance
    back: Floats
    "From the start of a way back until its gradient can be sent."
    whole: Floats
    "Its work."
    weight: Floats
    "The work of a way back of which only W lies in the last window: what is left of `whole` after I."
    keep: Floats
    "What a unit holds at least between its F and its end."
    between: Floats
    "What it holds when I is over and W is not."
    any_order: NDArray[np.bool_]
    "[stage]: whether units may be freed in another order than that in which they come: where some run as B and some"
    " not, and where slices go back in turned order."
    room: NDArray[np.int64]
    "[stage]: the units that it can hold at once."


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestPaths:
    """[source lane, stage, unit]: heads from the first operation of a lane, and tails to its end; -inf where no path
    leads. For the makespan there is one source that stands before, and behind, everything."""

    forward: Floats
    "Heads."
    back: Floats
    from_forward: Floats
    "Tails, from an operation's start."
    from_back: Floats


def lower_bound(instance: FitInstance) -> LowerBound:
    """The largest bound over lanes."""
    least = _least_times(instance)
    paths = _longest_paths(least)
    return max((_lane_bound(least, paths, lane) for lane in range(instance.lanes)), key=lambda bound: bound.time_s)


def check_bound(bound_s: float, time_s: float) -> float:
    """The bound, which must not be above the time of a schedule by more than rounding. Raises AssertionError if it is:
    a proof is wrong."""
    assert bound_s <= time_s * (1 + ROUNDING), f"a bound of {bound_s!r} s for a schedule that takes {time_s!r} s"
    return min(bound_s, time_s)


def _least_times(instance: FitInstance) -> LeastTimes:
    split, merge = instance.may_split[:, None], instance.may_merge[:, None]
    time, held = instance.time_s, instance.held_bytes
    apart = np.where(split, time[I] + time[W], np.inf)
    whole = np.minimum(apart, np.where(merge, time[B], np.inf))
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
        whole=whole,
        weight=np.where(split, np.maximum(whole - time[I], 0.0), 0.0),
        keep=keep,
        between=between,
        any_order=(instance.may_split & instance.may_merge) | (instance.slices > 1),
        room=np.clip(room, 1, instance.num_units).astype(np.int64),
    )


def _longest_paths(least: LeastTimes) -> LongestPaths:
    """Longest paths by sweeps over the stages; a sweep more for each time that memory passes a delay on to later units,
    and any number of them leaves lower bounds."""
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
        before = [float(each[np.isfinite(each)].sum()) for each in (paths.forward, paths.from_back)]
        _sweep_heads(least, paths)
        _sweep_tails(least, paths)
        if before == [float(each[np.isfinite(each)].sum()) for each in (paths.forward, paths.from_back)]:
            break
    return paths


def _in_order(head: Floats, duration: Floats) -> Floats:
    """Heads [..., unit] when unit j waits for unit j - 1, which takes `duration`."""
    done = np.concatenate([[0.0], np.cumsum(duration)[:-1]])
    found: Floats = np.maximum.accumulate(head - done, axis=-1) + done
    return found


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
            way = least.back[stage] + instance.backward_s[edge]
            tail = np.maximum(tail, way + paths.from_back[:, instance.source[edge]])
        room = least.room[stage]
        if room < instance.num_units and instance.slices == 1:
            # Of the units from j on, one at least is freed before unit j + room begins. Its way back starts with j's,
            # or later.
            shortest = np.minimum.accumulate(least.whole[stage, ::-1])[::-1][: instance.num_units - room]
            freed_before = shortest + paths.from_forward[:, stage, room:]
            tail[:, : instance.num_units - room] = np.maximum(tail[:, : instance.num_units - room], freed_before)
        paths.from_back[:, stage, turned] = _tails_to_end(tail[:, turned], least.back[stage, turned])
    for stage in reversed(range(instance.num_stages)):
        forward_s = instance.time_s[F, stage]
        tail = np.maximum(paths.from_forward[:, stage], forward_s + paths.from_back[:, stage])
        for edge in np.flatnonzero(instance.source == stage):
            way = forward_s + instance.forward_s[edge]
            tail = np.maximum(tail, way + paths.from_forward[:, instance.target[edge]])
        paths.from_forward[:, stage, ::-1] = _tails_to_end(tail[:, ::-1], forward_s[::-1])


def _tails_to_end(tail: Floats, duration: Floats) -> Floats:
    """Tails from starts, in turned order, when the end of one lies before the start of the one turned before it."""
    done = np.cumsum(duration)
    found: Floats = np.maximum.accumulate(tail - done, axis=-1) + done
    return found


def _lane_bound(least: LeastTimes, paths: LongestPaths, lane: int) -> LowerBound:
    """The bound of one lane: see the head of the file."""
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
    """(bound, idle times before and after): the two windows count together once they cannot overlap."""
    parts = max((before[-1][1], 0.0), (0.0, after[-1][1]), key=sum)
    best = work + sum(parts)
    while True:
        pairs = [(idle, late) for length, idle in before for other, late in after if length + other <= best]
        top = max(pairs, key=sum)
        if sum(top) <= sum(parts):
            return best, parts
        best, parts = work + sum(top), top


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSide:
    """What one stage can do in a window at the beginning or the end of its lane, counted in units. Three operations of
    a unit enter the window one after the other: F, the way back and W, or, from the end, W, the way back and F. The
    first holds memory, the last gives it back."""

    enter_s: tuple[Floats, Floats, Floats]
    "[unit], ascending: a longer window may have a part of the first, second, third."
    over_s: tuple[Floats, Floats]
    "[unit], ascending: in a window of that length the second, third may be over (from the end: may have entered)."
    gain: tuple[Floats, Floats, Floats]
    "[unit]: the work that each adds."
    held: tuple[Floats, Floats]
    "[unit]: what is held until the second is over, and from then on."

    def work_tables(self, lengths: Floats) -> tuple[Floats, Floats]:
        """[length, count]: the most work, and the least level, when so many units have entered a window; -inf and inf
        for more than can enter it."""
        units = len(self.gain[0])
        counts = np.arange(units + 1)[None, :]
        most = [np.searchsorted(enter, lengths)[:, None] for enter in self.enter_s]
        second, third = (np.minimum(counts, many) for many in most[1:])
        work = (
            _prefix_sums(self.gain[0])[counts] + _prefix_sums(self.gain[1])[second] + _prefix_sums(self.gain[2])[third]
        )
        over = [np.searchsorted(each, lengths, "right")[:, None] for each in self.over_s]
        changed = np.minimum(counts, over[0])
        freed = np.minimum(np.minimum(counts, over[1]), changed)
        first, then = (_prefix_sums(held) for held in self.held)
        level = first[counts] - first[changed] + then[changed] - then[freed]
        entered = counts <= most[0]
        return np.where(entered, work, -np.inf), np.where(entered, level, np.inf)


def _prefix_sums(array: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(array)])


def _begin_side(least: LeastTimes, paths: LongestPaths, stage: int, source: int) -> WindowSide:
    """A stage in the first window of its lane."""
    instance, order = least.instance, least.instance.backwards
    back, part, whole = (each[order] for each in (paths.back[source, stage], least.back[stage], least.whole[stage]))
    rest = np.maximum(whole - part, 0.0)
    fresh, kept = instance.held_bytes[F, stage], least.keep[stage]
    if least.any_order[stage]:
        rest, fresh, kept = -np.sort(-rest), np.full_like(fresh, fresh.min()), np.full_like(kept, kept.min())
    over = np.sort(back + part)
    return WindowSide(
        enter_s=(paths.forward[source, stage], back, over),
        over_s=(over, np.sort(back + whole)),
        gain=(instance.time_s[F, stage], np.minimum(part, whole), rest),
        held=(fresh, kept),
    )


def _end_side(least: LeastTimes, paths: LongestPaths, stage: int, shift: Floats) -> WindowSide:
    """A stage in the last window of its lane, its units turned round. A window has a part of an operation if it is
    longer than what must follow that operation's end."""
    instance, order = least.instance, least.instance.backwards
    follows = _tail_after_backward(least, paths, stage)
    after_back = np.maximum.accumulate((shift[:, None] + follows).max(axis=0)[order][::-1])
    after_forward = (shift[:, None] + paths.from_forward[:, stage]).max(axis=0) - instance.time_s[F, stage]
    turned = order[::-1]
    weight, rest = least.weight[stage, turned], (least.whole - least.weight)[stage, turned]
    between, kept = least.between[stage, turned], least.keep[stage, turned]
    if least.any_order[stage]:
        weight, rest = -np.sort(-weight), -np.sort(-rest)
        between, kept = np.full_like(between, between.min()), np.full_like(kept, kept.min())
    after_forward = np.sort(after_forward)
    return WindowSide(
        enter_s=(np.zeros(instance.num_units), after_back, after_forward),
        over_s=(np.nextafter(after_back, np.inf), np.nextafter(after_forward, np.inf)),
        gain=(weight, rest, instance.time_s[F, stage, ::-1]),
        held=(between, kept),
    )


def _tail_after_backward(least: LeastTimes, paths: LongestPaths, stage: int) -> Floats:
    """[source, unit]: what must follow the end of a way back, its own W left out."""
    instance, order = least.instance, least.instance.backwards
    found: Floats = np.zeros_like(paths.from_back[:, stage])
    if instance.objective == "span":
        found[np.arange(instance.lanes) != instance.placement[stage]] = -np.inf
    for edge in np.flatnonzero(instance.target == stage):
        found = np.maximum(found, paths.from_back[:, instance.source[edge]] + instance.backward_s[edge])
    found[:, order[:-1]] = np.maximum(found[:, order[:-1]], paths.from_back[:, stage, order[1:]])
    return found


def _idle_windows(sides: list[WindowSide], limit: float) -> Windows:
    """(length, least idle time) of windows, idle time strictly rising."""
    moments = np.unique(np.concatenate([each for side in sides for each in (*side.enter_s, *side.over_s)]))
    moments = moments[np.isfinite(moments) & (moments >= 0)]
    if len(moments) > CANDIDATES:
        moments = moments[np.linspace(0, len(moments) - 1, CANDIDATES).round().astype(int)]
    found = [(0.0, 0.0)]
    idle = moments - _most_work([side.work_tables(moments) for side in sides], limit)
    for length, least in zip(moments.tolist(), idle.tolist(), strict=True):
        if least > found[-1][1]:
            found.append((length, least))
    return found


def _most_work(tables: list[tuple[Floats, Floats]], limit: float) -> Floats:
    """[length]: the most work of all stages together at levels that sum to the limit at most; an upper bound for over
    two."""
    if not np.isfinite(limit):
        return np.asarray(sum(work.max(axis=1) for work, _ in tables))
    if len(tables) == 1:
        work, level = tables[0]
        return np.asarray(np.where(level <= limit, work, 0.0).max(axis=1, initial=0.0))
    if len(tables) == 2:
        (work, level), (other, height) = tables
        found = np.zeros(len(work))
        for n in range(len(work)):
            fits = level[n][:, None] + height[n][None, :] <= limit
            found[n] = np.where(fits, work[n][:, None] + other[n][None, :], 0.0).max()
        return found
    return np.array([_priced_work([(w[n], v[n]) for w, v in tables], limit) for n in range(len(tables[0][0]))])


def _priced_work(tables: list[tuple[Floats, Floats]], limit: float) -> float:
    """An upper bound on the most work, by Lagrange: any price of memory gives one."""
    tables = [(work[np.isfinite(level)], level[np.isfinite(level)]) for work, level in tables]
    prices = np.unique(np.concatenate([[0.0], *(_memory_prices(work, level) for work, level in tables)]))
    if len(prices) > 40:
        prices = prices[np.linspace(0, len(prices) - 1, 40).round().astype(int)]
    return min(
        float(price * limit + sum(float((work - price * level).max()) for work, level in tables))
        for price in prices.tolist()
    )


def _memory_prices(work: Floats, level: Floats) -> Floats:
    """Work gained for a byte."""
    gained, taken = np.diff(work), np.diff(level)
    return np.asarray(gained[taken > 0] / taken[taken > 0])
