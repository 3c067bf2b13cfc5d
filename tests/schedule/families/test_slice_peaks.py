"""What schedules with slices hold and idle: published formulas, V schedules, and what more forwards ahead give."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipefit.schedule import FAMILIES, Schedule, ScheduleProblem, check_schedule, linear_placement, uniform_costs
from pipefit.schedule.problem import looped_placement as looped
from pipefit.simulate import simulate_schedule

ROOT = Path(__file__).resolve().parents[3]


def made(name: str, placement: tuple[int, ...], sequences: int, slices: int) -> Schedule:
    schedule = FAMILIES[name](ScheduleProblem(placement=placement, microbatches=sequences, slices=slices))
    check_schedule(schedule)
    return schedule


def facts(schedule: Schedule) -> tuple[int, int]:
    """(most units alive on a lane, idle slots of the lane that idles longest) in unit time."""
    timeline = simulate_schedule(schedule, uniform_costs(schedule.placement))
    spans = [stops[-1] - starts[0] for stops, starts in zip(timeline.stops_s, timeline.starts_s, strict=True)]
    return int(timeline.peak_bytes.max()), int(max(s - busy for s, busy in zip(spans, timeline.busy_s, strict=True)))


def test_the_benchmark_finds_every_published_formula(tmp_path: Path) -> None:
    path = tmp_path / "peaks.json"
    command = [sys.executable, "-m", "benchmarks.token_slices.peaks", "--quick", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text(encoding="utf-8"))
    assert all(target["met"] for target in found["targets"]) and "MISSED" not in done.stdout
    assert {form["form"]: form["shapes"] > 0 for form in found["forms"]} == dict.fromkeys(
        (
            "all forwards first",
            "1F1B",
            "slice-1F1B",
            "eager slice-1F1B",
            "interleaved 1F1B",
            "uniform-slice interleaved 1F1B",
            "SVPP",
            "slice-ZB-H1",
            "slice-V (V-ZB)",
        ),
        True,
    )


@pytest.mark.parametrize(("p", "v", "s", "m"), [(4, 2, 1, 8), (4, 2, 4, 4), (8, 3, 16, 2), (8, 2, 2, 8)])
def test_svpp_holds_less_than_interleaved_1f1b_and_takes_as_long(p: int, v: int, s: int, m: int) -> None:
    """p - 1 units less on the first lane, none on the last, whatever a backward takes."""
    costs = uniform_costs(looped(p, v), input_s=1.5, weight_s=0.5)
    lean, plain = (simulate_schedule(made(name, looped(p, v), m, s), costs) for name in ("svpp", "interleaved-1f1b"))
    assert lean.makespan_s == plain.makespan_s == (m * v * s + p - 1) * 3
    assert (plain.peak_bytes - lean.peak_bytes).tolist() == [p - 1 - lane for lane in range(p)]


@pytest.mark.parametrize("slices", [1, 4])
def test_forwards_ahead_hide_transfers(slices: int) -> None:
    """With transfers of a third of a forward eager 1F1B takes as long as all forwards first, which holds far more;
    without, it takes as long as 1F1B."""
    p, m = 8, 16
    eager, plain, first = (made(name, linear_placement(p), m, slices) for name in ("eager-1f1b", "1f1b", "gpipe"))
    free, slow = uniform_costs(linear_placement(p)), uniform_costs(linear_placement(p), transfer_s=0.3, port_s=0.1)
    assert simulate_schedule(eager, free).makespan_s == simulate_schedule(plain, free).makespan_s
    assert simulate_schedule(eager, slow).makespan_s <= 1.001 * simulate_schedule(first, slow).makespan_s
    assert simulate_schedule(plain, slow).makespan_s > 1.08 * simulate_schedule(eager, slow).makespan_s
    held = simulate_schedule(eager, slow).peak_bytes.tolist()
    assert held == [2 * (p - 1 - lane) + slices for lane in range(p)] and held[0] < m * slices


def test_one_stage_a_lane_of_svpp_is_1f1b() -> None:
    problem = ScheduleProblem(placement=linear_placement(4), microbatches=6, slices=3)
    assert FAMILIES["svpp"](problem).lanes == FAMILIES["1f1b"](problem).lanes


@pytest.mark.parametrize("name", ["v-min", "v-half", "v-zb", "zb-v"])
@pytest.mark.parametrize(("p", "s", "m"), [(4, 4, 6), (8, 2, 16), (8, 8, 6), (16, 8, 5)])
def test_slices_leave_a_v_little_more_idle_time(name: str, p: int, s: int, m: int) -> None:
    """Beside as many microbatches that are not cut: 2 (s - 1) units more, because a stage must hold all slices before
    the first backward, and at most as many idle slots more as there are lanes."""
    placement = FAMILIES[name].placement(p)
    cut, whole = facts(made(name, placement, m, s)), facts(made(name, placement, m * s, 1))
    assert cut[0] <= whole[0] + 2 * (s - 1)
    assert cut[1] <= whole[1] + p
