"""Names beside the points of a drawing, where they cover neither each other nor the points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHARACTER, HEIGHT, DROP = 7.0, 13.0, 3.0
"""Of a line of text at 12 units: width of a character at most, height, and how far it goes below its base line."""

Box = tuple[float, float, float, float]
"""(left, top, right, bottom)."""


@dataclass(frozen=True, slots=True)
class PlacedLabel:
    """A name and where its text begins: the left end of its base line."""

    text: str
    x: float
    y: float
    apart: bool
    "Whether it stands so far from its point that a line must join them."

    @property
    def covered_box(self) -> Box:
        """What it covers."""
        return (self.x, self.y - HEIGHT + DROP, self.x + CHARACTER * len(self.text), self.y + DROP)


def place_labels(
    points: Sequence[tuple[float, float]], names: Sequence[str], frame: Box, taken: Sequence[Box], radius: float = 10.0
) -> list[PlacedLabel | None]:
    """A label for every point with a name, the first ones first; None for points without a name, and for those that
    have no free place near them. `taken` is covered by something else; points keep `radius` around them free."""
    covered = [*taken, *((x - radius / 2, y - radius / 2, x + radius / 2, y + radius / 2) for x, y in points)]
    found: list[PlacedLabel | None] = []
    for (x, y), name in zip(points, names, strict=True):
        free = (
            (one for one in _label_places(x, y, name, radius) if _fits_frame(one.covered_box, frame, covered))
            if name
            else iter(())
        )
        label = next(free, None)
        found.append(label)
        if label is not None:
            covered.append(label.covered_box)
    return found


def boxes_overlap(one: Box, other: Box) -> bool:
    """Whether two boxes have something in common."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _label_places(x: float, y: float, name: str, radius: float) -> list[PlacedLabel]:
    """Where a name may stand, the best place first: close by, then further away on a line."""
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
        *(PlacedLabel(name, *place, apart=False) for place in near),
        *(PlacedLabel(name, *place, apart=True) for place in far),
    ]


def _fits_frame(box: Box, frame: Box, covered: Sequence[Box]) -> bool:
    inside = frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]
    return inside and not any(boxes_overlap(box, other) for other in covered)
