"""Tiers of tests: what each leaves out, how much it draws, in which order it runs; and the recorded durations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import clock, tiers
from tests.support.durations import (
    Durations,
    FileDurations,
    Recorder,
    gather_durations,
    read_durations,
    write_durations,
)
from tests.support.session import COLLECTED, CONTINUOUS, draw_less

ROOT = Path(__file__).resolve().parents[2]
RECORDED = read_durations(ROOT)


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> dict[str, float | None]:
    """Tests that this run collected, before its tier left some out -> seconds in the default tier; None: not in it."""
    return request.config.stash[COLLECTED]


def test_the_default_tier_fits_its_budget(collected: dict[str, float | None]) -> None:
    total_s = sum(seconds for seconds in collected.values() if seconds is not None)
    assert total_s <= tiers.DEFAULT_BUDGET_S, f"{total_s:.0f} s are recorded of its tests; see tests/support/tiers.py"


def test_the_tier_of_continuous_integration_fits_its_budget(request: pytest.FixtureRequest) -> None:
    total_s = request.config.stash[CONTINUOUS]
    assert total_s <= tiers.ALL_BUDGET_S, f"{total_s:.0f} s are recorded of its tests; see tests/support/tiers.py"


def test_only_files_of_slow_tests_and_labs_are_left_out_whole(collected: dict[str, float | None]) -> None:
    files = {nodeid.partition("::")[0] for nodeid in collected}
    kept = {nodeid.partition("::")[0] for nodeid, seconds in collected.items() if seconds is not None}
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in files - kept}
    assert [file for file, text in texts.items() if "mark.slow" not in text and "needs_lab" not in text] == []


def test_the_quick_tier_has_tests_of_every_folder_within_its_budget() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    chosen = tiers.choose_quick_files(RECORDED, files)
    assert {tiers.folder_of(file) for file in chosen} == {tiers.folder_of(file) for file in files}
    assert sum(tiers.quick_cost(RECORDED, file) for file in chosen) <= tiers.QUICK_BUDGET_S + 1e-6


def test_most_files_are_recorded() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    unknown = [file for file in files if RECORDED.of_file(file) is None]
    assert len(unknown) < 0.1 * len(files), f"run bin/test --all --record-durations: {unknown}"


def left_out(*tests: tiers.Marked, seconds: dict[str, float] | None = None) -> set[str]:
    return tiers.leave_out(tests, gather_durations(seconds or {}))


def test_slow_tests_are_left_out() -> None:
    assert left_out(tiers.Marked("a::fast"), tiers.Marked("a::slow", slow=True)) == {"a::slow"}


def test_labs_that_take_long_or_are_not_recorded_are_left_out() -> None:
    tests = [tiers.Marked(name, alone=True) for name in ("a::short", "a::long", "b::unknown")]
    assert left_out(*tests, seconds={"a::short": 1.0, "a::long": 4.0}) == {"a::long", "b::unknown"}


def test_a_property_test_counts_for_what_it_draws() -> None:
    tests = [tiers.Marked("a::few", share=0.25), tiers.Marked("a::many")]
    assert left_out(*tests, seconds={"a::few": 4 * tiers.LONGEST_S - 1, "a::many": tiers.LONGEST_S + 1}) == {"a::many"}


def test_a_test_keeps_as_many_parameters_as_fit_and_at_least_one() -> None:
    many = [f"a::many[{k}]" for k in range(6)]
    seconds = dict.fromkeys(many, tiers.FAMILY_S / 2.5)
    assert left_out(*map(tiers.Marked, many), seconds=seconds) == {many[k] for k in (1, 2, 4, 5)}
    seconds = dict.fromkeys(many, tiers.FAMILY_S + 1.0)
    assert left_out(*map(tiers.Marked, many), seconds=seconds) == set(many[1:])
    seconds = dict.fromkeys(many, tiers.FAMILY_S / 7)
    assert left_out(*map(tiers.Marked, many), seconds=seconds) == set()


def test_the_tier_all_leaves_out_parameters_only() -> None:
    many = [f"a::many[{k}]" for k in range(6)]
    seconds = dict.fromkeys(many, tiers.ALL_FAMILY_S / 2.5) | {"a::long": 99.0, "a::dear[0]": 99.0}
    tests = [*map(tiers.Marked, seconds), tiers.Marked("a::slow", slow=True)]
    assert tiers.leave_out_parameters(tests, gather_durations(seconds)) == {many[k] for k in (1, 2, 4, 5)}
    marked = [tiers.Marked(name, whole_family=True) for name in many]
    assert tiers.leave_out_parameters(marked, gather_durations(seconds)) == set()


def test_long_tests_are_left_out_unless_a_file_has_no_other() -> None:
    seconds = {"a::long": 50.0, "a::short": 1.0, "b::long": 50.0, "b::longer": 60.0}
    assert left_out(*map(tiers.Marked, seconds), seconds=seconds) == {"a::long", "b::longer"}


def test_parameters_are_spread() -> None:
    assert tiers.pick_spread("abcdef", 3) == ["a", "c", "e"]
    assert tiers.pick_spread("ab", 5) == ["a", "b"] and tiers.pick_spread("", 2) == []


@settings(max_examples=48)
@given(st.integers())
def drawing(_: int) -> None:
    RUNS.append(1)


RUNS: list[int] = []


def test_property_tests_draw_less_below_all() -> None:
    class Item:
        obj = staticmethod(drawing)

    drawing()
    assert len(RUNS) == 48
    RUNS.clear()
    draw_less(Item())
    drawing()
    assert len(RUNS) == tiers.lower_draws(48) == 12
    assert tiers.lower_draws(5) == 5 and tiers.lower_draws(20) == tiers.DRAWS_LEAST


def test_what_is_asked_for_comes_first_then_what_takes_longest_and_labs_at_the_end() -> None:
    seconds = {"short": 1.0, "long": 9.0, "own": 2.0, "lab": 50.0}
    assert tiers.order_groups(seconds, {"own"}, "lab") == ["own", "long", "short", "lab"]


def test_durations_come_back_and_survive_a_move(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    seconds = {'tests/a/test_x.py::slow[1-"]': 12.34, "tests/a/test_x.py::fast": 0.04, "tests/test_y.py::t": 0.123}
    write_durations(tmp_path, gather_durations(seconds))
    read = read_durations(tmp_path)
    assert read.of_test('tests/a/test_x.py::slow[1-"]') == 12.3 and read.of_test("tests/test_y.py::t") == 0.12
    assert read.of_test("tests/b/c/test_x.py::fast") == 0.04, "the file was moved"
    assert read.of_test("tests/test_z.py::t") == 0.05 and read.of_file("tests/test_z.py") is None
    assert json.loads((tmp_path / "tests/durations.json").read_text())["unit"] == "seconds"


def test_parameters_that_did_not_run_keep_their_durations(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").touch()
    before = {"tests/test_x.py::many[0]": 3.0, "tests/test_x.py::many[1]": 4.0, "tests/test_x.py::gone": 5.0}
    write_durations(tmp_path, gather_durations(before))
    recorder = Recorder(tmp_path)
    recorder.seconds = {"tests/test_x.py::many[0]": 2.0}
    recorder.pytest_sessionfinish()
    assert read_durations(tmp_path).files["tests/test_x.py"].listed == {"many[0]": 2.0, "many[1]": 4.0}
    recorder = Recorder(tmp_path, keeps_absent=False)
    recorder.seconds = {"tests/test_x.py::many[0]": 2.0}
    recorder.pytest_sessionfinish()
    assert read_durations(tmp_path).files["tests/test_x.py"].listed == {"many[0]": 2.0}


def test_quick_files_are_the_cheap_ones_of_all_folders_in_turn() -> None:
    files = {
        f"tests/{folder}/test_{k}.py": FileDurations({"long": 50.0}, 10, 0.5 * k) for folder in "ab" for k in range(9)
    }
    files["tests/c/test_dear.py"] = FileDurations({}, 100, 30.0)
    chosen = tiers.choose_quick_files(Durations(files), files, budget_s=3.0)
    assert chosen == [f"tests/{folder}/test_{k}.py" for folder in "ab" for k in range(3)]


def test_waiting_for_a_processor_costs_nothing() -> None:
    before = clock.Reading(0.0, 5.0, 0.0, 0.0, {1: 2.0})
    assert clock.cost_between(before, clock.Reading(10.0, 8.0, 0.0, 9.0, {1: 4.0, 2: 1.0})) == 3.0 + 4.0
    ended = clock.Reading(10.0, 8.0, 1.0, 9.0, {1: 4.0})
    assert clock.cost_between(before, ended) == 3.0, "a child that ended may have waited all the time"
    fewer_threads = clock.Reading(10.0, 8.0, 0.0, 9.0, {1: 0.5})
    assert clock.cost_between(before, fewer_threads) == 10.0, "the waiting of threads that ended is unknown"
    assert clock.cost_between(before, clock.Reading(10.0, 0.0, 0.0, 0.0, {})) == 10.0, "where nothing is said"
