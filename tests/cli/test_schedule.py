"""`pipefit schedule`: uneven stages, memory, placements, building blocks, and what it says of mistakes in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from pipefit.cli import main
from pipefit.schedule import ScheduleProblem, find_family, uniform_costs, vee_placement
from pipefit.schedule.blocks.building_block import draw_block
from pipefit.schedule.text.csv_io import from_csv
from pipefit.simulate import simulate_schedule

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: (exit code, output, errors)."""

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipefit", "schedule", *words])
        with pytest.raises(SystemExit) as left:
            main()
        read = capsys.readouterr()
        return int(left.value.code or 0), read.out, read.err

    return command


def test_single_stages_have_their_own_times(run: Run) -> None:
    code, out, _ = run("v-half", "--times", "28,28,20,4", "--stage", "7=42,42,30", "--stage", "1=3,4,5", "--json")
    facts = json.loads(out)
    forward_s, input_s, weight_s = [28.0] * 8, [28.0] * 8, [20.0] * 8
    forward_s[7], input_s[7], weight_s[7] = 42.0, 42.0, 30.0
    forward_s[1], input_s[1], weight_s[1] = 3.0, 4.0, 5.0
    assert code == 0 and (facts["times"]["F"], facts["times"]["I"], facts["times"]["W"]) == (
        forward_s,
        input_s,
        weight_s,
    )
    costs = uniform_costs(
        vee_placement(4), forward_s=forward_s, input_s=input_s, weight_s=weight_s, transfer_s=4, port_s=4
    )
    schedule = find_family("v-half")(ScheduleProblem(placement=vee_placement(4), microbatches=8))
    assert facts["makespan"] == simulate_schedule(schedule, costs).makespan_s and facts["times"]["transfer"] == 4.0


def test_memory_is_a_share_of_what_1f1b_holds(run: Run) -> None:
    """1F1B's first device holds d microbatches of a whole stage: 2 d of the half stages of a V."""
    for name, devices, memory, limit in (
        ("1f1b", 4, "1", 4),
        ("v-zb", 8, "1", 16),
        ("v-half", 8, "0.625", 10),
        ("v-min", 8, "0.55", 8),
        ("interleaved-1f1b", 4, "1.5", 12),
    ):
        code, out, err = run(name, "--devices", str(devices), "--microbatches", "16", "--memory", memory, "--json")
        facts = json.loads(out)
        assert (code, facts["limit_units"]) == (0, limit), (name, err)
        assert max(facts["peak_units"]) <= limit
    code, out, _ = run("v-half", "--devices", "8", "--microbatches", "16", "--memory", "0.63")
    assert out.splitlines()[0].endswith("held") and out.splitlines()[1].startswith("lane 0  10/10  0F0")
    assert out.endswith("; 10 allowed\n")


def test_the_placement_can_be_chosen(run: Run) -> None:
    for words, placement in (
        (("gpipe", "--placement", "v", "--devices", "2"), [0, 1, 1, 0]),
        (("gpipe", "--placement", "looped", "--devices", "2"), [0, 1, 0, 1]),
        (("gpipe", "--devices", "2"), [0, 1]),
    ):
        assert json.loads(run(*words, "--json")[1])["placement"] == placement


def test_the_block_is_drawn_with_its_bounds(run: Run) -> None:
    code, out, _ = run("v-half", "--block", "--devices", "4")
    build = find_family("v-half").block
    assert code == 0 and build is not None and draw_block(build(4)) in out
    assert "lane 0  stages 0, 7: ceil(30 / 6) + ceil(6 / 6) = 6" in out
    assert out.count(" = 6\n") == 4


def test_fit_keeps_to_the_memory_and_says_how_good_it_is(run: Run) -> None:
    words = ("fit", "--devices", "4", "--times", "28,28,20,4", "--stage", "7=42,42,30", "--json")
    spans = []
    for memory, limit in (("0.5", 4), ("0.75", 6), ("1", 8)):
        code, out, _ = run(*words, "--memory", memory)
        facts = json.loads(out)
        told = facts["fit"]
        assert code == 0 and facts["placement"] == list(vee_placement(4)) and facts["limit_units"] == limit
        assert max(facts["peak_units"]) <= limit
        assert 8 * (76 + 114) <= told["bound"] <= told["span"] <= facts["makespan"]
        assert told["gap"] == pytest.approx(1 - told["bound"] / told["span"])
        assert told["bubble_of_busiest"] == pytest.approx(1 - 8 * (76 + 114) / told["span"])
        spans.append(told["span"])
    assert spans[0] > spans[1] > spans[2]
    family_span = json.loads(run("v-half", *words[1:], "--memory", "0.75")[1])["makespan"]
    assert spans[1] < family_span
    small = ("fit", "--devices", "2", "--microbatches", "3", "--memory", "0.75", "--csv")
    assert run(*small) == run(*small, "--seed", "0")


def test_large_limits_are_written_out(run: Run) -> None:
    code, out, _ = run("fit", "--devices", "2", "--microbatches", "2", "--memory", "1e8")
    assert code == 0 and "lane 0  4/400000000  0F0" in out and "; 400000000 allowed" in out


@pytest.mark.parametrize("times", ["1e-300,1e17,1e-300", "5e-324,5e-324,5e-324", "1,1e-300,1e17"])
def test_times_may_be_of_any_size(run: Run, times: str) -> None:
    """The whole command goes through, and draws every action."""
    code, out, err = run("fit", "--devices", "2", "--microbatches", "2", "--times", times)
    assert code == 0, err
    for stage in range(4):
        assert all(f" {stage}F{microbatch}" in out for microbatch in range(2)), out


def test_fit_is_drawn_and_searches_as_long_as_asked(run: Run) -> None:
    code, out, _ = run("fit", "--devices", "2", "--microbatches", "4", "--memory", "0.75", "--seconds", "0.1")
    assert code == 0 and "no schedule takes less than" in out and "\nfound by " in out
    for placement in ("linear", "looped"):
        out = run("fit", "--devices", "2", "--placement", placement, "--seconds", "0.1", "--csv")[1]
        assert tuple(from_csv(out, "fit").placement) == {"linear": (0, 1), "looped": (0, 1, 0, 1)}[placement]


def test_the_solver_can_prove_that_nothing_is_better(run: Run) -> None:
    """d=2, m=4 at three units: three idle slots are the least (tests/schedule/fit/optimum.json)."""
    pytest.importorskip("ortools")
    words = ("fit", "--devices", "2", "--microbatches", "4", "--memory", "0.75", "--solver-seconds", "8", "--json")
    told = json.loads(run(*words)[1])["fit"]
    assert (told["span"], told["bound"], told["gap"]) == (4 * 6 + 3, 4 * 6 + 3, 0.0)


MISTAKES = [
    ("fit --memory 0.1", ("No schedule fits into this little memory", "at least 0.25, or 2")),
    ("fit --seconds -1", ("time of a search is not negative", "--seconds", "seen: -1")),
    ("fit --solver-seconds -1", ("time of a search is not negative", "--solver-seconds")),
    ("fit --seconds 1e10", ("time of a search is too long", "--seconds", "10000000000", "less than 1e+09 seconds")),
    ("fit --solver-seconds nan", ("time of a search is too long", "--solver-seconds", "nan")),
    ("fit --seed -7", ("A seed is a whole number that is not negative", "--seed", "seen: -7")),
    ("v-half --seed -7", ("Only fit searches", "where: --seed", "--seed with v-half", "allowed: --seed with fit")),
    ("1f1b --seconds 3", ("Only fit searches", "where: --seconds")),
    ("gpipe --solver-seconds 0", ("Only fit searches", "where: --solver-seconds")),
    ("1f1b --stage 1=1,1,1 --stage 1=2,2,2", ("Stage 1 is given twice", "'1=1,1,1' and '1=2,2,2'", "one --stage")),
    ("fit --interval 3", ("fit is not made of a building block", "where: --interval")),
    *(
        (
            f"v-half --block {option}",
            ("A building block has no such option", f"where: {option.split()[0]}", "--interval"),
        )
        for option in (
            "--csv",
            "--json",
            "--memory 0.1",
            "--microbatches 0",
            "--times 0,0,0",
            "--stage 0=1,1,1",
            "--slices 1",
            "--placement v",
            "--seed 0",
        )
    ),
    ("fit --times 1,0,1", ("three positive numbers", "--times")),
    ("fit --block", ("fit is not made of a building block",)),
    (
        "v-half --devices 8 --microbatches 16 --memory 0.5",
        (
            "v-half needs more memory than it may use",
            "device 0",
            "10 microbatches of a stage, where 8 may be held",
            "--memory 0.625 or more for v-half; at least 0.125 for any schedule",
            "try: fit",
        ),
    ),
    ("zb-h2 --memory 1", ("zb-h2 needs more memory", "7 microbatches, where 4", "--memory 1.75 or more")),
    (
        "v-min --devices 8 --memory 0.1",
        (
            "No schedule fits into this little memory",
            "0.1, which is 1.6 microbatches of a stage on every device",
            "at least 0.125, or 2: one microbatch before its backward",
            "try: --memory 0.125",
        ),
    ),
    ("1f1b --slices 4 --memory 0.2", ("this little memory", "0.2, which is 3.2 slices", "at least 0.25, or 4")),
    ("1f1b --memory 0", ("memory must be a positive number", "--memory", "seen: 0")),
    ("1f1b --memory -1", ("positive number", "seen: -1")),
    ("1f1b --memory nan", ("positive number", "seen: nan")),
    ("1f1b --stage 3=1,0,1", ("its number and three positive numbers", "'3=1,0,1'", "15=42,42,30")),
    ("1f1b --stage 3=1,-2,1", ("three positive numbers",)),
    ("1f1b --stage 1,1,1", ("three positive numbers", "STAGE=F,I,W")),
    ("1f1b --stage 4=1,1,1", ("There is no such stage", "stages 0 to 3")),
    ("gpipe --placement w", ("The placement is unknown", "'w'", "linear, looped, v")),
    ("1f1b --placement v", ("one stage per lane",)),
    ("gpipe --block", ("not made of a building block", "v-half, v-min, v-zb")),
    ("v-half --interval 0", ("at least one slot", "--interval", "seen: 0")),
    (
        "v-min --devices 3 --block --interval 5",
        ("collide: repeated every 5 slots", "^^^", "lane 0, slot", "differ modulo 5"),
    ),
    ("v-min --block --csv --json", ("Only one form of output",)),
]


@pytest.mark.parametrize(("words", "says"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_mistakes_are_explained(run: Run, words: str, says: tuple[str, ...]) -> None:
    code, out, err = run(*words.split())
    assert code == 2 and not out
    for part in says:
        assert part in err, err


def test_what_is_allowed_is_enough(run: Run) -> None:
    """The shares that messages name work."""
    assert run("v-half", "--devices", "8", "--microbatches", "16", "--memory", "0.625", "--csv")[0] == 0
    assert run("zb-h2", "--memory", "1.75", "--csv")[0] == 0
    assert run("1f1b", "--microbatches", "1", "--memory", "0.25", "--csv")[0] == 0
