"""The published adaptive search in `benchmarks/schedules/adaptive.py` finds what the authors' program finds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.schedules.adaptive import LONGEST_HOP, Means, blocks, search
from pipefit.cost.types import CostTable
from pipefit.schedule import check_schedule, uniform_costs, vee_placement
from pipefit.simulate import simulate_schedule

PUBLISHED = json.loads((Path(__file__).parent / "adaptive_published.json").read_text())


@pytest.mark.parametrize("row", PUBLISHED["rows"], ids=str)
def test_it_finds_what_the_program_finds(row: list[float]) -> None:
    devices, microbatches, cap, *times, span_s = row
    found = search(devices, microbatches, cap, Means(*times))
    assert (found and found.span_s) == span_s
    if found:
        check_schedule(found.schedule)
        assert found.peak <= cap


REFERENCE = [
    (4, 8, 1.0, {4: 31.7, 5: 28.3, 6: 17.2, 7: 13.9, 8: 9.0}),
    (4, 8, 1.5, {5: 19.9, 6: 9.1, 8: 3.9}),
    (8, 16, 1.0, {8: 32.2, 10: 22.9}),
    (8, 16, 1.5, {8: 18.8, 10: 15.7, 12: 10.7}),
]
"""devices, microbatches, factor of the last stage, cap -> per cent of bubble: measured with the authors' program, which
was given 28, 28, 20 and 4 and replayed with the true times."""


@pytest.mark.parametrize(("devices", "microbatches", "last", "bubbles"), REFERENCE)
def test_the_measured_table(devices: int, microbatches: int, last: float, bubbles: dict[int, float]) -> None:
    costs = slow_last(devices, last)
    for cap, wanted in bubbles.items():
        found = search(devices, microbatches, cap, Means(28, 28, 20, 4))
        assert found is not None
        timeline = simulate_schedule(found.schedule, costs)
        assert max(timeline.peak_bytes) == found.peak <= cap
        spans = [stop[-1] - start[0] for start, stop in zip(timeline.starts_s, timeline.stops_s, strict=True)]
        if last == 1.0:
            assert max(spans) == found.span_s
        assert round(100 * (1 - max(timeline.busy_s) / max(spans)), 1) == wanted


def slow_last(devices: int, last: float) -> CostTable:
    factors = [1.0] * (2 * devices - 1) + [last]
    forward_s, weight_s = ([time_s * factor for factor in factors] for time_s in (28, 20))
    return uniform_costs(
        vee_placement(devices), forward_s=forward_s, input_s=forward_s, weight_s=weight_s, transfer_s=4
    )


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_the_blocks_are_the_described_ones(devices: int) -> None:
    """Without collisions, each once; hops of up to five slots away from lane 0, at most one change, and of one back."""
    found = list(blocks(devices))
    assert len(set(found)) == len(found)
    for block in found:
        assert not block.find_collisions()
        away = np.diff(block.forward[:devices])
        assert (np.diff(block.backward[devices:][::-1]) == away).all()
        assert (np.diff(block.forward[devices:]) == 1).all() and (np.diff(block.backward[:devices]) == -1).all()
        assert set(away) <= set(range(1, LONGEST_HOP + 1)) and (np.diff(away) <= 0).all()
        assert np.count_nonzero(np.diff(away)) <= 1


def test_no_block_fits_below_a_third() -> None:
    assert search(6, 12, 5, Means(1, 1, 1, 0)) is None
    least = search(6, 12, 6, Means(1, 1, 1, 0))
    assert least is not None and least.peak == 6
