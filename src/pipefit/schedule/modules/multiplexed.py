"""Schedules for small modules whose stages share the lanes of a pipeline and take its microbatches in turn.

A small module (an image encoder, a generator) is replicated in parallel stages, one on each lane of the largest module;
each stage takes every n-th unit of microbatches. The pipeline keeps the order of its schedule family. The other stages
are ordered by a simulated clock:

- An encoder's forward goes before the pipeline's next action if the pipeline would soon wait for it, otherwise into a
  gap, at most `window` units of a lane ahead.
- An encoder's backward waits for a gap, until too many units are alive.
- A generator's actions go first, because the pipeline waits for its gradients.

Reference: Optimus, arXiv 2408.03505, fills the gaps of a pipeline with its encoder; BigMac, arXiv 2605.25451, nests it.
All lanes follow one common clock in which no action runs before its inputs, so the lanes cannot deadlock.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil, fsum

import numpy as np

from pipefit.cost.types import Array, CostTable
from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Action, Schedule
from pipefit.schedule.lowering.frozen import without_backward
from pipefit.schedule.problem import Edge, ScheduleProblem, chain_edges, linear_placement, uniform_costs

WORTH = 0.5
"""Smallest share of a filling action that a gap must cover."""


def multiplex_stages(
    build: Callable[[ScheduleProblem], Schedule],
    problem: ScheduleProblem,
    beside: Collection[int],
    *,
    window: int = 1,
    frozen: Collection[int] = (),
) -> Schedule:
    """Return the computed schedule of all stages of `problem`: a pipeline ordered by `build`, one stage on a lane, and
    the stages `beside` it.

    A stage beside the pipeline takes its turns of the microbatches, and feeds one stage of the pipeline or is fed by
    one. `window` is the number of units that an encoder has ready on each lane, and the number of additional units that
    the pipeline runs ahead of a generator's gradients. `problem.costs` are the times of the clock (default: uniform
    costs). `frozen` stages have no backward. Raises ScheduleError for slices, and the errors of `build`.
    """
    if problem.slices > 1:
        raise ScheduleError(
            "Stages that share lanes take whole microbatches.", where="slices", seen=problem.slices, allowed="1"
        )
    pipeline = [stage for stage in range(problem.num_stages) if stage not in beside]
    schedule = _pipeline_order(build, problem, pipeline, _microbatches_ahead(problem, pipeline, beside, window))
    schedule = without_backward(schedule, frozen)
    return replace(
        schedule, lanes=_LaneClock(problem, schedule, sorted(beside), window, frozenset(frozen)).lane_orders()
    )


def _microbatches_ahead(problem: ScheduleProblem, pipeline: Sequence[int], beside: Collection[int], window: int) -> int:
    """Return the additional microbatches in flight that the pipeline needs for the generators behind it: `window` times
    the number that its slowest stage does during one unit of a generator."""
    time_s = _action_durations(_problem_costs(problem), problem)
    unit_s = time_s["F"] + time_s["B"]
    slowest_s = max(float(unit_s[stage].mean()) for stage in pipeline)
    ahead = 0
    for stage in {target for _, target, _ in problem.stage_edges if target in beside}:
        multiple = problem.stage_turn(stage).multiple
        units = max(1, ceil(float(unit_s[stage].mean()) / max(multiple * slowest_s, 1e-12)))
        ahead = max(ahead, multiple * units)
    return min(window * ahead, problem.microbatches)


def _problem_costs(problem: ScheduleProblem) -> CostTable:
    return problem.costs or uniform_costs(problem.placement, problem.stage_edges)


def _pipeline_order(
    build: Callable[[ScheduleProblem], Schedule], problem: ScheduleProblem, stages: Sequence[int], extra: int
) -> Schedule:
    """Return the family's schedule of the pipeline's stages, numbered as in the plan.

    The family builds a schedule with `extra` more stages at the end, whose lanes are dropped. The pipeline thereby runs
    ahead of the gradients of the generators behind it.
    """
    position = {stage: index for index, stage in enumerate(stages)}
    edges: list[Edge] = [
        (position[s], position[t], name) for s, t, name in problem.stage_edges if s in position and t in position
    ]
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
    """State of a stage that takes turns, while the clock runs."""

    stage: int
    units: Sequence[int]
    "First microbatches of its units, ascending."
    feeds: int
    "The pipeline stage that it feeds; -1 if the stage lies behind the pipeline."
    trained: bool
    window: int
    most_alive: int
    "Limit of units between forward and backward, exceeded only if the pipeline needs more."
    lead: int
    "Number of microbatches before its turn at which a unit is due."
    ahead: int = 0
    "Units whose forward has started."
    back: int = 0
    "Units whose backward has started."

    @property
    def next_forward(self) -> Action | None:
        """The next forward, or None after the last."""
        return Action("F", self.stage, self.units[self.ahead]) if self.ahead < len(self.units) else None

    @property
    def next_backward(self) -> Action | None:
        """The next backward, or None if no unit is alive."""
        return Action("B", self.stage, self.units[self.back]) if self.trained and self.back < self.ahead else None


class _LaneClock:
    """Simulated clock that orders the actions of all lanes by their costs."""

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
        "Arrival time of the last known input of an action."
        self.lacking: dict[tuple[str, int, int], int] = {}
        "Number of an action's inputs whose time is not known yet."
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
            turn_stage.feeds: [
                lane
                for lane, held in enumerate(self.beside)
                if any(neighbour.feeds == turn_stage.feeds for neighbour in held)
            ]
            for lane_turns in self.beside
            for turn_stage in lane_turns
        }
        "The lanes with encoders, by the pipeline stage that they feed."

    def _turn_stage(self, stage: int, window: int, pipeline: Schedule) -> _TurnStage:
        turn = self.problem.stage_turn(stage)
        feeds = next(iter(self.users.get(("F", stage), ())), -1)
        flying = lead = 0
        if feeds >= 0:
            flying = _in_flight(pipeline, feeds)
            each_s = turn.multiple * max(fsum(self.time_s[kind][feeds].mean() for kind in ("F", "B")), 1e-12)
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
        """Return the order of every lane. Each waiting action is woken by its input, so an empty heap is the end."""
        for lane in range(self.problem.num_lanes):
            self._wake_lane(0.0, lane)
        while self.heap:
            now_s, _, lane = heapq.heappop(self.heap)
            if self.free_s[lane] <= now_s:
                action = self._next_action(lane, now_s)
                if action is not None:
                    self._start_action(lane, action, now_s)
        assert all(position == len(queue) for position, queue in zip(self.place, self.queue, strict=True))
        assert all(turn_stage.ahead == len(turn_stage.units) for lane in self.beside for turn_stage in lane)
        return tuple(map(tuple, self.made))

    def _wake_lane(self, time_s: float, lane: int) -> None:
        heapq.heappush(self.heap, (time_s, next(self.count), lane))

    def _next_action(self, lane: int, now_s: float) -> Action | None:
        """Return the action that a free lane starts now, or None if it waits."""
        fillers: list[Action] = []
        for turn_stage in self.beside[lane]:
            forward, backward = turn_stage.next_forward, turn_stage.next_backward
            if backward is not None and not self._is_ready(backward, now_s):
                backward = None
            if turn_stage.feeds < 0:  # the pipeline waits for its gradients
                if backward is not None:
                    return backward
                if forward is not None and self._is_ready(forward, now_s):
                    return forward
                continue
            full = turn_stage.trained and turn_stage.ahead - turn_stage.back >= turn_stage.most_alive
            if backward is not None and full:
                return backward
            begun = self.started[turn_stage.feeds]
            if forward is not None and forward.microbatch <= begun + (0 if full else turn_stage.lead):
                return forward
            if backward is not None:
                fillers.append(backward)
            elif forward is not None and not full and self._stocked_units(turn_stage) < turn_stage.window:
                fillers.append(forward)
        until_s = float("inf")
        if self.place[lane] < len(self.queue[lane]):
            action = self.queue[lane][self.place[lane]]
            if self._is_ready(action, now_s):
                return action
            if not self._messages_missing(_input_key(action)):
                until_s = self.arrived[_input_key(action)]
        gap_s = until_s - now_s
        return next((filler for filler in fillers if gap_s >= WORTH * self._action_s(filler)), None)

    def _stocked_units(self, one: _TurnStage) -> int:
        """Return the number of started units, within the window, that the pipeline has not begun with."""
        begun = self.started[one.feeds]
        return sum(unit >= begun for unit in one.units[max(0, one.ahead - one.window) : one.ahead])

    def _is_ready(self, action: Action, now_s: float) -> bool:
        key = _input_key(action)
        return action.kind == "W" or (not self._messages_missing(key) and self.arrived.get(key, 0.0) <= now_s)

    def _messages_missing(self, key: tuple[str, int, int]) -> int:
        """Return the number of an action's inputs whose time is still unknown: one per microbatch and edge with
        gradients."""
        if key not in self.lacking:
            direction, stage, first = key
            makers = [self.problem.stage_turn(maker) for maker in self.makers.get((direction, stage), ())]
            unit = range(first, first + self.problem.stage_turn(stage).multiple)
            self.lacking[key] = sum(turn.takes_microbatch(microbatch) for turn in makers for microbatch in unit)
        return self.lacking[key]

    def _action_s(self, action: Action) -> float:
        return float(self.time_s[action.kind][action.stage][action.microbatch])

    def _start_action(self, lane: int, action: Action, now_s: float) -> None:
        stop_s = now_s + self._action_s(action)
        self.made[lane].append(action)
        self.free_s[lane] = stop_s
        turn_stage = next((candidate for candidate in self.beside[lane] if candidate.stage == action.stage), None)
        if turn_stage is None:
            self.place[lane] += 1
            self.started[action.stage] += action.kind == "F"
            if action.kind == "F":
                for woken_lane in self.woken.get(action.stage, ()):
                    self._wake_lane(max(now_s, self.free_s[woken_lane]), woken_lane)
        elif action.kind == "F":
            turn_stage.ahead += 1
        else:
            turn_stage.back += 1
        if action.kind != "W":
            self._announce_output(action, stop_s)
        self._wake_lane(stop_s, lane)

    def _announce_output(self, action: Action, stop_s: float) -> None:
        """Record the arrival of an action's output at each of its consumers, and wake their lanes."""
        direction, stage, first = _input_key(action)
        if direction == "F" and stage not in self.frozen:
            self._message_arrives(("B", stage, first), stop_s)
        turn = self.problem.stage_turn(stage)
        for user in self.users.get((direction, stage), ()):
            edge, user_turn = ((stage, user) if direction == "F" else (user, stage)), self.problem.stage_turn(user)
            for microbatch in filter(user_turn.takes_microbatch, range(first, first + turn.multiple)):
                key = (direction, user, user_turn.unit_start(microbatch))
                self.lacking[key] = self._messages_missing(key) - 1
                self._message_arrives(key, stop_s + self.transit[direction][edge][microbatch])
                if not self.lacking[key]:
                    self._wake_lane(self.arrived[key], self.problem.placement[user])

    def _message_arrives(self, key: tuple[str, int, int], time_s: float) -> None:
        self.arrived[key] = max(self.arrived.get(key, 0.0), time_s)


def _input_key(action: Action) -> tuple[str, int, int]:
    """Return (direction, stage, microbatch), the key of an action's inputs."""
    return ("F" if action.kind == "F" else "B", action.stage, action.microbatch)


def _in_flight(pipeline: Schedule, stage: int) -> int:
    """Return the maximum number of microbatches between forward and backward of a stage."""
    alive = peak = 0
    for action in pipeline.lanes[pipeline.placement[stage]]:
        if action.stage == stage and action.kind != "W":
            alive += 1 if action.kind == "F" else -1
            peak = max(peak, alive)
    return peak


def _action_durations(costs: CostTable, problem: ScheduleProblem) -> dict[str, Array]:
    """Return seconds by [stage, microbatch] for every kind of action, with the interpreter overhead."""
    shape = (problem.num_stages, problem.microbatches)
    return {
        kind: np.broadcast_to(costs.actions[kind].time_s[:, :, 0], shape) + costs.overhead_s
        for kind in ("F", "I", "W", "B")
    }


def _edge_transits(costs: CostTable, problem: ScheduleProblem) -> dict[str, dict[tuple[int, int], list[float]]]:
    """Return seconds for each microbatch by direction and edge; zero within a lane."""
    transits: dict[str, dict[tuple[int, int], list[float]]] = {"F": {}, "B": {}}
    for edge in costs.edges:
        same = problem.placement[edge.source] == problem.placement[edge.target]
        for kind, table in (("F", edge.forward_s), ("B", edge.backward_s)):
            seconds = np.broadcast_to(table[:, 0], problem.microbatches)
            transits[kind][edge.source, edge.target] = [0.0] * problem.microbatches if same else seconds.tolist()
    return transits
