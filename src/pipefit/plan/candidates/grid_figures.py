"""What the floors of panels are made of (`plan/candidates/grid_bounds.py`): figures of all layers on lanes of some
classes, as arrays over the counts of microbatches and the ways of recomputing of many panels at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipefit.cost.types import Array
from pipefit.plan.bounds.step_bounds import schedule_facts
from pipefit.plan.candidates.grid import CandidateGrid


@dataclass(frozen=True, slots=True)
class LayerBounds:
    """All layers of a microbatch on lanes of some classes: seconds, and what an even cut needs."""

    forward_s: float
    "Every layer where it is fastest."
    backward_s: float
    largest_s: float
    "The slowest layer where it is fastest."
    even: Array
    "[whole, forward, backward]: the sum over the layers of the least of their times, as parts of the class's own."
    rates: Array
    "[whole, forward, backward][class]: 1 / seconds of all layers."
    saved_bytes: float
    "All layers, where it is least."
    limit_bytes: Array
    "[class]."
    first_share: float = 1.0
    "The least part of a layer's time that its first slice takes."


@dataclass(frozen=True, slots=True)
class BoundsStack:
    """The floors of every count of microbatches and way of recomputing on lanes of the same classes:
    [microbatches, recomputation], and what comes before."""

    forward_s: Array
    backward_s: Array
    largest_s: Array
    even: Array
    "[whole, forward, backward]."
    rates: Array
    "[whole, forward, backward][class]."
    saved_bytes: Array
    limit_bytes: Array
    "[class]."
    first_share: Array


@dataclass(frozen=True, slots=True)
class GridBounds:
    """Of panels that differ in nothing but their lanes: [panel, microbatches, recomputation], and what broadcasts to
    it."""

    panels: tuple[CandidateGrid, ...]
    stack: BoundsStack
    lane_s: Array
    "The busiest lane of an even cut."
    lane_forward_s: Array
    lane_backward_s: Array
    static_bytes: Array
    "[microbatches, 1, ZeRO-1]: of all layers."
    lanes: Array
    "[panel, class]: how many lanes there are."
    turns: Array
    "[panel, 1, 1]: stages of a lane, at most."
    count: Array
    "[microbatches, 1]."
    slices: Array
    "[microbatches, 1]: how many slices."

    @property
    def is_uniform(self) -> bool:
        """Whether all lanes of a panel are of one class."""
        return bool(self.lanes.shape[1] == 1)

    @property
    def is_fused(self) -> bool:
        """Whether every backward of their schedules is a B."""
        return schedule_facts(self.panels[0].names[0]).fused

    @property
    def lane_count(self) -> Array:
        """[panel, 1, 1]: how many lanes there are."""
        lanes: Array = self.lanes.sum(axis=1)[:, None, None]
        return lanes

    @property
    def memory_bytes(self) -> Array:
        """[panel]: of one device of every lane."""
        whole: Array = self.lanes @ self.stack.limit_bytes
        return whole


def stack_bounds(floors: Sequence[Sequence[LayerBounds]]) -> BoundsStack:
    """The floors [microbatches][recomputation] as arrays."""

    def stack_field(value: Callable[[LayerBounds], Any]) -> Array:
        """What is told of classes comes first."""
        each = np.array([[value(floor) for floor in line] for line in floors], dtype=float)
        return np.moveaxis(each, (0, 1), (-2, -1))

    return BoundsStack(
        forward_s=stack_field(lambda floor: floor.forward_s),
        backward_s=stack_field(lambda floor: floor.backward_s),
        largest_s=stack_field(lambda floor: floor.largest_s),
        even=stack_field(lambda floor: floor.even),
        rates=stack_field(lambda floor: floor.rates),
        saved_bytes=stack_field(lambda floor: floor.saved_bytes),
        limit_bytes=floors[0][0].limit_bytes,
        first_share=stack_field(lambda floor: floor.first_share),
    )


def fill_lanes(floor: GridBounds, whole_bytes: Array) -> tuple[Array, Array]:
    """(seconds of the busiest lane, what the memory lacks as a part of itself), where `whole_bytes` is what all layers
    need: every lane takes layers by its speed, up to its memory, and the others take what is left over."""
    lane_s = floor.lane_s[:, None, :, :, None]
    if floor.is_uniform:
        lack = np.maximum(0.0, whole_bytes / floor.memory_bytes[:, None, None, None, None] - 1.0)
        return np.broadcast_to(lane_s, lack.shape), lack
    lanes = floor.lanes.T[:, :, None, None, None, None]
    limits = floor.stack.limit_bytes[:, None, None, None, None, None]
    rates = floor.stack.rates[0][:, None, None, :, :, None]
    most = limits / whole_bytes
    lack = np.maximum(0.0, 1.0 / (lanes * most).sum(axis=0) - 1.0)
    most = most * (1.0 + lack) * (1.0 + 1e-9)
    full = np.zeros(most.shape, dtype=bool)
    time_s = lane_s + np.zeros(whole_bytes.shape)
    for _ in range(floor.lanes.shape[1] - 1):
        full |= rates * time_s > most
        if not full.any():
            break
        left = 1.0 - (lanes * most * full).sum(axis=0)
        speed = (lanes * rates * ~full).sum(axis=0)
        time_s = np.where(speed > 0, np.maximum(time_s, left / np.where(speed > 0, speed, 1.0)), time_s)
    return time_s, lack
