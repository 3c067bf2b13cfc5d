"""TeraPipe's dynamic program and its knapsack against all slicings, against its own plain enumeration, and in time."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from pipefit.cost.types import Array, Ints
from pipefit.plan.slicing.batch import best_batch
from pipefit.plan.slicing.bounds import BoundedSlicing, best_bound
from pipefit.plan.slicing.count import promising_counts, slice_count_ladder
from pipefit.plan.slicing.count import step_s as count_step_s
from pipefit.plan.slicing.cuts import TimeOf, equal_cost, slice_times, vectorize_times
from pipefit.plan.slicing.terapipe import SlicePaths, best_slicing, slice_table


def random_table(draw: random.Random, length: int) -> TimeOf:
    """Any positive times, not monotone, with ties now and then."""
    times = {
        (own, past): draw.choice([draw.random(), draw.randint(1, 3) / 2])
        for own in range(1, length + 1)
        for past in range(length)
    }
    return vectorize_times(lambda own, past: times[own, past])


def slicings(cells: int) -> Iterator[tuple[int, ...]]:
    for inside in itertools.product([False, True], repeat=cells - 1):
        stops = [0, *(i + 1 for i, cut in enumerate(inside) if cut), cells]
        yield tuple(np.diff(stops).tolist())


def step_s(slices: tuple[int, ...], time_of: TimeOf, stages: int, sequences: int = 1) -> float:
    times = slice_times(slices, time_of)
    return float(sequences * times.sum() + (stages - 1) * times.max())


@pytest.mark.parametrize("seed", range(300))
def test_the_program_is_exact(seed: int) -> None:
    draw = random.Random(seed)
    cells, multiple = draw.randint(1, 9), draw.choice([1, 1, 4])
    length = cells * multiple + draw.randrange(multiple)
    stages, sequences = draw.choice([1, 2, 3, 8, 40]), draw.choice([1, 1, 3])
    time_of = random_table(draw, length)
    found = best_slicing(length, stages, time_of, multiple=multiple, sequences=sequences, compiled=False)
    rest = length - cells * multiple
    every = [(*(n * multiple for n in one[:-1]), one[-1] * multiple + rest) for one in slicings(cells)]
    assert found.step_s == pytest.approx(min(step_s(one, time_of, stages, sequences) for one in every), rel=1e-12)
    assert found.slices in every
    assert found.step_s == pytest.approx(step_s(found.slices, time_of, stages, sequences), rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_within_eps_of_the_best(seed: int) -> None:
    draw = random.Random(seed)
    time_of, stages, eps_s = random_table(draw, 8), draw.randint(2, 9), draw.choice([0.02, 0.1])
    exact = best_slicing(8, stages, time_of, multiple=1)
    quick = best_slicing(8, stages, time_of, multiple=1, eps_s=eps_s)
    assert exact.step_s <= quick.step_s <= exact.step_s + stages * eps_s


@pytest.mark.parametrize("stages", [1, 2, 7, 48])
def test_the_same_as_trying_every_bound(stages: int) -> None:
    """The paper's own enumeration: every entry of the table ascending, until K t_max exceeds the best."""
    paths = SlicePaths(48, _gpu(48 * 8), multiple=1)
    best_s, tried = float("inf"), 0
    for bound_s in paths.candidates:
        if stages * bound_s > best_s:
            break
        tried += 1
        best_s = min(best_s, paths.solve_within(bound_s).total_s + (stages - 1) * bound_s)
    looks: list[float] = []

    def within(bound_s: float) -> BoundedSlicing:
        looks.append(bound_s)
        return paths.solve_within(bound_s)

    _, found = best_bound(paths.candidates, within, stages)
    assert found.step_s(stages) == pytest.approx(best_s, rel=1e-12)
    assert len(looks) <= max(30, tried / 3)


@pytest.mark.parametrize("seed", range(150))
def test_the_knapsack_is_exact(seed: int) -> None:
    """Against all divisions of the batch into parts with all slicings of every part."""
    draw = random.Random(1000 + seed)
    length, rows, stages = draw.randint(1, 4), draw.randint(1, 4), draw.choice([1, 2, 5, 20])
    tables = {size: random_table(draw, length) for size in range(1, rows + 1)}
    found = best_batch(length, rows, stages, tables.__getitem__, multiple=1, compiled=False)
    assert sum(part.rows for part in found.parts) == rows
    assert all(sum(part.slices) == length for part in found.parts)
    times = np.concatenate([slice_times(part.slices, tables[part.rows]) for part in found.parts])
    assert found.step_s == pytest.approx(times.sum() + (stages - 1) * times.max(), rel=1e-12)
    best_s = min(
        float(all_times.sum() + (stages - 1) * all_times.max())
        for parts in _divisions(rows, rows)
        for choice in itertools.product(list(slicings(length)), repeat=len(parts))
        for all_times in [np.concatenate([slice_times(s, tables[b]) for b, s in zip(parts, choice, strict=True)])]
    )
    assert found.step_s == pytest.approx(best_s, rel=1e-12)


def test_parts_have_the_rows_that_are_allowed() -> None:
    def free_rows(rows: int) -> TimeOf:
        return vectorize_times(lambda own, past: 1.0)

    assert [p.rows for p in best_batch(8, 6, 1, free_rows, multiple=8).parts] == [6]
    assert [p.rows for p in best_batch(8, 6, 1, free_rows, multiple=8, sizes=(1, 2)).parts] == [2, 2, 2]
    assert [p.rows for p in best_batch(8, 12, 1, free_rows, multiple=8, sizes=(4, 6)).parts] == [6, 6]


def test_long_slices_first_then_short_ones() -> None:
    """With a knee below which fewer tokens save no time the slices stay above it, and the first are longest."""
    found = best_slicing(2048, 48, _gpu(2048))
    assert max(found.slices) == found.slices[0] > 1.3 * found.slices[-1] and len(found.slices) < 12
    assert found.step_s < step_s((2048,), _gpu(2048), 48) / 4


@pytest.mark.parametrize("stages", [4, 16, 48])
def test_equal_cost_cuts_in_the_best_number_are_nearly_as_good(stages: int) -> None:
    length, time_of = 2048, _gpu(2048)
    numbers = slice_count_ladder(length, 8)
    whole_s = np.array([slice_times(equal_cost(length, each, time_of, 8), time_of).sum() for each in numbers.tolist()])
    tried = promising_counts(numbers, count_step_s(stages, 1, numbers, whole_s), length)
    cut = [equal_cost(length, each, time_of, multiple=8) for each in tried]
    equal_s = min(step_s(one, time_of, stages) for one in cut)
    exact_s = best_slicing(length, stages, time_of).step_s
    assert exact_s <= equal_s <= 1.025 * exact_s


def test_compiled_and_plain_give_the_same() -> None:
    plain, compiled = (best_slicing(256, 12, _gpu(256), multiple=4, compiled=way) for way in (False, True))
    assert plain == compiled


def test_a_sequence_of_2048_tokens_in_steps_of_8_takes_two_seconds_at_most() -> None:
    best_slicing(64, 8, _gpu(64), compiled=True)
    for stages in (8, 24, 96):
        start = time.process_time()
        best_slicing(2048, stages, _gpu(2048), compiled=True)
        assert time.process_time() - start < 2.0


def test_the_table_is_that_of_the_cost_function() -> None:
    table = slice_table(np.array([0, 3, 6, 10]), vectorize_times(lambda own, past: 100.0 * own + past))
    inf = float("inf")
    assert table.tolist() == [[300, inf, inf], [303, 600, inf], [406, 703, 1000]]


def _gpu(length: int) -> TimeOf:
    """A layer that takes as long for 1 token as for 256, with attention."""

    def time_of(tokens: Ints, past: Ints) -> Array:
        linear = np.maximum(256, tokens.astype(np.float64))
        return 1e-3 * (linear / 256 + 0.3 * tokens * (past + tokens / 2) / (256.0 * length))

    return time_of


def _divisions(rows: int, most: int) -> Iterator[tuple[int, ...]]:
    if rows == 0:
        yield ()
    for first in range(min(rows, most), 0, -1):
        for rest in _divisions(rows - first, first):
            yield (first, *rest)
