"""Order the microbatches of a pipeline whose times differ.

`fill_intervals` is DistTrain's rule (Zhang et al., 2024, section 5.3, as its follow-ups read it). Under 1F1B the first
stage runs one forward between two backwards, so each forward is chosen to fill its interval. `improve_order` then tries
exchanges on the simulator's task graph, which has the plan's schedule. Both are functions of the times alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipefit.cost.types import Ints
from pipefit.data.permutation import make_key
from pipefit.schedule.actions import Schedule
from pipefit.schedule.families import DEFAULT_FAMILY, FAMILIES
from pipefit.schedule.problem import ScheduleProblem, linear_placement
from pipefit.schedule.taskgraph.compile import TaskGraph, compile_graph
from pipefit.schedule.taskgraph.table import B, F, I, W
from pipefit.schedule.taskgraph.times import run_sweep

Makespan = Callable[[Ints], float]
"""The time of one iteration with the microbatches in this order."""

_SWAP = 0x5A4B

_COMPILED_FROM = 500_000
"""Number of task dependencies visited, over all tries, from which importing numba pays off."""


class PipelineTimes:
    """The makespan of one iteration, by the simulator's task graph; transfers take no time here."""

    def __init__(self, stages: int, microbatches: int, schedule: Schedule | None = None, tries: int = 0) -> None:
        """`schedule`: computed or lowered; None is 1F1B with a lane for every stage. `tries`: the expected number of
        makespan evaluations for one batch, to decide if compiling pays off."""
        if schedule is None:
            schedule = FAMILIES[DEFAULT_FAMILY].build(
                ScheduleProblem(placement=linear_placement(stages), microbatches=microbatches)
            )
        graph = compile_graph(schedule)
        self._graph: TaskGraph = graph
        self._slices = schedule.slices
        self._compiled = True if tries * len(graph.after) > _COMPILED_FROM else None
        self._groups = [(code, graph.groups[code]) for code in (F, B, I, W) if code in graph.groups]
        self._transit = np.zeros(graph.size)

    def makespan_ns(self, forward_ns: Ints, backward_ns: Ints) -> float:
        """Return the makespan. Both arguments are (stages, microbatches), in execution order."""
        duration = np.zeros(self._graph.size)
        by_slice = [np.repeat(times.reshape(-1) / self._slices, self._slices) for times in (forward_ns, backward_ns)]
        for code, group in self._groups:
            times = by_slice[0] if code == F else by_slice[1]
            duration[group.tasks] = (times if code in (F, B) else times / 2)[group.place]
        return float(run_sweep(self._graph, duration, self._transit, self._compiled).moment_s.max())


def order_microbatches(pipeline: PipelineTimes, forward_ns: Ints, backward_ns: Ints, swaps: int) -> Ints:
    """Return the order, as previous positions, in which to run the microbatches.

    The better of the current order and `fill_intervals` is improved by `swaps` exchanges. `forward_ns`, `backward_ns`:
    (stages, microbatches).
    """

    def order_makespan(order: Ints) -> float:
        return pipeline.makespan_ns(forward_ns[:, order], backward_ns[:, order])

    count = forward_ns.shape[1]
    as_it_is = np.arange(count, dtype=np.int64)
    if (forward_ns == forward_ns[:, :1]).all() and (backward_ns == backward_ns[:, :1]).all():
        return as_it_is
    start = min(as_it_is, fill_intervals(forward_ns, backward_ns), key=order_makespan)
    return improve_order(start, order_makespan, swaps)


def improve_order(order: Ints, makespan: Makespan, tries: int) -> Ints:
    """Return the order after `tries` exchanges of two positions, each kept if it shortens the iteration.

    The two positions are a function of the number of the try.
    """
    best, best_s = order.copy(), makespan(order)
    count = len(order)
    for attempt in range(tries if count > 1 else 0):
        first = make_key(_SWAP, attempt, 0) % count
        second = (first + 1 + make_key(_SWAP, attempt, 1) % (count - 1)) % count
        best[[first, second]] = best[[second, first]]
        now_s = makespan(best)
        if now_s < best_s:
            best_s = now_s
        else:
            best[[first, second]] = best[[second, first]]
    return best


def fill_intervals(forward_ns: Ints, backward_ns: Ints) -> Ints:
    """Return DistTrain's order for 1F1B on a chain of stages, times (stages, microbatches).

    The smallest microbatch goes first, the next smallest `stages - 1` go last. The interval after the first forward is
    filled by the `stages - 1` forwards with the closest sum. Every later interval, as seen by the first stage, is
    filled by the forward with the closest time.
    """
    stages, count = forward_ns.shape
    sizes = forward_ns[0]
    by_size = np.lexsort((np.arange(count), sizes)).tolist()
    tail = by_size[1 : min(stages, count)]
    chain = _StageChain(forward_ns, backward_ns)
    chain.take_microbatch(by_size[0])
    left = by_size[min(stages, count) :]
    warm = min(stages - 1, len(left))
    room = float((forward_ns + backward_ns)[1:, by_size[0]].sum())
    for remaining in range(warm, 0, -1):
        chain.take_microbatch(_pop_closest(left, sizes, room / remaining))
        room -= float(sizes[chain.order[-1]])
    while left:
        interval = len(chain.order) - stages + 1
        room = chain.gradient_arrives(interval) - chain.backward_ends(interval - 1)
        chain.take_microbatch(_pop_closest(left, sizes, room))
    return np.array([*chain.order, *reversed(tail)], dtype=np.int64)


def _pop_closest(left: list[int], sizes: Ints, wanted: float) -> int:
    """Remove and return the microbatch of `left` (ascending by size) whose size is closest to `wanted`; the smaller on
    a tie."""
    index = int(np.argmin(np.abs(sizes[left] - wanted)))
    return left.pop(index)


class _StageChain:
    """1F1B on a chain of stages, computed as microbatches are added: end times of forwards and backwards by stage and
    position."""

    def __init__(self, forward_ns: Ints, backward_ns: Ints) -> None:
        self._forward, self._backward = forward_ns.tolist(), backward_ns.tolist()
        self._stages = len(self._forward)
        self.order: list[int] = []
        self._ends: dict[tuple[str, int, int], float] = {}

    def take_microbatch(self, microbatch: int) -> None:
        self.order.append(microbatch)

    def forward_ends(self, place: int, stage: int = 0) -> float:
        """Return the end of a forward. A stage that is j stages from the last runs j forwards ahead, then
        alternates."""
        key = ("F", stage, place)
        if key not in self._ends:
            ahead = self._stages - 1 - stage
            came = self.forward_ends(place, stage - 1) if stage else 0.0
            if place == 0:
                free = 0.0
            elif place <= ahead:
                free = self.forward_ends(place - 1, stage)
            else:
                free = self.backward_ends(place - ahead - 1, stage)
            self._ends[key] = max(came, free) + self._forward[stage][self.order[place]]
        return self._ends[key]

    def backward_ends(self, place: int, stage: int = 0) -> float:
        """Return the end of a backward. The forwards that run ahead of it must have been added."""
        key = ("B", stage, place)
        if key not in self._ends:
            free = self.forward_ends(place + self._stages - 1 - stage, stage)
            start = max(free, self.gradient_arrives(place, stage))
            self._ends[key] = start + self._backward[stage][self.order[place]]
        return self._ends[key]

    def gradient_arrives(self, place: int, stage: int = 0) -> float:
        if stage + 1 == self._stages:
            return self.forward_ends(place, stage)
        return self.backward_ends(place, stage + 1)
