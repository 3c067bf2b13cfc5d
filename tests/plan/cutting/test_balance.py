"""Even lanes against trying every cut, on small chains."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pipefit.plan.cutting.balance import balance_lanes, lane_times

PLACEMENTS = {"interleaved": (0, 1, 2, 0, 1, 2), "v": (0, 1, 2, 2, 1, 0), "plain": (0, 1, 2)}


def best_of_all(times: np.ndarray, placement: tuple[int, ...]) -> float:
    stages, layers = times.shape
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return min(float(lane_times(times, (0, *cut, layers), placement).max()) for cut in cuts)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("layers", [6, 9, 14])
def test_lanes_are_nearly_as_even_as_the_best_cut(name: str, layers: int) -> None:
    """Equal layers with a light first and a heavy last one, as language models have; then random ones."""
    placement = PLACEMENTS[name]
    generator = np.random.default_rng(layers)
    row = np.ones(layers)
    row[0], row[-1] = 0.1, 1.3
    worst = []
    for times in (row, *generator.uniform(0.5, 1.5, (20, layers))):
        each = np.tile(times, (len(placement), 1))
        bounds = balance_lanes(each, placement)
        assert bounds[0] == 0 and bounds[-1] == layers and all(a < b for a, b in itertools.pairwise(bounds))
        worst.append(float(lane_times(each, bounds, placement).max()) / best_of_all(each, placement))
    assert worst[0] == pytest.approx(1.0), "the chain of a language model"
    assert np.mean(worst) < 1.1 and max(worst) < 1.35


def test_lane_times_add_up_the_stages_of_a_lane() -> None:
    times = np.arange(24.0).reshape(4, 6)
    assert lane_times(times, (0, 1, 3, 4, 6), (0, 1, 0, 1)).tolist() == [0 + 15, 7 + 8 + 22 + 23]
