"""The grid in time, and the command `pipefit schedule`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from rich.color import ColorType
from rich.style import Style

from pipefit.schedule import FAMILIES, ScheduleProblem, linear_placement, lower_schedule, uniform_costs, vee_placement
from pipefit.schedule.text.csv_io import from_csv
from pipefit.schedule.text.grid import COLOURS, draw_grid, grid_rows


def test_one_unit_a_column() -> None:
    schedule = FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(2), microbatches=2))
    assert draw_grid(schedule).splitlines() == [
        "lane 0  F0 F1 ..... B0--- .. B1---",
        "lane 1  .. F0 B0--- F1 B1--- .....",
    ]
    assert draw_grid(lower_schedule(schedule)) == draw_grid(schedule)


def test_lanes_with_two_stages_name_them() -> None:
    text = draw_grid(FAMILIES["gpipe"](ScheduleProblem(placement=vee_placement(2), microbatches=1)))
    assert text.splitlines() == [
        "lane 0  0F0 ....... 3F0 3B0---- ............... 0B0----",
        "lane 1  ... 1F0 2F0 ........... 2B0---- 1B0---- .......",
    ]


@pytest.mark.parametrize(
    "times", [(1e-12, 1, 1), (1, 1000, 1), (1e-300, 1e17, 1e-300), (5e-324,) * 3, (1e17, 1e-300, 3)]
)
@pytest.mark.parametrize("name", ["1f1b", "v-half", "zb-h1"])
def test_however_short_an_action_is_it_is_seen(name: str, times: tuple[float, float, float]) -> None:
    """Every action has its name, in its lane's order, and no stage is drawn before the one that it waits for ends."""
    made = FAMILIES[name]
    placement = made.placement(3)
    costs = uniform_costs(placement, forward_s=times[0], input_s=times[1], weight_s=times[2])
    schedule = made(ScheduleProblem(placement=placement, microbatches=6, costs=costs))
    columns = {}
    rows = grid_rows(schedule, costs)
    assert len({sum(len(cell.text) for cell in row) for row in rows}) == 1
    for lane, row in zip(schedule.lanes, rows, strict=True):
        assert tuple(cell.action for cell in row if cell.action) == lane
        column = 0
        for cell in row:
            if cell.action:
                assert re.match(rf"\d?{cell.action.kind}{cell.action.microbatch}-* $", cell.text)
                key = (cell.action.kind, cell.action.stage, cell.action.microbatch)
                columns[key] = column, column + len(cell.text)
            column += len(cell.text)
    for (kind, stage, microbatch), (first, _) in columns.items():
        if kind != "W" and min(times) > 1e-15 * max(times):  # else time stands still, and lanes start together
            before = columns.get((kind, stage + (-1 if kind == "F" else 1), microbatch))
            assert before is None or before[1] <= first


def test_a_crowded_row_keeps_the_letter_of_every_action() -> None:
    schedule = FAMILIES["gpipe"](ScheduleProblem(placement=linear_placement(1), microbatches=900))
    costs = uniform_costs(linear_placement(1), forward_s=1, input_s=2.12345678, weight_s=1)
    (row,) = grid_rows(schedule, costs)
    assert tuple(cell.action for cell in row) == schedule.lanes[0]
    assert {cell.text.rstrip("- ") for cell in row if cell.action and cell.action.microbatch > 9} == {"F", "B"}


def test_slices_are_written() -> None:
    text = draw_grid(FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(1), microbatches=1, slices=2)))
    assert text == "lane 0  F0-- F0/1 B0/1----- B0-------"


@pytest.mark.parametrize(
    "times", [(28.0, 28.0, 20.0, 4.0), (0.00313, 0.0041, 0.0027, 0.0), (3.14159, 2.71828, 1.41421, 0.1)]
)
def test_columns_keep_the_order_of_times(times: tuple[float, float, float, float]) -> None:
    placement = linear_placement(4)
    costs = uniform_costs(
        placement, forward_s=times[0], input_s=times[1], weight_s=times[2], transfer_s=times[3], port_s=times[3]
    )
    schedule = FAMILIES["1f1b"](ScheduleProblem(placement=placement, microbatches=5))
    rows = grid_rows(schedule, costs)
    assert len({sum(len(cell.text) for cell in row) for row in rows}) == 1
    for lane, row in zip(schedule.lanes, rows, strict=True):
        assert tuple(cell.action for cell in row if cell.action) == lane
    forward, backward = (next(c for c in rows[0] if c.action and c.action.kind == kind) for kind in "FB")
    assert len(backward.text) / len(forward.text) == pytest.approx((times[1] + times[2]) / times[0], rel=0.25)


def test_colour_is_markup() -> None:
    schedule = FAMILIES["gpipe"](ScheduleProblem(placement=linear_placement(1), microbatches=1))
    assert draw_grid(schedule, colour=True) == "lane 0  [white on blue]F0[/] [black on yellow]B0---[/]"


def test_colours_tell_kinds_and_the_stages_of_a_lane_apart() -> None:
    schedule = FAMILIES["zb-v"](ScheduleProblem(placement=vee_placement(2), microbatches=4))
    text = draw_grid(schedule, colour=True)
    styles: dict[tuple[str, bool], set[str]] = {}
    for style, stage, kind in re.findall(r"\[([^\]/]+)\](\d)([FIWB])", text):
        styles.setdefault((kind, int(stage) >= 2), set()).add(style)
    assert len(styles) == 6 and all(len(each) == 1 for each in styles.values())
    assert len(set.union(*styles.values())) == 6
    for pair in COLOURS.values():
        for style in pair:
            ink, paper = Style.parse(style).color, Style.parse(style).bgcolor
            assert ink and paper and ink != paper and ink.type == paper.type == ColorType.STANDARD


def test_held_stands_before_the_cells() -> None:
    schedule = FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(2), microbatches=2))
    assert draw_grid(schedule, held=["2/16", "1/16"]).splitlines() == [
        "        held",
        "lane 0  2/16  F0 F1 ..... B0--- .. B1---",
        "lane 1  1/16  .. F0 B0--- F1 B1--- .....",
    ]


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipefit", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def schedule(pipefit: Callable[..., tuple[int, str, str]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`pipefit schedule WORDS` in this process; `test_the_command_draws` starts one of its own."""
    return lambda *words: subprocess.CompletedProcess(words, *pipefit("schedule", *words))


def test_the_command_draws() -> None:
    done = started("schedule", "1f1b", "--devices", "4", "--microbatches", "8", "--grid")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6 and lines[0] == "        held" and lines[1].startswith("lane 0     4  F0 F1 F2 F3 .")
    assert lines[5] == "time 33, bubble 27.3%; most microbatches alive per lane: 4 3 2 1"


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_drawn(name: str) -> None:
    """In unit time a column is one slot, so the rows can be read back: every action once, as wide as it is long."""
    made = FAMILIES[name]
    schedule = made(ScheduleProblem(placement=made.placement(8), microbatches=16))
    rows = grid_rows(schedule)
    width = min(len(cell.text) for row in rows for cell in row if cell.action and cell.action.kind == "F")
    for lane, row in zip(schedule.lanes, rows, strict=True):
        cells = [cell for cell in row if cell.action is not None]
        assert tuple(cell.action for cell in cells) == lane
        assert all(len(cell.text) == width * (2 if cell.action.kind == "B" else 1) for cell in cells)
        if schedule.num_stages > 8:
            assert all(cell.text.startswith(f"{cell.action.stage}{cell.action.kind}") for cell in cells)
    assert len(draw_grid(schedule).splitlines()) == 8


def test_the_command_draws_a_v(schedule: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = schedule("v-half", "--devices", "8", "--microbatches", "16", "--grid")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10 and lines[1].startswith("lane 0    10  0F0-- 0F1-- ")
    alive = " ".join(["10"] * 8)
    assert lines[9] == f"time 115, bubble 16.5%; most microbatches of a stage alive per lane: {alive}"


def test_the_command_prints_csv_and_json(schedule: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    made = schedule("gpipe", "--devices", "2", "--microbatches", "3", "--csv")
    assert from_csv(made.stdout, "gpipe") == FAMILIES["gpipe"](
        ScheduleProblem(placement=linear_placement(2), microbatches=3)
    )
    made = schedule("1f1b", "--devices", "2", "--microbatches", "3", "--times", "2,2,1,1", "--json")
    facts = json.loads(made.stdout)
    assert facts["lanes"] == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert facts["times"] == {"F": 2.0, "I": 2.0, "W": 1.0, "B": 3.0, "transfer": 1.0}
    assert facts["peak_units"] == [2.0, 1.0] and facts["placement"] == [0, 1]
    assert facts["makespan"] == 24.0  # 20 without transfers; 4 of 1 each are on the critical path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1f3b",), ("The schedule is unknown.", "allowed: 1f1b, ", "did you mean '1f1b'?")),
        (("1f1b", "--microbatches", "0"), ("at least one microbatch", "seen: 0")),
        (("1f1b", "--devices", "0"), ("at least one device", "--devices", "seen: 0")),
        (("1f1b", "--slices", "0"), ("at least one slice", "seen: 0")),
        (("1f1b", "--times", "1,0,1"), ("three positive numbers", "--times", "'1,0,1'", "28,28,20,4")),
        (("1f1b", "--times", "1,1,-1"), ("three positive numbers",)),
        (("1f1b", "--times", "1,1,1,-1"), ("not negative",)),
        (("1f1b", "--times", "a,b,c"), ("'a,b,c'",)),
        (("1f1b", "--times", "nan,1,1"), ("three positive numbers",)),
        (("1f1b", "--csv", "--json"), ("Only one form of output", "--grid, --csv or --json")),
        (("1f1b", "--csv", "--slices", "2"), ("slices cannot be written as CSV",)),
        (("dualpipe-v", "--microbatches", "7"), ("two microbatches", "seen: 7 microbatches on 4", "at least 8")),
    ],
)
def test_the_command_explains_mistakes(
    schedule: Callable[..., subprocess.CompletedProcess[str]], arguments: tuple[str, ...], says: tuple[str, ...]
) -> None:
    done = schedule(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    for part in says:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
