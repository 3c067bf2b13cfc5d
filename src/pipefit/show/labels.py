"""Placement of labels beside the points of a drawing, without overlap of labels or points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHARACTER, HEIGHT, DROP = 7.0, 13.0, 3.0
"""Metrics of a line of text at 12 units: largest width of a character, height, and depth below the baseline."""

Rectangle = tuple[float, float, float, float]
"""(left, top, right, bottom)."""


@dataclass(frozen=True, slots=True)
class PlacedLabel:
    """A label and the left end of its baseline."""

    text: str
    x: float
    y: float
    apart: bool
    "True if the label is so far from its point that a line must join them."

    @property
    def covered_box(self) -> Rectangle:
        """Return the box that the label covers."""
        return (self.x, self.y - HEIGHT + DROP, self.x + CHARACTER * len(self.text), self.y + DROP)


def place_labels(
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    frame: Rectangle,
    taken: Sequence[Rectangle],
    radius: float = 10.0,
) -> list[PlacedLabel | None]:
    """Place a label for every point with a name, in order of priority. Returns None for points without a name or
    without free space nearby. `taken` boxes are already covered; points keep `radius` around them free."""
    covered = [*taken, *((x - radius / 2, y - radius / 2, x + radius / 2, y + radius / 2) for x, y in points)]
    labels: list[PlacedLabel | None] = []
    for (x, y), name in zip(points, names, strict=True):
        free = (
            (
                candidate
                for candidate in _label_places(x, y, name, radius)
                if _fits_frame(candidate.covered_box, frame, covered)
            )
            if name
            else iter(())
        )
        label = next(free, None)
        labels.append(label)
        if label is not None:
            covered.append(label.covered_box)
    return labels


def boxes_overlap(one: Rectangle, other: Rectangle) -> bool:
    """Return True if two boxes overlap."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _label_places(x: float, y: float, name: str, radius: float) -> list[PlacedLabel]:
    """Return the candidate positions of a label, best first: next to the point, then further away on a line."""
    width = CHARACTER * len(name)
    rows = [-0.6, 1.3, 0.4]
    near = [(x + radius + 1, y + row * radius) for row in rows]
    near += [(x - radius - 1 - width, y + row * radius) for row in rows]
    near += [(x - width / 2, y - 1.2 * radius), (x - width / 2, y + 2.2 * radius)]
    far = [
        (left, y + side * step * HEIGHT)
        for step in (2, 3, 4, 5, 6)
        for side in (-1, 1)
        for left in (x + radius + 1, x - radius - 1 - width)
    ]
    return [
        *(PlacedLabel(name, *position, apart=False) for position in near),
        *(PlacedLabel(name, *position, apart=True) for position in far),
    ]


def _fits_frame(box: Rectangle, frame: Rectangle, covered: Sequence[Rectangle]) -> bool:
    inside = frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]
    return inside and not any(boxes_overlap(box, obstacle) for obstacle in covered)
