"""Stages that take turns beside a pipeline: valid, without deadlock for any shape, ahead as far as asked, in gaps."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.support.random_schedules import random_costs

from pipefit.cost.types import CostTable
from pipefit.errors import ScheduleError
from pipefit.schedule.actions import EVERY, Action, RoundRobin, Schedule
from pipefit.schedule.check.deadlock import check_deadlock
from pipefit.schedule.check.rules import check_schedule
from pipefit.schedule.families import find_family
from pipefit.schedule.lowering.frozen import frozen_stages
from pipefit.schedule.lowering.lower import lower_schedule
from pipefit.schedule.modules.multiplexed import multiplex_stages
from pipefit.schedule.problem import Edge, ScheduleProblem, uniform_costs
from pipefit.simulate import simulate_schedule

FAMILIES = ("1f1b", "eager-1f1b", "zb-h1", "gpipe")


@dataclass(frozen=True)
class Shape:
    problem: ScheduleProblem
    beside: tuple[int, ...]
    "The stages that are not of the pipeline."

    def ordered(self, name: str = "1f1b", **how: Any) -> Schedule:
        return multiplex_stages(find_family(name).build, self.problem, self.beside, **how)

    def at(self, costs: CostTable) -> Shape:
        return replace(self, problem=replace(self.problem, costs=costs))


def shaped(
    lanes: int, microbatches: int, *, encoder: int = 0, generator: int = 0, before: int = 0, behind: int = 0
) -> Shape:
    """A pipeline on so many lanes, an encoder and a generator (units of so many microbatches; 0: none) taking turns on
    them, and stages of their own before and behind."""
    own, whole = list(range(before, before + lanes)), before + lanes + behind
    first = lanes if encoder else 0
    pipeline = list(range(first, first + whole))
    last = list(range(first + whole, first + whole + lanes)) if generator else []
    turns = [RoundRobin(turn, lanes, encoder) for turn in range(first)] + [EVERY] * whole
    turns += [RoundRobin(turn, lanes, generator) for turn in range(len(last))]
    edges: list[Edge] = [(stage, pipeline[0], "") for stage in range(first)]
    edges += [(one, two, "") for one, two in itertools.pairwise(pipeline)]
    edges += [(pipeline[-1], stage, "") for stage in last]
    placement = (*own[:first], *range(whole), *own[: len(last)])
    problem = ScheduleProblem(placement=placement, microbatches=microbatches, edges=tuple(edges), turns=tuple(turns))
    return Shape(problem, (*range(first), *last))


def empty(problem: ScheduleProblem) -> Schedule:
    """A schedule of the problem's shape."""
    return Schedule(
        name="",
        placement=problem.placement,
        microbatches=problem.microbatches,
        slices=1,
        lanes=((),) * problem.num_lanes,
    )


def test_no_shape_hangs() -> None:
    rng = random.Random(3)
    for _ in range(150):
        lanes, multiple = rng.randint(1, 4), rng.choice((1, 1, 2, 3))
        which = rng.choice(((multiple, 0), (0, multiple), (multiple, multiple)))
        shape = shaped(
            lanes,
            lanes * multiple * rng.randint(1, 4) + multiple * rng.randint(0, 2),
            encoder=which[0],
            generator=which[1],
            before=rng.randint(0, 2) if not which[0] else 0,
            behind=rng.randint(0, 2) if not which[1] else 0,
        )
        problem = shape.problem
        costs = random_costs(rng, empty(problem), problem.stage_edges, whole=rng.random() < 0.5)
        trained = set(range(rng.choice((0, 0, lanes)), problem.num_stages))
        frozen = frozen_stages(problem.num_stages, problem.stage_edges, trained)
        made = shape.at(costs).ordered(rng.choice(FAMILIES), window=rng.choice((1, 2, 1 << 20)), frozen=frozen)
        check_schedule(made, problem.stage_edges, frozen)
        for order in (costs, replace(costs, receives_ahead=True)):
            lowered = lower_schedule(made, problem.stage_edges, order)
            check_schedule(lowered, problem.stage_edges, frozen)
            check_deadlock(lowered)
            assert simulate_schedule(lowered, costs).makespan_s > 0.0


def test_the_pipeline_keeps_its_order() -> None:
    made = shaped(3, 9, encoder=1).ordered()
    alone = find_family("1f1b")(ScheduleProblem(placement=(0, 1, 2), microbatches=9))
    for lane in range(3):
        own = [action for action in made.lanes[lane] if action.stage >= 3]
        assert [(a.kind, a.microbatch) for a in own] == [(a.kind, a.microbatch) for a in alone.lanes[lane]]
        beside = [action.microbatch for action in made.lanes[lane] if action.kind == "F" and action.stage < 3]
        assert beside == list(range(lane, 9, 3))


@pytest.mark.parametrize("window", [1, 2])
def test_encoders_are_ahead_as_far_as_the_window_says(window: int) -> None:
    """Of what the pipeline has not begun with a lane has `window` units at most, and with more it holds more."""
    shape = shaped(2, 16, encoder=1)
    made, problem = shape.ordered(window=window), shape.problem
    timeline = simulate_schedule(made, uniform_costs(problem.placement, problem.stage_edges), problem.stage_edges)
    begun = {span.action.microbatch: span.start_s for span in timeline.all_spans() if span.action[:2] == ("F", 2)}
    most = 0
    for lane in range(2):
        starts = [
            (span.start_s, span.action.microbatch) for span in timeline.all_spans() if span.action[:2] == ("F", lane)
        ]
        for now_s, _ in starts:
            most = max(most, sum(start_s < now_s and begun[unit] > now_s for start_s, unit in starts))
    assert most <= window


def test_gaps_are_filled_before_anything_is_put_off() -> None:
    """Two lanes, an encoder half as long as a stage: the pipeline's own gaps take all but the first units."""
    forward_s = [0.5, 0.5, 1.0, 1.0]
    shape = shaped(2, 8, encoder=1)
    problem = shape.problem
    costs = uniform_costs(
        problem.placement,
        problem.stage_edges,
        forward_s=forward_s,
        input_s=[2 * one for one in forward_s],
        weight_s=[0.0] * 4,
    )
    made = shape.at(costs).ordered(window=1 << 20)
    step_s = simulate_schedule(made, costs, problem.stage_edges).makespan_s
    busy_s = 8 * 3.0 + 4 * 1.5
    assert busy_s < step_s <= busy_s + 1.5 + 1e-9, (
        "one unit ahead of the first forward and one behind the last backward"
    )
    plain_s = 9 * 3.0 + 4 * 1.5
    assert step_s < plain_s, "encoding first, then the pipeline"


def test_a_generator_does_not_stop_the_pipeline() -> None:
    """Its gradients come back while the last stage goes on. A pipeline with room between its forwards and backwards
    comes within a microbatch of what the lanes have to do; one after the other it would be twice as long."""
    shape = shaped(2, 12, generator=1)
    costs = uniform_costs(shape.problem.placement, shape.problem.stage_edges)
    made = shape.at(costs).ordered("eager-1f1b")
    step_s = simulate_schedule(made, costs, shape.problem.stage_edges).makespan_s
    busy_s = 12 * 3.0 + 6 * 3.0
    assert busy_s <= step_s <= busy_s + 3.0 + 1e-9


def test_a_frozen_encoder_has_its_forward_alone() -> None:
    made = shaped(2, 4, encoder=1).ordered(frozen=(0, 1))
    own = [action for lane in made.lanes for action in lane if action.stage < 2]
    assert sorted(own) == [Action("F", m % 2, m) for m in (0, 2, 1, 3)]


def test_slices_are_refused() -> None:
    shape = shaped(2, 4, encoder=1)
    with pytest.raises(ScheduleError, match="whole microbatches") as caught:
        replace(shape, problem=replace(shape.problem, slices=2)).ordered()
    assert caught.value.seen == 2


def test_a_window_of_everything_encodes_in_every_gap() -> None:
    """On average an encoder's forwards stand earlier in their lanes."""
    shape = shaped(4, 16, encoder=1)
    places = [
        [
            index
            for lane in shape.ordered(window=window).lanes
            for index, a in enumerate(lane)
            if a[0] == "F" and a[1] < 4
        ]
        for window in (1, 1 << 20)
    ]
    assert sum(places[1]) < sum(places[0])
