"""A schedule family from outside the package passes the suite, and faulty families fail the right check of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.testing.outside_family import BREADTH_FIRST, build_breadth_first

from pipefit.errors import ScheduleError
from pipefit.schedule import FAMILIES, Schedule, ScheduleFamily, ScheduleProblem
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


FAULTS = {
    "no backward": (edited(without_last_action), "0W"),
    "backwards first": (edited(backwards_first), "breadth-first on"),
    "another name": (edited(lambda schedule: replace(schedule, name="x")), "the order has the family's name, not 'x'"),
    "in flight": (replace(BREADTH_FIRST, in_flight=lambda *sizes: 99), "in_flight is 99, and the order holds 3"),
    "warm-up": (replace(BREADTH_FIRST, warm_up=lambda *sizes: 99), "warm_up is 99, and the order runs 3 forwards"),
    "fused": (replace(FAMILIES["zb-h1"], fused=True), "fused, and a backward is split"),
    "no minimum": (replace(FAMILIES["dualpipe-v"], least_units=lambda lanes: 1), "DualPipeV needs two microbatches"),
    "minimum": (replace(BREADTH_FIRST, least_units=lambda lanes: 9), "builds an order with fewer units than least"),
    "refusal": (replace(BREADTH_FIRST, build=refuse_all), "No."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_names_a_fault(fault: str) -> None:
    family, message = FAULTS[fault]
    with pytest.raises((AssertionError, ScheduleError)) as caught:
        check_schedule_family(family)
    assert message in str(caught.value), caught.value


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
