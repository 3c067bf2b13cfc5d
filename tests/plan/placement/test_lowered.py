"""The placement search that goes on in the order of the best placement: against lowering what it found by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.plan.placement.kernels.test_state import chain
from tests.support.placement_toys import candidate, skewed_cluster

from pipefit.plan.placement import lowered
from pipefit.plan.placement.lowered import LOWERING_BUDGET, LoweredPlacement, place_lowered
from pipefit.plan.placement.search import PlacementBudget, search_placement

CLUSTER = skewed_cluster(24, seed=5)
DECISIONS = chain(4, 6)


class Lowering:
    """Lowers placements of one candidate, and remembers which."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, devices: tuple[int, ...]) -> LoweredPlacement:
        self.seen.append(devices)
        made = candidate(CLUSTER, replace(DECISIONS, devices=devices), batch=48)
        step_s = float(np.maximum(made.timeline.times.stop_s, made.timeline.times.arrival_s).max())
        return LoweredPlacement(question=made.question, timeline=made.timeline, step_s=step_s)


def test_what_it_finds_takes_what_it_says_when_it_is_lowered() -> None:
    """Its time is that of a plan on these devices made from nothing, and below that of the search it begins with."""
    gains = []
    for seed in range(3):
        lower, budget = Lowering(), PlacementBudget(moves=20_000, seed=seed)
        given = Lowering()(tuple(range(24)))
        found = place_lowered(given, lower, budget, compiled=True)
        assert sorted(found.devices) == list(range(24)) and found.devices in lower.seen
        assert found.step_s == pytest.approx(Lowering()(found.devices).step_s, rel=1e-12)
        assert found.given_s == given.step_s
        first_budget = replace(budget, moves=int(LOWERING_BUDGET.first_part * 20_000))
        first = search_placement(given.question, given.timeline, first_budget, compiled=True)
        assert lower.seen[0] == first.devices and len(lower.seen) == 1 + len(LOWERING_BUDGET.later_heats)
        assert found.moves > first.moves and found.simulated > first.simulated
        gains.append(Lowering()(first.devices).step_s / found.step_s)
        assert found == place_lowered(given, Lowering(), budget, compiled=True), "seeded"
    assert min(gains) >= 1.0 and max(gains) > 1.0


def test_it_lowers_nothing_anew_where_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    given, lower = Lowering()(tuple(range(24))), Lowering()
    budget = PlacementBudget(moves=500)
    plain = search_placement(given.question, given.timeline, budget, compiled=False)
    monkeypatch.setattr(lowered, "LOWERING_BUDGET", replace(LOWERING_BUDGET, max_slots=23))
    assert place_lowered(given, lower, budget, compiled=False) == plain
    monkeypatch.undo()
    ticking = iter(range(10**6))
    place_lowered(
        given, lower, PlacementBudget(moves=500, seconds=4.0), compiled=False, clock=lambda: float(next(ticking))
    )
    assert not lower.seen
    place_lowered(
        given, lower, PlacementBudget(moves=500, seconds=60.0), compiled=False, clock=lambda: float(next(ticking))
    )
    assert len(lower.seen) == 1 + len(LOWERING_BUDGET.later_heats)
