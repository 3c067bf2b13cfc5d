"""The cut of layers into stages against trying every cut, and the memory test against the same."""

from __future__ import annotations

import itertools
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipefit.plan.cutting.layer_cut import some_cut_fits
from pipefit.plan.cutting.partition import partition_layers, some_partition_fits
from pipefit.plan.cutting.rows import LayerRow

numbers = st.integers(0, 9)


def all_cuts(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *cuts, layers) for cuts in itertools.combinations(range(1, layers), stages - 1)]


def worst(rows: list[list[int]], bounds: tuple[int, ...]) -> int:
    return max(sum(row[start:stop]) for row, (start, stop) in zip(rows, pairwise(bounds), strict=True))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int]]:
    layers = draw(st.integers(1, 7))
    stages = draw(st.integers(1, layers))
    row = st.lists(numbers, min_size=layers, max_size=layers)
    rows = st.lists(row, min_size=stages, max_size=stages)
    limits = st.lists(st.integers(0, 40), min_size=stages, max_size=stages)
    return draw(rows), draw(rows), draw(limits)


@given(problem=problems())
def test_no_cut_is_better(problem: tuple[list[list[int]], list[list[int]], list[int]]) -> None:
    """The slowest stage is as fast as in the best of all cuts that fit; of those, the fullest is as empty."""
    times, memory, limits = problem
    bounds = partition_layers(times, memory, limits)
    assert partition_layers(times, memory, limits, compiled=True) == bounds, "numba cuts as plain Python does"
    fitting = [
        cut
        for cut in all_cuts(len(times[0]), len(times))
        if all(sum(row[a:b]) <= limit for row, limit, (a, b) in zip(memory, limits, pairwise(cut), strict=True))
    ]
    if not fitting:
        assert bounds is None
        return
    best = min((worst(times, cut), worst(memory, cut)) for cut in fitting)
    assert bounds in fitting
    assert (worst(times, bounds), worst(memory, bounds)) == best


@given(problem=problems())
def test_the_memory_test_is_exact(problem: tuple[list[list[int]], list[list[int]], list[int]]) -> None:
    _, memory, limits = problem
    zero = np.zeros(len(memory[0]))
    rows = [
        LayerRow(
            forward_s=zero,
            backward_s=zero,
            input_s=zero,
            saved_bytes=zero,
            pending_bytes=zero,
            static_bytes=np.array(row, dtype=float),
            passing_bytes=0.0,
            limit_bytes=float(limit),
            layers=(),
        )
        for row, limit in zip(memory, limits, strict=True)
    ]
    fits = partition_layers(memory, memory, limits) is not None
    assert some_cut_fits(rows, [1] * len(rows)) == fits
    every, most = np.array(memory, dtype=float)[:, None], np.array(limits, dtype=float)[:, None]
    assert some_partition_fits(every, most, compiled=True) == fits


def test_without_memory_only_time_counts() -> None:
    assert partition_layers([[5, 1, 1, 1, 1, 1]] * 2) == (0, 1, 6)
    assert partition_layers([[1, 1, 1, 1]]) == (0, 4)


def test_stages_on_different_devices_get_different_shares() -> None:
    """Three equal layers; the second stage is twice as fast, so it takes two of them."""
    assert partition_layers([[2, 2, 2], [1, 1, 1]]) == (0, 1, 3)


def test_more_stages_than_layers_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="3 stages need at least 3 layers; there are 2"):
        partition_layers([[1, 1]] * 3)
