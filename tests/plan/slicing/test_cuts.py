"""Equal-cost cuts against all slicings, closed forms and one another; the number of slices against its own formula."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.cost.types import Array, Ints
from pipefit.errors import PlanError
from pipefit.plan.slicing import count, cuts
from pipefit.plan.slicing.cuts import TimeOf


def causal(ratio: float, length: int, overhead_s: float = 0.0) -> TimeOf:
    """One second for the linear work of the sequence, `ratio` for its causal attention, and an overhead."""

    def time_of(tokens: Ints, past: Ints) -> Array:
        return overhead_s + tokens / length + ratio * tokens * (2.0 * past + tokens) / length**2

    return time_of


def all_slicings(cells: int, slices: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, cells), slices - 1):
        yield tuple(np.diff([0, *inner, cells]).tolist())


def costs(slices: tuple[int, ...], time_of: TimeOf) -> Array:
    return cuts.slice_times(slices, time_of)


@pytest.mark.parametrize("seed", range(60))
def test_no_slicing_has_a_cheaper_most_expensive_slice(seed: int) -> None:
    draw = random.Random(seed)
    cells, multiple = draw.randint(4, 20), draw.choice([1, 2, 3, 5])
    length = cells * multiple + draw.randrange(multiple)
    slices = draw.randint(1, min(cells, 5))
    time_of = causal(draw.choice([0.0, 0.1, 1.0, 5.0]), length, draw.choice([0.0, 0.05]))
    found = cuts.equal_cost(length, slices, time_of, multiple)
    rest = length - cells * multiple
    others = [
        (*(part * multiple for part in one[:-1]), one[-1] * multiple + rest) for one in all_slicings(cells, slices)
    ]
    best_s = min(float(costs(other, time_of).max()) for other in others)
    assert float(costs(found, time_of).max()) == pytest.approx(best_s, rel=1e-6)
    assert found in others


@pytest.mark.parametrize("ratio", [0.1, 0.25, 1.33])
def test_boundaries_are_those_of_the_closed_form(ratio: float) -> None:
    """x_k = (sqrt(1 + 4 r (1 + r) k / s) - 1) / (2 r), where the work up to x is x + r x^2 of 1 + r."""
    length, slices = 1 << 16, 9
    found = np.cumsum(cuts.equal_cost(length, slices, causal(ratio, length)))
    expected = [(math.sqrt(1 + 4 * ratio * (1 + ratio) * k / slices) - 1) / (2 * ratio) for k in range(1, slices + 1)]
    assert np.abs(found / length - expected).max() < 2 / length * slices


def test_rounding_keeps_the_slices_even() -> None:
    length, multiple = 8192, 64
    time_of = causal(0.5, length)
    found = cuts.equal_cost(length, 8, time_of, multiple)
    assert sum(found) == length and all(size % multiple == 0 for size in found)
    even_s = costs((length,), time_of)[0] / 8
    one_more_s = time_of(np.array([multiple]), np.array([length - multiple]))[0]
    assert np.abs(costs(found, time_of) - even_s).max() < one_more_s
    assert list(found) == sorted(found, reverse=True)


def test_free_attention_gives_uniform_slices() -> None:
    assert cuts.equal_cost(64, 4, causal(0.0, 64)) == cuts.uniform_slices(64, 4) == (16, 16, 16, 16)


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(64, 1024),
    slices=st.integers(2, 24),
    flat=st.floats(0.0, 512.0),
    per_past=st.floats(0.0, 1.0),
)
def test_slices_are_no_worse_than_even_ones_where_short_ones_cost_as_much_as_long_ones(
    length: int, slices: int, flat: float, per_past: float
) -> None:
    def time_of(tokens: Ints, past: Ints) -> Array:
        return np.asarray(np.maximum(flat, tokens) + per_past * past)

    found = cuts.equal_cost(length, slices, time_of)
    assert (len(found), sum(found)) == (slices, length)
    assert min(found) > 0
    even = cuts.slice_times(cuts.uniform_slices(length, slices), time_of).max()
    assert cuts.slice_times(found, time_of).max() <= even * (1 + 1e-9)


@pytest.mark.parametrize(("length", "slices"), [(64, 7), (2048, 43), (100, 3)])
def test_slices_are_as_long_where_short_ones_cost_as_much_as_long_ones(length: int, slices: int) -> None:
    def time_of(tokens: Ints, past: Ints) -> Array:
        return np.asarray(np.maximum(tokens, length) + 0.0 * past)

    found = cuts.equal_cost(length, slices, time_of)
    assert max(found) - min(found) <= 1 and sum(found) == length


def test_what_is_left_lengthens_the_last_slice() -> None:
    assert cuts.uniform_slices(1037, 3, cuts.slice_grain(64, 6)) == (384, 384, 269)
    assert cuts.equal_cost(21, 2, causal(0.0, 21), 10) == (10, 11)
    assert cuts.uniform_slices(7, 1, 16) == (7,)


@given(
    length=st.integers(1, 400),
    multiple=st.integers(1, 17),
    slices=st.integers(1, 24),
    ratio=st.floats(0, 20),
    overhead=st.floats(0, 1),
)
@settings(max_examples=150, deadline=None)
def test_every_slicing_sums_to_the_length(
    length: int, multiple: int, slices: int, ratio: float, overhead: float
) -> None:
    slices = min(slices, cuts.most_slices(length, multiple))
    for found in (
        cuts.uniform_slices(length, slices, multiple),
        cuts.equal_cost(length, slices, causal(ratio, length, overhead), multiple),
    ):
        assert sum(found) == length and len(found) == slices
        assert all(size % multiple == 0 for size in found[:-1]) and min(found) >= min(length, multiple)


def test_a_function_of_one_slice_may_be_given() -> None:
    time_of = cuts.vectorize_times(lambda tokens, past: tokens * (past + tokens / 2) + 10.0)
    assert cuts.equal_cost(100, 2, time_of) == (71, 29)


def test_too_many_slices_are_refused() -> None:
    with pytest.raises(PlanError) as caught:
        cuts.uniform_slices(1000, 16, 64)
    text = str(caught.value)
    assert "1000 tokens cannot be cut into this number of slices of at least 64" in text and "1 to 15" in text
    assert "smaller `slice_multiple`" in text, "the way out that no message else tells"


@pytest.mark.parametrize(
    ("stages", "sequences", "sequence_s", "overhead_s", "best"),
    [(8, 8, 1.1, 0.02, 6.9), (8, 8, 2.33, 0.005, 20.2), (16, 4, 1.25, 0.02, 15.3)],
)
def test_the_estimate_is_the_minimum_of_the_time(
    stages: int, sequences: int, sequence_s: float, overhead_s: float, best: float
) -> None:
    """The first rows are Seq1F1B-like settings of which the best number of slices is known from event simulations."""
    numbers = np.arange(1, 65)
    times = count.step_s(stages, sequences, numbers, sequence_s + overhead_s * numbers)
    known = math.sqrt((stages - 1) * sequence_s / (sequences * overhead_s))
    assert known == pytest.approx(best, abs=0.05)
    assert int(numbers[times.argmin()]) in (math.floor(best), math.ceil(best))


def test_numbers_around_the_best_one_are_tried_as_far_as_they_beat_no_slices() -> None:
    numbers = count.slice_count_ladder(2048, 64)
    assert numbers.tolist() == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    steps = np.array([10.0, 8, 7, 6, 5, 6, 7, 8, 11, 12])
    assert count.promising_counts(numbers, steps, 100) == (3, 4, 6, 8, 12)
    assert count.promising_counts(numbers, steps, 4) == (2, 3, 4)
    assert count.promising_counts(numbers, steps, 0) == (2,), "the fewest of all is always looked at"
    assert count.promising_counts(numbers, np.arange(10.0, 0.0, -1.0), 100) == (16, 24, 32)
    assert count.promising_counts(numbers, np.arange(10.0), 100) == ()


def test_several_stages_a_lane_and_split_backwards_leave_less_to_fill() -> None:
    whole = np.array([8.0])
    numbers = np.array([4])
    assert count.step_s(9, 2, numbers, whole)[0] == (2 + 8 / 4) * 8
    assert count.step_s(9, 2, numbers, whole, turns=2)[0] == (2 + 8 / 8) * 8
    assert count.step_s(9, 2, numbers, whole, idle=0.5)[0] == (2 + 8 / 8) * 8
