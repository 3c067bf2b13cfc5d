"""Damaged files are told by what is wrong and where."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipefit.errors import FormatError
from pipefit.validate.files import read_collectives, shipped_text
from pipefit.validate.sets import gh200, selene, vtrain

CSV = shipped_text(vtrain.FILE).splitlines()


def csv_with(line: str) -> str:
    """The first rows of the file, the third replaced."""
    return "\n".join([*CSV[:4], line, *CSV[5:8]])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("8,32,4,1024,16,24,1024,2,2", r"(?s)wrong number of cells; the file may have been cut short.*line 5.*9 cells"),
        ("8,32,4,1024,16,24,1024,2,2,2,fast", r"(?s)not a number.*line 5: iteration_ms.*'fast'"),
        ("8,32,4,1024,16,24,1024,2,2,2,-3.5", r"(?s)must be positive.*line 5: iteration_ms.*-3\.5"),
        ("8,32,4,1024,16,24,1024,2,2,2,nan", r"(?s)must be positive.*line 5: iteration_ms"),
        ("8,32,4,1024,16,0,1024,2,2,2,20", r"(?s)must be positive.*line 5: layers"),
        (
            "8,32,4,1024,16,24,1024,2,2,4,20",
            r"(?s)do not multiply to the number of GPUs.*row 3.*tp 2 x dp 2 x pp 4, gpus 8",
        ),
        ("8,32,4,1024,16,23,1024,2,2,2,20", r"(?s)cannot be cut evenly.*row 3"),
        ("8,30,4,1024,16,24,1024,2,2,2,20", r"(?s)cannot be cut evenly.*row 3"),
        ("8,32,4,1024,16,24.5,1024,2,2,2,20", r"(?s)must be whole numbers.*row 3"),
    ],
)
def test_a_bad_row_is_named(line: str, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        vtrain.read_samples(csv_with(line))


def test_a_table_of_another_kind_or_without_rows_is_refused() -> None:
    with pytest.raises(FormatError, match=r"(?s)columns.*line 2.*seen: gpus,bytes.*allowed: gpus,global_batch"):
        vtrain.read_samples(shipped_text("a100_nvlink_all_reduce.csv"))
    with pytest.raises(FormatError, match="no rows"):
        vtrain.read_samples("\n".join(CSV[:2]))
    with pytest.raises(FormatError, match=r"(?s)columns.*seen: nothing"):
        read_collectives("# source\n", "x.csv")


def test_the_shipped_tables_are_read_whole() -> None:
    assert len(vtrain.read_samples(shipped_text(vtrain.FILE))) == 1440
    points = read_collectives(shipped_text("a100_nvlink_all_reduce.csv"), "x").points
    assert {devices: len(each) for devices, each in points.items()} == {2: 11, 4: 11, 8: 11}


@pytest.mark.parametrize(("module", "read"), [(selene, selene.read_models), (gh200, gh200.read_profile)])
def test_a_file_that_was_cut_short_is_told(module: Any, read: Any) -> None:
    text = shipped_text(module.FILE)
    with pytest.raises(FormatError, match=rf"(?s)not valid JSON; it may have been cut short.*{module.FILE}, line"):
        read(text[: len(text) // 2])


def selene_with(change: Any) -> str:
    data = json.loads(shipped_text(selene.FILE))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["cases"][0].pop("hidden"), r"(?s)'hidden' is missing.*cases\[0\]"),
        (lambda d: d["cases"][1].update(hiden=3), r"(?s)Unknown field 'hiden'.*did you mean 'hidden'"),
        (lambda d: d["cases"][2].update(layers="105"), r"(?s)wrong type.*cases\[2\].*layers"),
        (lambda d: d["cases"][2].update(layers=106), r"(?s)cannot be cut evenly.*turing-530B.*106 layers.*pp 35 x 3"),
        (lambda d: d["cases"][0].update(tp=7), r"(?s)cannot be cut evenly.*megatron-22B"),
        (lambda d: d["cases"][3].update(heads=-1), r"(?s)must be positive.*megatron-1T: heads.*-1"),
        (lambda d: d["cases"][0]["iteration_s"].update(full_recompute=0), r"(?s)must be positive.*full_recompute"),
        (lambda d: d["cases"][0]["iteration_s"].pop("full_recompute"), r"(?s)is missing.*iteration_s.*full_recompute"),
        (lambda d: d["cases"][0]["memory_gib"].pop("activations_no_recompute"), r"(?s)is missing.*memory_gib"),
    ],
)
def test_a_bad_case_is_named(change: Any, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        selene.read_models(selene_with(change))


def gh200_with(change: Any) -> str:
    data = json.loads(shipped_text(gh200.FILE))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["plans"][2].update(measured_iteration_s=-1.0), r"(?s)must be positive.*N16_D16.*-1"),
        (lambda d: d["plans"][2].update(micro_batch=3), r"(?s)does not have the plan's layers.*N16_D16.*micro-batch 3"),
        (lambda d: d["plans"][3].update(dp=[4, 4, 2, 4]), r"(?s)stages of the plan contradict each other.*N16_D4"),
        (lambda d: d["plans"][3].update(pp=3), r"(?s)stages of the plan contradict each other.*N16_D4"),
        (lambda d: d["plans"][3].update(layers_per_stage=[5, 7, 7]), r"(?s)plan's layers.*N16_D4.*26 layers"),
        (
            lambda d: d["plans"][2].update(global_batch=1000),
            r"(?s)cannot be cut into the plan's micro-batches.*N16_D16",
        ),
        (lambda d: d["profile"]["8"]["4"].pop(), r"(?s)does not have the plan's layers.*25 layers"),
        (lambda d: d["profile"]["8"]["4"][0].pop(), r"(?s)wrong length.*profile.*allowed: 3 entries"),
        (lambda d: d.pop("links"), r"'links' is missing"),
    ],
)
def test_a_bad_plan_is_named(change: Any, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        gh200.read_profile(gh200_with(change))
