"""The conformance suite of `pipefit.testing` over every built-in schedule family, and orders as papers draw them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pipefit
from pipefit.errors import ScheduleError
from pipefit.schedule import (
    FAMILIES,
    ScheduleProblem,
    check_schedule,
    find_family,
    format_lanes,
    linear_placement,
    vee_placement,
)
from pipefit.testing import (
    check_family_facts,
    check_family_fields,
    check_family_graphs,
    check_family_orders,
    check_family_placements,
    check_family_text,
    check_family_times,
)
from pipefit.testing.schedules import PLACEMENTS, SHAPES

every_family = pytest.mark.parametrize("name", sorted(FAMILIES))


@every_family
@pytest.mark.parametrize("shape", SHAPES)
def test_a_family_makes_valid_schedules(name: str, shape: tuple[int, int, int]) -> None:
    check_family_orders(FAMILIES[name], shape)


@every_family
def test_a_family_has_fields_of_the_right_types(name: str) -> None:
    check_family_fields(FAMILIES[name])


@every_family
def test_a_family_follows_the_dag(name: str) -> None:
    assert 6 in {len(FAMILIES[name].placement(devices)) for devices in range(1, 7)}, "the check would skip it"
    check_family_graphs(FAMILIES[name])


@every_family
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_family_refuses_unsupported_placements(name: str, placement: tuple[int, ...]) -> None:
    check_family_placements(FAMILIES[name], placement)


@every_family
def test_a_family_holds_to_its_facts(name: str) -> None:
    check_family_facts(FAMILIES[name])


@every_family
def test_a_family_survives_text_and_drawing(name: str) -> None:
    check_family_text(FAMILIES[name])


@every_family
@pytest.mark.parametrize("devices", [1, 2, 5])
@pytest.mark.parametrize("transfer_s", [0.0, 0.4])
def test_lowering_a_family_costs_no_time(name: str, devices: int, transfer_s: float) -> None:
    check_family_times(FAMILIES[name], devices, transfer_s)


def test_gpipe_and_1f1b_as_the_papers_draw_them() -> None:
    problem = ScheduleProblem(placement=linear_placement(3), microbatches=4)
    assert format_lanes(FAMILIES["gpipe"](problem).lanes)[1] == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    assert format_lanes(FAMILIES["1f1b"](problem).lanes) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    )


def test_slices_go_forward_ascending_and_backward_descending() -> None:
    problem = ScheduleProblem(placement=linear_placement(2), microbatches=2, slices=2)
    assert format_lanes(FAMILIES["gpipe"](problem).lanes)[0] == "0F0 0F0/1 0F1 0F1/1 0B0/1 0B0 0B1/1 0B1"
    assert format_lanes(FAMILIES["1f1b"](problem).lanes)[1] == "1F0 1F0/1 1B0/1 1F1 1B0 1F1/1 1B1/1 1B1"


def test_gpipe_takes_a_v_placement() -> None:
    schedule = FAMILIES["gpipe"](ScheduleProblem(placement=vee_placement(3), microbatches=2))
    check_schedule(schedule)
    assert format_lanes(schedule.lanes)[2] == "2F0 2F1 3F0 3F1 3B0 3B1 2B0 2B1"


def test_1f1b_refuses_a_lane_with_two_stages() -> None:
    with pytest.raises(ScheduleError, match=r"(?s)one stage per lane.*lane 0 holds stages 0, 3.*use gpipe"):
        FAMILIES["1f1b"](ScheduleProblem(placement=vee_placement(2), microbatches=2))


def test_no_other_file_names_a_family() -> None:
    """The facts of a family are in its file. Only the runs that others published name their schedules."""
    source = Path(pipefit.__file__).parent
    quoted = re.compile("|".join(f"[\"']{name}[\"']" for name in sorted({*FAMILIES} - {"fit"})))
    files = [path for path in sorted(source.rglob("*.py")) if quoted.search(path.read_text(encoding="utf-8"))]
    names = {path.relative_to(source).as_posix() for path in files}
    assert len([name for name in names if name.startswith("schedule/families/")]) > 12, "this test must see the names"
    assert not {name for name in names if not name.startswith(("schedule/families/", "validate/"))}


def test_an_unknown_family_lists_the_known() -> None:
    with pytest.raises(ScheduleError, match=r"(?s)schedule is unknown.*'1f2b'.*did you mean '1f1b'") as caught:
        find_family("1f2b")
    assert f"allowed: {', '.join(sorted(FAMILIES))}" in caught.value.full_text()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"microbatches": 0}, r"(?s)at least one microbatch.*seen: 0"),
        ({"slices": 0}, r"(?s)at least one slice.*seen: 0"),
        ({"placement": ()}, "numbered from 0"),
        ({"placement": (0, 2)}, "numbered from 0"),
        ({"edges": ((1, 0, ""),)}, r"(?s)to a later one.*seen: 1 -> 0.*0 <= source < target < 2"),
        ({"edges": ((0, 1, ""), (0, 1, ""))}, "given twice"),
        ({"edges": ((0, 5, "skip"),)}, r"0 -> 5 \(skip\)"),
    ],
)
def test_a_wrong_problem_is_explained(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        ScheduleProblem(**({"placement": (0, 1), "microbatches": 2} | wrong))
