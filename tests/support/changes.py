"""Changes of the data of a plan or a cluster, for tests that break a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any]], None]


def put(*path: object, value: object) -> Change:
    """Set what stands at this path of keys and indices."""

    def change(data: dict[str, Any]) -> None:
        place: Any = data
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change
