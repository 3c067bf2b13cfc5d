"""Packing: every label once, whole conversations in one row, and hardly more rows than a lower bound."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipefit.data.chat.packing import cut_parts, pack_parts


def ends_of(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    stops = np.cumsum(np.array(lengths, dtype=np.int64))
    return stops - np.array(lengths), stops


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), capacity=st.integers(2, 12))
def test_parts_cover_every_label_once(lengths: list[int], capacity: int) -> None:
    starts, stops = ends_of(lengths)
    part_starts, part_stops = cut_parts(starts, stops, capacity)
    labels = [token for a, b in zip(part_starts, part_stops, strict=True) for token in range(a + 1, b)]
    firsts = set(starts.tolist())
    assert labels == [token for token in range(int(stops[-1])) if token not in firsts]
    sizes = part_stops - part_starts
    assert sizes.max() <= capacity and (sizes >= 1).all()
    assert len(sizes) == sum(max(1, -(-(length - 1) // (capacity - 1))) for length in lengths)


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_rows_hold_every_part_once_within_their_room(lengths: list[int]) -> None:
    starts, stops = ends_of(lengths)
    parts = pack_parts(starts, stops, np.arange(len(lengths)), 12)
    rows = [parts.row_parts(row) for row in range(parts.row_count)]
    assert sorted(part for row in rows for part in row) == list(zip(starts.tolist(), stops.tolist(), strict=True))
    sizes = [sum(stop - start for start, stop in row) for row in rows]
    assert min(sizes) >= 1 and max(sizes) <= 12
    assert parts.row_count <= np.ceil(11 / 9 * np.ceil(sum(lengths) / 12) + 1) + sum(length > 6 for length in lengths)
    number = {start: index for index, start in enumerate(starts.tolist())}
    assert parts.count_labels().tolist() == [sum(number[start] for start, _ in row) for row in rows]


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40))
def test_the_fit_is_the_best_of_a_plain_search(lengths: list[int]) -> None:
    """Row by row the same rooms as by looking at all rows."""
    starts, stops = ends_of(lengths)
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(12 - length)
    parts = pack_parts(starts, stops, np.ones(len(lengths), dtype=np.int64), 12)
    sizes = [sum(stop - start for start, stop in parts.row_parts(row)) for row in range(parts.row_count)]
    assert sorted(12 - size for size in sizes) == sorted(rooms)


def test_many_conversations_leave_hardly_any_room() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 0.8, 30_000).astype(np.int64).clip(1, 2049)
    stops = np.cumsum(lengths)
    began = time.process_time()
    parts = pack_parts(stops - lengths, stops, lengths, 2049)
    assert time.process_time() - began < 5
    assert lengths.sum() / (parts.row_count * 2049) > 0.999
