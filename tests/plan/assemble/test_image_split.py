"""Which images a replica takes, against trying every boundary."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipefit.plan.assemble.image_split import image_runs, token_runs


@given(
    st.lists(st.integers(1, 9), max_size=12),
    st.sampled_from([(1,), (1, 1), (1, 1, 1), (3, 1), (1, 2, 5), (1, 0, 1)]),
)
def test_every_boundary_lies_as_close_as_can_be_to_where_it_would_be_even(
    tokens: list[int], shares: tuple[int, ...]
) -> None:
    runs = image_runs(tokens, shares)
    assert [runs[0][0], runs[-1][1]] == [0, len(tokens)] and all(one[1] == two[0] for one, two in pairwise(runs))
    total, whole = sum(tokens), sum(shares)
    for place in range(1, len(shares)):
        even = total * sum(shares[:place]) / whole
        distances = [abs(sum(tokens[:count]) - even) for count in range(len(tokens) + 1)]
        assert abs(sum(tokens[: runs[place][0]]) - even) == min(distances)
        assert min(distances) <= max(tokens, default=0) / 2
    assert token_runs(tokens, shares) == [(sum(tokens[:start]), sum(tokens[:stop])) for start, stop in runs]


def test_images_alike_are_divided_evenly() -> None:
    assert image_runs([4] * 6, (1, 1, 1)) == [(0, 2), (2, 4), (4, 6)]
    assert image_runs([4] * 3, (1,) * 4) == [(0, 1), (1, 1), (1, 2), (2, 3)], "one has none"
    assert image_runs([], (2, 1)) == [(0, 0), (0, 0)]
