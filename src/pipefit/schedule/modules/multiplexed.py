"""Orders for stages that share the lanes of a pipeline and take its microbatches in turn.

A small module (an image encoder, a generator) is held whole by parallel stages, one on each lane of the module with
most work; each does every n-th unit of microbatches. The pipeline keeps the order that its family gives. Beside it the
lanes are run by the clock: an encoder's forward goes before the pipeline's next action when the pipeline would soon
wait for it, into a gap otherwise, at most `window` units of a lane ahead; its backward waits for a gap, until too many
units are alive; what a generator has to do goes first, because the pipeline waits for its gradients (reference:
Optimus, arXiv 2408.03505, fills the gaps of a pipeline with its encoder; BigMac, arXiv 2605.25451, nests it).

Every lane's order is that of one common clock in which nothing runs before what it needs, so the lanes cannot wait for
each other in a circle.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from pipefit.cost.types import Array, CostTable
from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Action, Schedule
from pipefit.schedule.lowering.frozen import without_backward
from pipefit.schedule.problem import Edge, ScheduleProblem, chain_edges, linear_placement, uniform_costs

WORTH = 0.5
"""A gap is used for what takes longer if it covers at least this part of it."""


def multiplex_stages(
    build: Callable[[ScheduleProblem], Schedule],
    problem: ScheduleProblem,
    beside: Collection[int],
    *,
    window: int = 1,
    frozen: Collection[int] = (),
) -> Schedule:
    """The computed schedule of all stages of `problem`: those `beside` a pipeline of the others, which is ordered by
    `build`, one on a lane.

    A stage beside it takes its turns of the microbatches, and feeds one stage of the pipeline, or is fed by one.
    `window`: the units that an encoder has ready on each lane, and by how much more than it must the pipeline runs
    ahead of the gradients of a generator. `problem.costs` are the times of the clock, by default a second for
    everything. `frozen` stages have no backward. Raises ScheduleError for slices, and what `build` raises.
    """
    if problem.slices > 1:
        raise ScheduleError(
            "Stages that share lanes take whole microbatches.", where="slices", seen=problem.slices, allowed="1"
        )
    pipeline = [stage for stage in range(problem.num_stages) if stage not in beside]
    made = _pipeline_order(build, problem, pipeline, _microbatches_ahead(problem, pipeline, beside, window))
    made = without_backward(made, frozen)
    return replace(made, lanes=_LaneClock(problem, made, sorted(beside), window, frozenset(frozen)).lane_orders())


def _microbatches_ahead(problem: ScheduleProblem, pipeline: Sequence[int], beside: Collection[int], window: int) -> int:
    """How many microbatches more the pipeline has under way for the generators behind it: `window` times as many as its
    slowest stage does while one of them is at a unit."""
    time_s = _action_durations(_problem_costs(problem), problem)
    each_s = time_s["F"] + time_s["B"]
    slowest_s = max(float(each_s[stage].mean()) for stage in pipeline)
    found = 0
    for stage in {target for _, target, _ in problem.stage_edges if target in beside}:
        multiple = problem.stage_turn(stage).multiple
        units = max(1, ceil(float(each_s[stage].mean()) / max(multiple * slowest_s, 1e-12)))
        found = max(found, multiple * units)
    return min(window * found, problem.microbatches)


def _problem_costs(problem: ScheduleProblem) -> CostTable:
    return problem.costs or uniform_costs(problem.placement, problem.stage_edges)


def _pipeline_order(
    build: Callable[[ScheduleProblem], Schedule], problem: ScheduleProblem, stages: Sequence[int], extra: int
) -> Schedule:
    """The family's order of the pipeline's own stages, by their numbers in the plan. For what lies behind it the family
    is asked for more stages, whose lanes are left out: so the pipeline runs ahead of the gradients it waits for."""
    place = {stage: index for index, stage in enumerate(stages)}
    edges: list[Edge] = [(place[s], place[t], name) for s, t, name in problem.stage_edges if s in place and t in place]
    edges += [(s + len(stages) - 1, t + len(stages) - 1, name) for s, t, name in chain_edges(extra + 1)]
    family = build(
        ScheduleProblem(
            placement=linear_placement(len(stages) + extra), microbatches=problem.microbatches, edges=tuple(edges)
        )
    )
    lanes: list[tuple[Action, ...]] = [()] * problem.num_lanes
    for index, stage in enumerate(stages):
        lanes[problem.placement[stage]] = tuple(action._replace(stage=stage) for action in family.lanes[index])
    return Schedule(
        name=family.name,
        placement=problem.placement,
        microbatches=problem.microbatches,
        slices=1,
        lanes=tuple(lanes),
        turns=problem.turns,
    )


@dataclass(slots=True)
class _TurnStage:
    """A stage that takes turns, while the clock runs."""

    stage: int
    units: Sequence[int]
    "First microbatches of its units, ascending."
    feeds: int
    "The pipeline stage that it feeds; -1: it lies behind the pipeline."
    trained: bool
    window: int
    most_alive: int
    "Units between forward and backward that it may hold while the pipeline can do without more."
    lead: int
    "How many microbatches before its turn a unit is due."
    ahead: int = 0
    "Units whose forward has started."
    back: int = 0
    "Units whose backward has started."

    @property
    def next_forward(self) -> Action | None:
        """The next one."""
        return Action("F", self.stage, self.units[self.ahead]) if self.ahead < len(self.units) else None

    @property
    def next_backward(self) -> Action | None:
        """The next one."""
        return Action("B", self.stage, self.units[self.back]) if self.trained and self.back < self.ahead else None


class _LaneClock:
    """Runs all lanes by the costs, an action at a time."""

    def __init__(
        self, problem: ScheduleProblem, pipeline: Schedule, beside: Sequence[int], window: int, frozen: frozenset[int]
    ) -> None:
        self.problem, self.frozen = problem, frozen
        costs = _problem_costs(problem)
        self.time_s, self.transit = _action_durations(costs, problem), _edge_transits(costs, problem)
        self.queue = [list(lane) for lane in pipeline.lanes]
        self.place = [0] * problem.num_lanes
        self.made: list[list[Action]] = [[] for _ in range(problem.num_lanes)]
        self.started = [0] * problem.num_stages
        "Forwards of each pipeline stage that have started."
        self.arrived: dict[tuple[str, int, int], float] = {}
        "When the last known input of an action comes."
        self.lacking: dict[tuple[str, int, int], int] = {}
        "How many of its inputs are not known yet."
        self.free_s = [0.0] * problem.num_lanes
        self.heap: list[tuple[float, int, int]] = []
        self.count = itertools.count()
        self.users: dict[tuple[str, int], list[int]] = {}
        self.makers: dict[tuple[str, int], list[int]] = {}
        for source, target, _ in problem.stage_edges:
            self.users.setdefault(("F", source), []).append(target)
            self.makers.setdefault(("F", target), []).append(source)
            if source not in frozen:
                self.users.setdefault(("B", target), []).append(source)
                self.makers.setdefault(("B", source), []).append(target)
        self.beside: list[list[_TurnStage]] = [[] for _ in range(problem.num_lanes)]
        for stage in beside:
            self.beside[problem.placement[stage]].append(self._turn_stage(stage, window, pipeline))
        self.woken = {
            one.feeds: [lane for lane, held in enumerate(self.beside) if any(two.feeds == one.feeds for two in held)]
            for own in self.beside
            for one in own
        }
        "By the pipeline stage that they feed, the lanes with encoders."

    def _turn_stage(self, stage: int, window: int, pipeline: Schedule) -> _TurnStage:
        turn = self.problem.stage_turn(stage)
        feeds = next(iter(self.users.get(("F", stage), ())), -1)
        flying = lead = 0
        if feeds >= 0:
            flying = _in_flight(pipeline, feeds)
            each_s = turn.multiple * max(float(sum(self.time_s[kind][feeds].mean() for kind in ("F", "B"))), 1e-12)
            lead = turn.multiple * ceil(float(self.time_s["F"][stage].max()) / each_s)
        return _TurnStage(
            stage=stage,
            units=self.problem.stage_turn(stage).unit_starts(self.problem.microbatches),
            feeds=feeds,
            trained=stage not in self.frozen,
            window=window,
            most_alive=ceil(flying / (turn.turns * turn.multiple)) + window,
            lead=lead,
        )

    def lane_orders(self) -> tuple[tuple[Action, ...], ...]:
        """Every lane's order. All that waits is woken by what it waits for, so an empty heap is the end."""
        for lane in range(self.problem.num_lanes):
            self._wake_lane(0.0, lane)
        while self.heap:
            now_s, _, lane = heapq.heappop(self.heap)
            if self.free_s[lane] <= now_s:
                action = self._next_action(lane, now_s)
                if action is not None:
                    self._start_action(lane, action, now_s)
        assert all(place == len(queue) for place, queue in zip(self.place, self.queue, strict=True))
        assert all(one.ahead == len(one.units) for lane in self.beside for one in lane)
        return tuple(map(tuple, self.made))

    def _wake_lane(self, time_s: float, lane: int) -> None:
        heapq.heappush(self.heap, (time_s, next(self.count), lane))

    def _next_action(self, lane: int, now_s: float) -> Action | None:
        """What a lane that is free does now; None: it waits."""
        fillers: list[Action] = []
        for one in self.beside[lane]:
            forward, backward = one.next_forward, one.next_backward
            if backward is not None and not self._is_ready(backward, now_s):
                backward = None
            if one.feeds < 0:  # the pipeline waits for its gradients
                if backward is not None:
                    return backward
                if forward is not None and self._is_ready(forward, now_s):
                    return forward
                continue
            full = one.trained and one.ahead - one.back >= one.most_alive
            if backward is not None and full:
                return backward
            begun = self.started[one.feeds]
            if forward is not None and forward.microbatch <= begun + (0 if full else one.lead):
                return forward
            if backward is not None:
                fillers.append(backward)
            elif forward is not None and not full and self._stocked_units(one) < one.window:
                fillers.append(forward)
        until_s = float("inf")
        if self.place[lane] < len(self.queue[lane]):
            action = self.queue[lane][self.place[lane]]
            if self._is_ready(action, now_s):
                return action
            if not self._messages_missing(_input_key(action)):
                until_s = self.arrived[_input_key(action)]
        gap_s = until_s - now_s
        return next((each for each in fillers if gap_s >= WORTH * self._action_s(each)), None)

    def _stocked_units(self, one: _TurnStage) -> int:
        """Units that the pipeline has not begun with, as far as the window goes."""
        begun = self.started[one.feeds]
        return sum(unit >= begun for unit in one.units[max(0, one.ahead - one.window) : one.ahead])

    def _is_ready(self, action: Action, now_s: float) -> bool:
        key = _input_key(action)
        return action.kind == "W" or (not self._messages_missing(key) and self.arrived.get(key, 0.0) <= now_s)

    def _messages_missing(self, key: tuple[str, int, int]) -> int:
        """How many messages of an action nothing is known of yet: there is one for each microbatch and live edge."""
        if key not in self.lacking:
            way, stage, first = key
            makers = [self.problem.stage_turn(other) for other in self.makers.get((way, stage), ())]
            own = range(first, first + self.problem.stage_turn(stage).multiple)
            self.lacking[key] = sum(turn.takes_microbatch(microbatch) for turn in makers for microbatch in own)
        return self.lacking[key]

    def _action_s(self, action: Action) -> float:
        return float(self.time_s[action.kind][action.stage][action.microbatch])

    def _start_action(self, lane: int, action: Action, now_s: float) -> None:
        stop_s = now_s + self._action_s(action)
        self.made[lane].append(action)
        self.free_s[lane] = stop_s
        own = next((one for one in self.beside[lane] if one.stage == action.stage), None)
        if own is None:
            self.place[lane] += 1
            self.started[action.stage] += action.kind == "F"
            if action.kind == "F":
                for other in self.woken.get(action.stage, ()):
                    self._wake_lane(max(now_s, self.free_s[other]), other)
        elif action.kind == "F":
            own.ahead += 1
        else:
            own.back += 1
        if action.kind != "W":
            self._announce_output(action, stop_s)
        self._wake_lane(stop_s, lane)

    def _announce_output(self, action: Action, stop_s: float) -> None:
        """Tell whoever uses what the action makes when it comes."""
        way, stage, first = _input_key(action)
        if way == "F" and stage not in self.frozen:
            self._message_arrives(("B", stage, first), stop_s)
        turn = self.problem.stage_turn(stage)
        for user in self.users.get((way, stage), ()):
            edge, other = ((stage, user) if way == "F" else (user, stage)), self.problem.stage_turn(user)
            for microbatch in filter(other.takes_microbatch, range(first, first + turn.multiple)):
                key = (way, user, other.unit_start(microbatch))
                self.lacking[key] = self._messages_missing(key) - 1
                self._message_arrives(key, stop_s + self.transit[way][edge][microbatch])
                if not self.lacking[key]:
                    self._wake_lane(self.arrived[key], self.problem.placement[user])

    def _message_arrives(self, key: tuple[str, int, int], time_s: float) -> None:
        self.arrived[key] = max(self.arrived.get(key, 0.0), time_s)


def _input_key(action: Action) -> tuple[str, int, int]:
    """(direction, stage, microbatch): what inputs are known by."""
    return ("F" if action.kind == "F" else "B", action.stage, action.microbatch)


def _in_flight(pipeline: Schedule, stage: int) -> int:
    """The most microbatches between forward and backward of a stage."""
    alive = most = 0
    for action in pipeline.lanes[pipeline.placement[stage]]:
        if action.stage == stage and action.kind != "W":
            alive += 1 if action.kind == "F" else -1
            most = max(most, alive)
    return most


def _action_durations(costs: CostTable, problem: ScheduleProblem) -> dict[str, Array]:
    """[stage, microbatch] of every kind of action, with what the interpreter adds."""
    shape = (problem.num_stages, problem.microbatches)
    return {
        kind: np.broadcast_to(costs.actions[kind].time_s[:, :, 0], shape) + costs.overhead_s
        for kind in ("F", "I", "W", "B")
    }


def _edge_transits(costs: CostTable, problem: ScheduleProblem) -> dict[str, dict[tuple[int, int], list[float]]]:
    """By direction and edge, seconds for each microbatch; nothing within a lane."""
    found: dict[str, dict[tuple[int, int], list[float]]] = {"F": {}, "B": {}}
    for edge in costs.edges:
        same = problem.placement[edge.source] == problem.placement[edge.target]
        for kind, table in (("F", edge.forward_s), ("B", edge.backward_s)):
            each = np.broadcast_to(table[:, 0], problem.microbatches)
            found[kind][edge.source, edge.target] = [0.0] * problem.microbatches if same else each.tolist()
    return found
