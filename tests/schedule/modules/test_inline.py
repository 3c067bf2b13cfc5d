"""Modules in line on the end lanes of a pipeline: every lane's order in full, and no shape that hangs."""

from __future__ import annotations

import itertools

import pytest

from pipefit.errors import ScheduleError
from pipefit.schedule.check.deadlock import check_deadlock
from pipefit.schedule.check.rules import check_schedule
from pipefit.schedule.families import find_family
from pipefit.schedule.lowering.frozen import without_backward
from pipefit.schedule.lowering.lower import lower_schedule
from pipefit.schedule.modules.inline import inline_order
from pipefit.schedule.problem import ScheduleProblem, chain_edges


def problem(*stages_of_lanes: int, microbatches: int = 3, slices: int = 1) -> ScheduleProblem:
    placement = tuple(lane for lane, stages in enumerate(stages_of_lanes) for _ in range(stages))
    edges = tuple(chain_edges(len(placement)))
    return ScheduleProblem(placement=placement, microbatches=microbatches, slices=slices, edges=edges)


def test_all_stages_of_a_lane_run_one_after_the_other() -> None:
    made = inline_order(find_family("1f1b").build, problem(2, 2))
    assert [" ".join(map(str, lane)) for lane in made.lanes] == [
        "0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2",
        "2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 2F2 3F2 3B2 2B2",
    ]


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "zb-h1", "gpipe"])
def test_no_shape_hangs_or_lacks_work(name: str) -> None:
    for ends, between, microbatches in itertools.product(((2, 2), (2, 1), (1, 2)), (0, 1, 2), (1, 4, 7)):
        shape = problem(ends[0], *[1] * between, ends[1], microbatches=microbatches)
        made = inline_order(find_family(name).build, shape)
        check_schedule(made, shape.stage_edges)
        check_deadlock(lower_schedule(made, shape.stage_edges))
        frozen = without_backward(made, {0})
        check_schedule(frozen, shape.stage_edges, {0})
        check_deadlock(lower_schedule(frozen, shape.stage_edges))
    check_schedule(inline_order(find_family(name).build, problem(3)), problem(3).stage_edges)


def test_slices_are_refused() -> None:
    with pytest.raises(ScheduleError, match="whole microbatches") as caught:
        inline_order(find_family("1f1b").build, problem(2, 1, slices=2))
    assert caught.value.seen == "2" or caught.value.seen == 2
