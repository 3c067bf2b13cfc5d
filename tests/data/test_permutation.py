"""The keyed shuffle: a bijection for every count and key, spread evenly, and the same for ever."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipefit.data.permutation import make_key, permute_indices


@given(count=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_is_a_bijection(count: int, key: int) -> None:
    shuffled = permute_indices(np.arange(count), count, key)
    assert sorted(shuffled.tolist()) == list(range(count))


@given(count=st.integers(1, 10**12), key=st.integers(0, 2**64 - 1), data=st.data())
def test_an_index_alone_goes_where_it_goes_among_others(count: int, key: int, data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20)))
    together = permute_indices(indices, count, key)
    assert together.tolist() == [int(permute_indices(np.array([i]), count, key)[0]) for i in indices]
    assert together.min() >= 0 and together.max() < count


def test_every_place_is_reached_equally_often() -> None:
    count, keys = 6, 6000
    table = np.zeros((count, count))
    for key in range(keys):
        table[np.arange(count), permute_indices(np.arange(count), count, make_key(key))] += 1
    expected = keys / count
    # 25 degrees of freedom: the 99.99 % point of chi-squared is 59.
    assert ((table - expected) ** 2 / expected).sum() < 59


def test_neighbours_do_not_stay_neighbours() -> None:
    count = 10_000
    shuffled = permute_indices(np.arange(count), count, make_key(1, 2))
    assert abs(np.corrcoef(np.arange(count), shuffled)[0, 1]) < 0.05
    assert (np.diff(shuffled) == 1).sum() < 10
    other = permute_indices(np.arange(count), count, make_key(1, 3))
    assert (shuffled == other).sum() < 10


def test_the_order_never_changes() -> None:
    """Resuming an old run needs this very order: change it and old runs see other data."""
    assert permute_indices(np.arange(10), 10, make_key(0, 0)).tolist() == [1, 5, 0, 3, 4, 7, 8, 6, 9, 2]
    assert make_key(1, 2) != make_key(2, 1) != make_key(1, 2, 0)


def test_time_follows_the_indices_and_not_the_count() -> None:
    start = time.perf_counter()
    permute_indices(np.arange(1000), 10**15, 7)
    assert time.perf_counter() - start < 1.0
