"""CSV out and in, and what PyTorch's own parser makes of it."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given, settings
from tests.support.random_schedules import cases

from pipefit.errors import ScheduleError
from pipefit.schedule import FAMILIES, ScheduleProblem, chain_edges, linear_placement, vee_placement
from pipefit.schedule.text.csv_io import from_csv, to_csv


@settings(max_examples=50, deadline=None)
@given(cases())
def test_any_chain_of_whole_sequences_comes_back(case) -> None:
    schedule, edges, _ = case
    if schedule.slices == 1 and edges == chain_edges(schedule.num_stages):
        assert from_csv(to_csv(schedule), schedule.name) == schedule


def test_the_text() -> None:
    schedule = FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(2), microbatches=2))
    assert to_csv(schedule) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_blanks_are_idle_slots() -> None:
    assert from_csv("0F0,,,0B0\n,1F0, 1B0,\n").lanes == from_csv("0F0,0B0\n1F0,1B0\n").lanes


def test_slices_are_refused() -> None:
    schedule = FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(2), microbatches=2, slices=2))
    with pytest.raises(ScheduleError, match=r"(?s)slices cannot be written as CSV.*seen: 2 slices.*as JSON"):
        to_csv(schedule)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0X0\n", r"(?s)not an action.*row 1, column 2.*'0X0'"),
        ("0F0,0B0\n1RECV_F0,1F0,1B0\n", r"(?s)Only compute actions.*row 2, column 1.*'1RECV_F0'"),
        ("0F0/1,0B0\n", r"(?s)Only compute actions without slices.*row 1, column 1"),
        ("0F0,0B0\n0F1,0B1\n", r"(?s)stands in two rows.*stage 0 in rows 1 and 2"),
        ("0F0,0B0\n2F0,2B0\n", r"(?s)without gaps.*\[0, 2\]"),
        ("", "no actions"),
        ("0F0\n1F0,1B0\n", "Lane 0 ends without 0B0"),
    ],
)
def test_bad_files_are_explained(text: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        from_csv(text, where="file.csv")


def test_pytorch_reads_it() -> None:
    """Its parser is private: where a version has moved it, this test steps aside."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    action = getattr(schedules, "_Action", None)
    validate = getattr(schedules, "_validate_schedule", None)
    if action is None or validate is None:
        pytest.skip("this torch has no _Action or _validate_schedule")
    split = from_csv("0F0,0F1,3F0,3I0,3W0,3F1,3B1,0B0,0I1,0W1\n1F0,2F0,1F1,2F1,2B0,1B0,2I1,1I1,1W1,2W1\n")
    v = FAMILIES["gpipe"](ScheduleProblem(placement=vee_placement(3), microbatches=4))
    one = FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(4), microbatches=8))
    for schedule in (split, v, one):
        rows = {
            rank: [action.from_str(cell.strip()) for cell in row]
            for rank, row in enumerate(csv.reader(io.StringIO(to_csv(schedule))))
        }
        for lane, row in zip(schedule.lanes, (rows[rank] for rank in sorted(rows)), strict=True):
            assert [str(read) for read in row] == [str(ours) for ours in lane]
            assert [(read.stage_index, read.microbatch_index) for read in row] == [a[1:3] for a in lane]
        validate(rows, len(schedule.lanes), schedule.num_stages, schedule.microbatches)
