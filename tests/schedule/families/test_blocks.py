"""Peaks and bubbles of the families made of building blocks, in unit time, against closed forms, other programs and
what an exact solver proved."""

from __future__ import annotations

import json

import pytest
from tests.support.exact_bubbles import FOUND, PLACEMENTS, least_bubble

from pipefit.errors import ScheduleError
from pipefit.schedule import (
    FAMILIES,
    Schedule,
    ScheduleProblem,
    check_schedule,
    format_lanes,
    linear_placement,
    uniform_costs,
    vee_placement,
)
from pipefit.simulate import simulate_schedule

CAPS = {
    "v-min": lambda d: 2 * ((d + 4) // 3),
    "v-half": lambda d: 2 * ((d + 2) // 2),
    "v-zb": lambda d: 2 * d,
}
"""Lanes -> peak in stage-microbatches (two of them are one of 1F1B's), by counting in the paper's blocks."""


def made(name: str, devices: int, microbatches: int, slices: int = 1) -> Schedule:
    placement = FAMILIES[name].placement(devices)
    schedule = FAMILIES[name](ScheduleProblem(placement=placement, microbatches=microbatches, slices=slices))
    check_schedule(schedule)
    return schedule


def facts(schedule: Schedule) -> tuple[int, int]:
    """(most units alive on a lane, idle slots of the lane that idles longest) in unit time."""
    timeline = simulate_schedule(schedule, uniform_costs(schedule.placement))
    spans = [stops[-1] - starts[0] for stops, starts in zip(timeline.stops_s, timeline.starts_s, strict=True)]
    idle = max(span - busy for span, busy in zip(spans, timeline.busy_s, strict=True))
    return int(max(timeline.peak_bytes)), int(idle)


@pytest.mark.parametrize("name", CAPS)
@pytest.mark.parametrize("d", range(2, 17))
def test_v_schedules_reach_the_bound_at_their_peak(name: str, d: int) -> None:
    """No V schedule with k units of memory idles less than 6 d - 3 k - 1 slots (arXiv 2405.15362, appendix)."""
    cap = CAPS[name](d)
    bound = max(0, 6 * d - 3 * cap - 1)
    for m in (2 * d, 2 * d + 1, 3 * d, 4 * d + 3):
        assert facts(made(name, d, m)) == (cap, bound), m


@pytest.mark.parametrize("name", CAPS)
@pytest.mark.parametrize("d", [2, 3, 4, 5, 8, 11, 16])
def test_v_schedules_with_few_microbatches(name: str, d: int) -> None:
    """They hold no more than there is, and a single microbatch takes its way through all stages and back, then a W."""
    for m in sorted({1, 2, 3, d // 2, d - 1, d, d + 1, 2 * d - 1}):
        peak, idle = facts(made(name, d, m))
        assert peak == min(CAPS[name](d), 2 * m)
        if m == 1:
            assert idle == 4 * d + 1 - 6
    assert facts(made(name, 1, 3)) == (2, 0)


@pytest.mark.parametrize("d", range(2, 17))
def test_the_other_families_in_unit_time(d: int) -> None:
    """Qi et al. 2024 (arXiv 2401.10241), table 2: ZB-H1 (d - 1)(F + I - W), ZB-H2 and ZB-V none; DualPipeV's peak from
    DeepSeek's README; 1F1B-V two thirds of 1F1B's memory at less than its bubble, 6 (d - 1) of these slots."""
    for m in (2 * d, 2 * d + 1, 4 * d):
        assert facts(made("zb-h1", d, m)) == (d, d - 1)
        assert facts(made("zb-h2", d, m)) == (2 * d - 1, 0)
        assert facts(made("zb-v", d, m)) == (2 * d, 0)
        assert facts(made("dualpipe-v", d, m)) == (2 * d + 1, d - 1)
        peak, idle = facts(made("1f1b-v", d, m))
        assert peak == 2 * (2 * d // 3 + 1) and idle < 6 * (d - 1)
        published = {2: 4, 3: 8, 4: 15, 5: 18, 6: 22, 8: 33, 12: 52, 16: 75}
        assert idle == published.get(d, idle), "what the authors' program makes (sail-sg, v1f1b.py at 39f2c186)"


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (3, 4, 2), (28, 28, 20), (2, 3, 2), (4, 3, 2)])
@pytest.mark.parametrize("d", [2, 4, 7])
def test_zb_h1_and_zb_h2_with_other_times(f: int, i: int, w: int, d: int) -> None:
    """(d - 1)(F + I - W) and (d - 1)(F + I - 2 W), as the paper has it, wherever W is the shortest of the three."""
    costs = uniform_costs(linear_placement(d), forward_s=f, input_s=i, weight_s=w)
    for name, weights in (("zb-h1", 1), ("zb-h2", 2)):
        timeline = simulate_schedule(made(name, d, 3 * d), costs)
        spans = [stops[-1] - starts[0] for stops, starts in zip(timeline.stops_s, timeline.starts_s, strict=True)]
        assert max(spans - timeline.busy_s) == (d - 1) * (f + i - weights * w)


def proven() -> list[tuple[str, int, int, int, int]]:
    return [tuple(row) for row in json.loads(FOUND.read_text())["proven"]]


def ours(placement: str, d: int, m: int, units: int) -> list[tuple[str, int]]:
    """(family, bubble) of the families of this placement whose peak bound is `units`."""
    linears = {"zb-h1": d, "zb-h2": 2 * d - 1}
    caps = linears if placement == "linear" else {name: cap(d) for name, cap in CAPS.items()}
    return [(name, facts(made(name, d, m))[1]) for name, cap in caps.items() if cap == units]


@pytest.mark.parametrize("case", proven(), ids=lambda case: "-".join(map(str, case)))
def test_no_schedule_is_better_than_ours(case: tuple[str, int, int, int, int]) -> None:
    """Wherever the solver proved an optimum (optimum.json), every family with that memory attains it, few
    microbatches included."""
    placement, d, m, units, bubble = case
    found = ours(placement, d, m, units)
    assert found
    for name, idle in found:
        assert idle == bubble, name


QUICK = [
    ("vee", 2, 4, 4), ("vee", 3, 2, 4), ("vee", 3, 3, 6), ("vee", 3, 5, 6), ("vee", 4, 2, 4), ("vee", 4, 3, 6),
    ("vee", 4, 3, 4), ("vee", 4, 4, 6), ("vee", 4, 4, 8), ("vee", 5, 5, 6), ("vee", 6, 4, 8), ("vee", 6, 6, 12),
    ("linear", 3, 5, 3), ("linear", 4, 4, 4), ("linear", 4, 8, 7), ("linear", 6, 6, 6),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK, ids=lambda case: "-".join(map(str, case)))
def test_the_solver_proves_it_again(case: tuple[str, int, int, int]) -> None:
    pytest.importorskip("ortools", reason="needs the extra: pip install 'pipefit[exact]'")
    placement, d, m, units = case
    bubble = least_bubble(PLACEMENTS[placement](d), m, units, seconds=60)
    assert (placement, d, m, units, bubble) in proven()


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 8, 16, 21])
def test_zb_v_and_dualpipe_v_are_pytorchs(d: int, m: int) -> None:
    """Their orders, written by others; PyTorch keeps them private: where a version has moved them this is skipped."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for name, theirs in (("zb-v", "ScheduleZBVZeroBubble"), ("dualpipe-v", "ScheduleDualPipeV")):
        kind = getattr(schedules, theirs, None)
        if kind is None or not hasattr(kind, "_calculate_single_rank_operations"):
            pytest.skip(f"this torch has no {theirs}")
        if m < FAMILIES[name].least_units(d):
            continue
        lanes = format_lanes(made(name, d, m).lanes)
        for rank in range(d):
            bare = kind.__new__(kind)
            facts_of_rank = {"pp_group_size": d, "_n_microbatches": m, "num_stages": 2 * d, "_num_stages": 2 * d}
            for attribute, value in (facts_of_rank | {"n_local_stages": 2, "rank": rank}).items():
                setattr(bare, attribute, value)
            row = bare._calculate_single_rank_operations(rank)
            flat = [part for cell in row if cell is not None for part in (cell.sub_actions or (cell,))]
            assert " ".join(map(str, flat)) == lanes[rank]


@pytest.mark.parametrize("name", ["v-min", "v-half", "v-zb", "1f1b-v", "zb-v", "dualpipe-v", "zb-h1", "zb-h2"])
@pytest.mark.parametrize(("d", "m", "s"), [(2, 2, 2), (3, 4, 2), (4, 5, 3), (5, 6, 4), (8, 9, 2)])
def test_slices_cost_no_bubble_in_every_period(name: str, d: int, m: int, s: int) -> None:
    """Three times the microbatches leave no more idle time, and s slices hold at most s more units a stage."""
    few, many = facts(made(name, d, m, s)), facts(made(name, d, 3 * m, s))
    assert many[1] <= max(few[1], facts(made(name, d, 2 * m, s))[1])
    whole = facts(made(name, d, 3 * m * s))
    assert many[0] <= whole[0] + s * len(FAMILIES[name].placement(d)) // d


def test_the_smallest_memory_comes_with_the_largest_bubble() -> None:
    """At 8 devices and 16 microbatches, against 1F1B's 16 stage-halves: what docs/reference/schedules.md says."""
    table = {name: facts(made(name, 8, 16)) for name in (*CAPS, "1f1b-v", "zb-v", "dualpipe-v")}
    assert table == {
        "v-min": (8, 23), "v-half": (10, 17), "v-zb": (16, 0), "1f1b-v": (12, 33), "zb-v": (16, 0),
        "dualpipe-v": (17, 7),
    }  # fmt: skip


def test_a_small_v_half_in_full() -> None:
    """Three lanes, three microbatches, 4 units of memory, 5 idle slots: a change of any pass shows here."""
    assert format_lanes(made("v-half", 3, 3).lanes) == (
        "0F0 0F1 0F2 5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 5F2 5I2 5W2 0I1 0W1 0I2 0W2",
        "1F0 1F1 4F0 4F1 4I0 4W0 1F2 1I0 1W0 4F2 4I1 4W1 4I2 1I1 4W2 1I2 1W1 1W2",
        "2F0 3F0 2F1 3F1 3I0 3W0 2I0 2W0 2F2 3F2 3I1 2I1 3I2 2I2 3W1 3W2 2W1 2W2",
    )


@pytest.mark.parametrize(
    ("name", "problem", "says"),
    [
        (
            "v-min",
            {"placement": linear_placement(4)},
            r"(?s)V-Min is written for the V placement.*0,1,2,3.*0,1,2,3,3,2,1,0",
        ),
        ("v-half", {"placement": (0, 1, 0, 1)}, r"(?s)V-Half is written for the V placement.*seen: 0,1,0,1"),
        ("v-zb", {"placement": (1, 0, 0, 1)}, r"(?s)V-ZB is written for the V placement.*allowed: 0,1,1,0"),
        ("zb-v", {"placement": (0,)}, r"(?s)ZB-V is written for the V placement.*seen: 0.*allowed: 0,0"),
        ("1f1b-v", {"placement": linear_placement(2)}, "1F1B-V is written for the V placement"),
        (
            "zb-h1",
            {"placement": vee_placement(2)},
            r"(?s)ZB-H1 is written for one stage per lane.*lane 0 holds stages 0, 3",
        ),
        ("zb-h2", {"placement": vee_placement(2)}, r"(?s)ZB-H2 is written for one stage per lane.*use gpipe"),
        ("dualpipe-v", {"placement": linear_placement(2)}, "DualPipeV is written for the V placement"),
        (
            "dualpipe-v",
            {"placement": vee_placement(3), "microbatches": 2, "slices": 2},
            r"(?s)two microbatches \(or slices of them\) for every lane.*seen: 2 microbatches of 2 slices on 3 lanes"
            r".*allowed: at least 3 microbatches.*v-zb, which takes any number",
        ),
    ],
)
def test_refusals_say_what_is_possible(name: str, problem: dict, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        FAMILIES[name](ScheduleProblem(**({"microbatches": 4} | problem)))
