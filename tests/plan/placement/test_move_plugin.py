"""A placement move of another package, from the how-to page: it improves what a tiny budget of annealing does not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.plan.placement.kernels.test_state import chain, two_kinds
from tests.support.placement_toys import candidate, skewed_cluster
from tests.support.plan_toys import toy_model
from tests.support.plugin_package import installed, page_examples, write_package

from pipefit.errors import PipefitError, PlanError, PluginError
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.make import make_plan
from pipefit.plan.passes import place_devices
from pipefit.plan.placement.moves import MOVES, register_placement_move
from pipefit.plan.placement.search import PlacementBudget, search_placement
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import Job, Plan
from pipefit.plugins import load_plugins
from pipefit.simulate import simulate_schedule

__all__ = ["installed"]


@pytest.fixture
def swap_package(tmp_path: Path, installed) -> Path:
    """The page's package on disk, not yet loaded."""
    folder = write_package(tmp_path / "site", page_examples("add-a-placement-move.md"), "toy_swap")
    installed(folder, MOVES)
    return folder


def test_a_move_improves_what_one_built_in_move_does_not(swap_package: Path) -> None:
    toy = candidate(skewed_cluster(10, seed=1), chain(3, 3))
    budget = PlacementBudget(moves=1)
    before = search_placement(toy.question, toy.timeline, budget, compiled=False)
    assert search_placement(toy.question, toy.timeline, budget, compiled=False) == before
    load_plugins()
    assert list(MOVES) == ["swap devices"]
    after = search_placement(toy.question, toy.timeline, budget, compiled=False)
    assert after.step_s < before.step_s and after.moves == before.moves
    assert search_placement(toy.question, toy.timeline, budget, compiled=False) == after

    def step_s(devices: tuple[int, ...]) -> float:
        return simulate_schedule(toy.schedule, toy.costs_of(np.array(devices))).makespan_s

    assert after.step_s == pytest.approx(step_s(after.devices), rel=1e-7), "as simulated from the plan's own cost table"
    idle = sorted(set(range(10)) - set(after.devices))
    for first, second in itertools.combinations(range(10), 2):
        swapped = [*after.devices, *idle]
        swapped[first], swapped[second] = swapped[second], swapped[first]
        assert step_s(tuple(swapped[:9])) >= after.step_s * (1 - 1e-7), "no exchange of two devices is faster"


def test_the_planner_uses_the_move(swap_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(place_devices.PLACING_BUDGET, first_moves=1, final_moves=1)
    monkeypatch.setattr(place_devices, "PLACING_BUDGET", tiny)
    cluster = skewed_cluster(8, seed=2)

    def planned() -> Plan:
        choices = Constraints(stages=4, replicas=(1, 1), schedule="1f1b", microbatches=8)
        return make_plan(toy_model(6), cluster, Job(batch=16, sequence=128), choices)

    before = planned()
    load_plugins()
    after = planned()
    assert after.prediction is not None and before.prediction is not None
    assert after.prediction.step_s < before.prediction.step_s
    assert after.decisions["mapping"] != before.decisions.get("mapping")
    simulation = simulate_plan(after, toy_model(6), cluster)
    assert simulation.timeline.makespan_s == pytest.approx(after.prediction.step_s, rel=1e-12)


def test_a_proposal_that_is_no_permutation_is_refused(installed, tmp_path: Path) -> None:
    installed(tmp_path, MOVES)
    register_placement_move("twice", lambda devices, problem: [np.zeros_like(devices)])
    toy = candidate(skewed_cluster(4, seed=1), chain(2, 2))
    with pytest.raises(PlanError) as error:
        search_placement(toy.question, toy.timeline, PlacementBudget(moves=1), compiled=False)
    assert "where: placement move 'twice'" in str(error.value) and "seen: [0, 0, 0, 0]" in str(error.value)
    assert "allowed: arrays, each with [0, 1, 2, 3] once" in str(error.value)


def fail_late(devices, problem):
    yield devices[::-1].copy()
    raise KeyError("slot")


HERE = r"test_move_plugin\.py, line \d+\n.*"


@pytest.mark.parametrize(
    ("move", "error", "message"),
    [
        (fail_late, PluginError, "(?s)The placement move 'toy' failed.*line .*KeyError: 'slot'"),
        (lambda devices, problem: None, PluginError, rf"(?s)The placement move 'toy' failed.*{HERE}not iterable"),
        (lambda devices: [], PluginError, rf"(?s)The placement move 'toy' failed.*{HERE}positional"),
        (lambda devices, problem: devices[::-1].copy(), PlanError, "(?s)seen: 0\n  allowed: arrays, each with"),
        (lambda devices, problem: [None], PlanError, "(?s)no permutation.*placement move 'toy'.*seen: None"),
    ],
)
def test_a_move_that_fails_is_named(installed, tmp_path: Path, move, error, message: str) -> None:
    installed(tmp_path, MOVES)
    register_placement_move("toy", move)
    toy = candidate(skewed_cluster(4, seed=1), chain(2, 2))
    with pytest.raises(error, match=message):
        search_placement(toy.question, toy.timeline, PlacementBudget(moves=1), compiled=False)


def test_kinds_stay_on_lanes_that_may_hold_them(swap_package: Path) -> None:
    toy = candidate(two_kinds(), chain(3, 2))
    load_plugins()
    placed = search_placement(toy.question, toy.timeline, PlacementBudget(moves=1), compiled=False)
    shape = toy.question.shape
    lanes = np.arange(shape.slots) // (shape.replicas * shape.shards)
    assert shape.allowed[lanes, shape.kind[np.array(placed.devices)]].all() and placed.step_s <= placed.given_s


def test_a_second_move_of_a_name_is_refused(installed, tmp_path: Path) -> None:
    installed(tmp_path, MOVES)
    register_placement_move("swap", lambda devices, problem: [])
    with pytest.raises(PipefitError, match="Two placement moves have one name"):
        register_placement_move("swap", lambda devices, problem: [devices])
