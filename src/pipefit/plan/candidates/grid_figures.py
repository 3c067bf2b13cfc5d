"""Data of the lower bounds of grids (`plan/candidates/grid_bounds.py`): costs of all layers on lanes of some classes.

The arrays cover the counts of microbatches and the kinds of recomputation of many grids at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipefit.cost.types import Array
from pipefit.plan.candidates.grid import CandidateGrid
from pipefit.schedule.families import family_facts


@dataclass(frozen=True, slots=True)
class LayerBounds:
    """All layers of a microbatch on lanes of some classes: seconds, and the inputs of an even cut."""

    forward_s: float
    "Sum over the layers of their fastest class."
    backward_s: float
    largest_s: float
    "The slowest layer on its fastest class."
    even: Array
    """[both, forward, backward]: sum over the layers of the smallest, over the classes, of their part of the class's
    time."""
    rates: Array
    "[both, forward, backward][class]: 1 / seconds of all layers."
    saved_bytes: float
    "All layers, on the class with the smallest sum."
    limit_bytes: Array
    "[class]."
    layer_saved_bytes: Array
    "[layer]: on the first class."
    first_share: float = 1.0
    "Smallest part of a layer's time that its first slice takes."


@dataclass(frozen=True, slots=True)
class BoundsStack:
    """The `LayerBounds` of every count of microbatches and kind of recomputation on lanes of the same classes.

    The last two dimensions are [microbatches, recomputation]; the dimensions of a field precede them.
    """

    forward_s: Array
    backward_s: Array
    largest_s: Array
    even: Array
    "[both, forward, backward]."
    rates: Array
    "[both, forward, backward][class]."
    saved_bytes: Array
    limit_bytes: Array
    "[class]."
    layer_saved_bytes: Array
    "[microbatches, recomputation, layer]: on the first class."
    first_share: Array


@dataclass(frozen=True, slots=True)
class GridBounds:
    """Bounds of grids that differ only in their lanes: [grid, microbatches, recomputation], or arrays that broadcast to
    it."""

    grids: tuple[CandidateGrid, ...]
    stack: BoundsStack
    lane_s: Array
    "Time of the busiest lane of an even cut."
    lane_forward_s: Array
    lane_backward_s: Array
    layer_static_bytes: Array
    "[microbatches, 1, sharded state, layer]."
    lanes: Array
    "[grid, class]: number of lanes."
    turns: Array
    "[grid, 1, 1]: largest number of stages on a lane."
    count: Array
    "[microbatches, 1]."
    slices: Array
    "[microbatches, 1]: number of slices."

    @property
    def static_bytes(self) -> Array:
        """[microbatches, 1, sharded state]: of all layers."""
        total_bytes: Array = self.layer_static_bytes.sum(axis=-1)
        return total_bytes

    @property
    def is_uniform(self) -> bool:
        """True if all lanes of a grid are of one class."""
        return bool(self.lanes.shape[1] == 1)

    @property
    def is_fused(self) -> bool:
        """True if every backward of the schedules is a B."""
        return family_facts(self.grids[0].names[0]).fused

    @property
    def lane_count(self) -> Array:
        """[grid, 1, 1]: number of lanes."""
        lanes: Array = self.lanes.sum(axis=1)[:, None, None]
        return lanes

    @property
    def memory_bytes(self) -> Array:
        """[grid]: sum over the lanes of the memory of one device of each."""
        limit_bytes: Array = (self.lanes * self.stack.limit_bytes).sum(axis=1)
        return limit_bytes


def stack_bounds(floors: Sequence[Sequence[LayerBounds]]) -> BoundsStack:
    """Return the bounds [microbatches][recomputation] as arrays."""

    def stack_field(value: Callable[[LayerBounds], Any]) -> Array:
        """Return one field as an array whose dimensions over classes come first."""
        values = np.array([[value(floor) for floor in line] for line in floors], dtype=float)
        return np.moveaxis(values, (0, 1), (-2, -1))

    return BoundsStack(
        forward_s=stack_field(lambda floor: floor.forward_s),
        backward_s=stack_field(lambda floor: floor.backward_s),
        largest_s=stack_field(lambda floor: floor.largest_s),
        even=stack_field(lambda floor: floor.even),
        rates=stack_field(lambda floor: floor.rates),
        saved_bytes=stack_field(lambda floor: floor.saved_bytes),
        limit_bytes=floors[0][0].limit_bytes,
        layer_saved_bytes=np.array([[floor.layer_saved_bytes for floor in line] for line in floors]),
        first_share=stack_field(lambda floor: floor.first_share),
    )


def fill_lanes(floor: GridBounds, whole_bytes: Array) -> tuple[Array, Array]:
    """Return (seconds of the busiest lane, missing memory as a fraction of the memory).

    `whole_bytes` is the memory all layers need. Every lane takes layers in proportion to its speed, up to its memory;
    the lanes with memory left take the rest.
    """
    lane_s = floor.lane_s[:, None, :, :, None]
    if floor.is_uniform:
        lack = np.maximum(0.0, whole_bytes / floor.memory_bytes[:, None, None, None, None] - 1.0)
        return np.broadcast_to(lane_s, lack.shape), lack
    lanes = floor.lanes.T[:, :, None, None, None, None]
    limits = floor.stack.limit_bytes[:, None, None, None, None, None]
    rates = floor.stack.rates[0][:, None, None, :, :, None]
    limit_parts = limits / whole_bytes
    lack = np.maximum(0.0, 1.0 / (lanes * limit_parts).sum(axis=0) - 1.0)
    limit_parts = limit_parts * (1.0 + lack) * (1.0 + 1e-9)
    full = np.zeros(limit_parts.shape, dtype=bool)
    time_s = lane_s + np.zeros(whole_bytes.shape)
    for _ in range(floor.lanes.shape[1] - 1):
        full |= rates * time_s > limit_parts
        if not full.any():
            break
        left = 1.0 - (lanes * limit_parts * full).sum(axis=0)
        speed = (lanes * rates * ~full).sum(axis=0)
        time_s = np.where(speed > 0, np.maximum(time_s, left / np.where(speed > 0, speed, 1.0)), time_s)
    return time_s, lack
