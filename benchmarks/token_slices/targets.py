"""What a section of the proof of token slices wants, and whether it got it."""

from __future__ import annotations

from typing import Any


def at_least(what: str, reached: float, wanted: float) -> dict[str, Any]:
    """A figure that may not be below `wanted`."""
    return {"what": what, "reached": reached, "wanted": wanted, "sign": ">=", "met": reached >= wanted}


def at_most(what: str, reached: float, wanted: float) -> dict[str, Any]:
    """A figure that may not be above `wanted`."""
    return {"what": what, "reached": reached, "wanted": wanted, "sign": "<=", "met": reached <= wanted}
