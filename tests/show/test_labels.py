"""Names in a drawing cover neither each other nor the points: checked on the geometry of what is drawn."""

from __future__ import annotations

import itertools
import re

import pytest

from pipefit.plan.types import TradePoint
from pipefit.show.labels import CHARACTER, DROP, HEIGHT, Rectangle, boxes_overlap, place_labels
from pipefit.show.sections_trade import LEFT, RIGHT, WIDTH, _trade_drawing

FAMILIES = ("1f1b", "1f1b-v", "interleaved-1f1b", "v-half", "v-min", "v-zb", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")


def crowd(count: int, spread: float) -> list[TradePoint]:
    """Ever faster families whose figures lie close together; the last one is the plan."""
    return [
        TradePoint(
            schedule=FAMILIES[index % len(FAMILIES)],
            recompute="none",
            memory_bytes=40e9 * (1 + spread * index),
            step_s=2.0 * (1 - spread * index),
            chosen=index == count - 1,
        )
        for index in range(count)
    ]


def text_boxes(drawing: str) -> dict[str, Rectangle]:
    """What the names in a drawing cover, read off the drawing itself."""
    found = {}
    pattern = r'<text x="([-\d.]+)" y="([-\d.]+)"( text-anchor="end")? class="trade-[a-z]+">([^<]+)'
    for x, y, anchor, name in re.findall(pattern, drawing):
        width = CHARACTER * len(name)
        left = float(x) - (width if anchor else 0)
        found[name] = (left, float(y) - HEIGHT + DROP, left + width, float(y) + DROP)
    return found


@pytest.mark.parametrize("spread", [0.03, 0.01, 0.002, 0.0])
def test_names_of_crowded_points_do_not_overlap(spread: float) -> None:
    points = crowd(len(FAMILIES), spread)
    boxes = text_boxes(_trade_drawing(points, 41e9))
    assert {"this plan", "a device"} <= boxes.keys()
    assert len(boxes) == (len(FAMILIES) + 1 if spread else 3), "every family that leads has its name"
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        assert not boxes_overlap(a, b), (one, other)
    for left, _, right, _ in boxes.values():
        assert left >= LEFT - 60 and right <= WIDTH - RIGHT + 1


def test_names_do_not_cover_points() -> None:
    points = [(100.0 + 6 * n, 100.0 + 3 * n) for n in range(12)]
    labels = place_labels(points, [f"name{n}" for n in range(12)], (0, 0, 400, 300), [])
    assert sum(label is not None for label in labels) == 12
    for label in labels:
        assert label is not None
        for x, y in points:
            assert not boxes_overlap(label.covered_box, (x - 5, y - 5, x + 5, y + 5))


def test_a_name_without_a_free_place_is_left_out() -> None:
    assert place_labels([(50, 50)], ["x"], (0, 0, 100, 100), [(0, 0, 100, 100)]) == [None]
    assert place_labels([(50, 50)], [""], (0, 0, 100, 100), []) == [None]
