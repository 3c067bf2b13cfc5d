"""A schedule family from outside the package passes the suite, and faulty families fail the right check of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.testing.outside_family import BREADTH_FIRST, build_breadth_first

from pipefit.errors import PluginError, ScheduleError
from pipefit.schedule import FAMILIES, Schedule, ScheduleFamily, ScheduleProblem, lower_schedule
from pipefit.testing import check_schedule_family, temporary_family


def test_an_outside_family_passes() -> None:
    check_schedule_family(BREADTH_FIRST)


def edited(change: Callable[[Schedule], Schedule]) -> ScheduleFamily:
    return replace(BREADTH_FIRST, build=lambda problem: change(build_breadth_first(problem)))


def without_last_action(schedule: Schedule) -> Schedule:
    return replace(schedule, lanes=(schedule.lanes[0][:-1], *schedule.lanes[1:]))


def backwards_first(schedule: Schedule) -> Schedule:
    return replace(schedule, lanes=(schedule.lanes[0][::-1], *schedule.lanes[1:]))


def refuse_all(problem: ScheduleProblem) -> Schedule:
    raise ScheduleError("No.")


def refuse_where(where: str, allowed: str, unsupported: Callable[[ScheduleProblem], bool]) -> ScheduleFamily:
    """Return a family that refuses these problems, as the how-to page says."""

    def build(problem: ScheduleProblem) -> Schedule:
        if unsupported(problem):
            raise ScheduleError("This order lacks them.", where=where, allowed=allowed)
        return build_breadth_first(problem)

    return replace(BREADTH_FIRST, build=build)


REFUSALS = {
    "even microbatches": refuse_where("microbatches", "an even number", lambda problem: problem.microbatches % 2 == 1),
    "no slices": refuse_where("slices", "1", lambda problem: problem.slices > 1),
    "a multiple of the lanes": refuse_where(
        "microbatches", "a multiple of the lanes", lambda problem: problem.microbatches % problem.num_lanes > 0
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_family_may_refuse_microbatches_and_slices(refusal: str) -> None:
    check_schedule_family(REFUSALS[refusal])


FAULTS = {
    "a vague refusal": (refuse_where("microbatches", "", lambda problem: True), "the error states the allowed values"),
    "every problem": (refuse_where("microbatches", "none", lambda problem: True), "refuses 7 to 35 microbatches"),
    "a single slice": (refuse_where("slices", "2", lambda problem: problem.slices == 1), "a single slice is refused"),
    "nothing": (replace(BREADTH_FIRST, build=lambda problem: None), "build returns NoneType, not a Schedule"),
    "no arguments": (replace(BREADTH_FIRST, build=lambda: None), "build raises TypeError"),
    "lists": (edited(lambda schedule: replace(schedule, lanes=[[]])), "Schedule.lanes is a tuple of tuples"),
    "texts": (edited(lambda schedule: replace(schedule, lanes=(("0F0",),))), "holds objects that are no Action"),
    "no placement": (replace(BREADTH_FIRST, placement=lambda devices: None), "placement(1) returns None, not a tuple"),
    "idle lanes": (replace(BREADTH_FIRST, placement=lambda devices: (0,)), "placement(2) names the lanes 0 to 1"),
    "few arguments": (replace(BREADTH_FIRST, in_flight=lambda lane: 1), "in_flight(0, 1, 1, 2) raises TypeError"),
    "half a warm-up": (replace(BREADTH_FIRST, warm_up=lambda *sizes: 0.5), "returns 0.5, not a int"),
    "idle": (replace(BREADTH_FIRST, idle=lambda *sizes: "long"), "idle returns seconds"),
    "no backward": (edited(without_last_action), "0W"),
    "backwards first": (edited(backwards_first), "breadth-first on"),
    "another name": (edited(lambda schedule: replace(schedule, name="x")), "the order has the family's name, not 'x'"),
    "in flight": (replace(BREADTH_FIRST, in_flight=lambda *sizes: 99), "in_flight is 99, and the order holds 3"),
    "warm-up": (replace(BREADTH_FIRST, warm_up=lambda *sizes: 99), "warm_up is 99, and the order runs 3 forwards"),
    "fused": (replace(FAMILIES["zb-h1"], fused=True), "fused, and a backward is split"),
    "no minimum": (
        replace(FAMILIES["dualpipe-v"], least_units=lambda lanes: 1),
        "least_units does not state",
    ),
    "minimum": (replace(BREADTH_FIRST, least_units=lambda lanes: 9), "builds an order with fewer units than least"),
    "refusal": (replace(BREADTH_FIRST, build=refuse_all), "refused without where="),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_names_a_fault(fault: str) -> None:
    family, message = FAULTS[fault]
    with pytest.raises(AssertionError) as caught:
        check_schedule_family(family)
    assert message in str(caught.value), caught.value


ORDERS = {
    "backwards first": (backwards_first, "stands before its forward"),
    "a lost action": (without_last_action, "0W"),
    "more microbatches": (lambda schedule: replace(schedule, microbatches=9), "'microbatches' differs"),
    "another name": (lambda schedule: replace(schedule, name="gpipe"), "'name' differs"),
    "transfers": (lower_schedule, "it has transfers"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_call_names_the_family_of_an_invalid_order(order: str) -> None:
    change, message = ORDERS[order]
    family = edited(change)
    with pytest.raises(ScheduleError) as caught:
        family(ScheduleProblem(placement=family.placement(2), microbatches=3))
    assert "The schedule family 'breadth-first' builds an invalid order" in str(caught.value)
    assert message in str(caught.value) and "where: placement 0,1,0,1,0,1, 3 microbatches, 1 slices" in str(
        caught.value
    )


def test_lanes_that_wait_for_each_other_are_drawn() -> None:
    def swap_forwards(schedule: Schedule) -> Schedule:
        """Put the forward of stage 2 before that of stage 0, on the first lane."""
        first, second = schedule.lanes
        return replace(schedule, lanes=((first[1], first[0], *first[2:]), second))

    with pytest.raises(ScheduleError, match=r"(?s)'breadth-first' builds an invalid order: .*waits for 1F0 of lane 1"):
        edited(swap_forwards)(ScheduleProblem(placement=(0, 1, 0), microbatches=1))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda problem: None, "(?s)family 'breadth-first' returned a value of a wrong type.*allowed: Schedule"),
        (lambda problem: {}["x"], "(?s)family 'breadth-first' failed.*test_schedules.py, line .*KeyError: 'x'"),
        (lambda problem: replace(build_breadth_first(problem), lanes=(None, None)), "(?s)'breadth-first' failed"),
    ],
)
def test_a_build_that_fails_is_named(build: Callable[[ScheduleProblem], Schedule], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        replace(BREADTH_FIRST, build=build)(ScheduleProblem(placement=(0, 1), microbatches=1))


def test_a_temporary_family_is_removed() -> None:
    names = list(FAMILIES)
    with pytest.raises(KeyError), temporary_family(BREADTH_FIRST):
        assert FAMILIES["breadth-first"] is BREADTH_FIRST
        raise KeyError
    assert list(FAMILIES) == names


def test_a_second_family_of_one_name_is_refused() -> None:
    with (
        pytest.raises(ScheduleError, match=r"(?s)Two schedule families have one name.*seen: 1f1b.*other than 1f1b, "),
        temporary_family(replace(BREADTH_FIRST, name="1f1b")),
    ):
        pass
    assert FAMILIES["1f1b"].build is not build_breadth_first


def test_the_suite_needs_no_test_library() -> None:
    program = "import sys, pipefit.testing\nassert not {'pytest', 'hypothesis', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
