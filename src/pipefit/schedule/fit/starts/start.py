"""The record that the parts of the search exchange."""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.schedule.fit.instance import Ints


@dataclass(frozen=True, slots=True)
class TimedOrders:
    """Orders that fit in memory, with their time."""

    time_s: float
    name: str
    orders: list[Ints]
