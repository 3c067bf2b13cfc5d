"""The costs of one stage, microbatch and slice, and the tables of actions that they make up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipefit.cost.types import ActionTable, Array


class StageCost(NamedTuple):
    """Of one stage, microbatch and slice: the worst over its devices."""

    forward_s: float
    input_s: float
    weight_s: float
    backward_s: float
    "Fused."
    saved_bytes: float
    pending_bytes: float
    forward_passing_bytes: float
    input_passing_bytes: float
    fused_passing_bytes: float
    weight_passing_bytes: float
    owed_bytes: float
    "To the keys and values of earlier slices, when the backward is over."


def worst_stage(each: Iterable[StageCost]) -> StageCost:
    """The largest of everything."""
    return StageCost(*(max(column) for column in zip(*each, strict=True)))


def action_tables(costs: Sequence[Sequence[StageCost]], microbatches: int = 1) -> Mapping[str, ActionTable]:
    """Tables of stages with an entry for each slice; or, for several `microbatches` that differ, for each of these, or
    one that holds for all."""

    def field_array(value: Callable[[StageCost], float]) -> Array:
        return _cost_array(costs, value, microbatches)

    return {
        "F": ActionTable(
            time_s=field_array(lambda c: c.forward_s),
            held_bytes=field_array(lambda c: c.saved_bytes),
            peak_bytes=field_array(lambda c: c.forward_passing_bytes),
        ),
        "I": ActionTable(
            time_s=field_array(lambda c: c.input_s),
            held_bytes=field_array(lambda c: c.pending_bytes - c.saved_bytes),
            peak_bytes=field_array(lambda c: c.input_passing_bytes),
        ),
        "W": ActionTable(
            time_s=field_array(lambda c: c.weight_s),
            held_bytes=field_array(lambda c: -c.pending_bytes),
            peak_bytes=field_array(lambda c: c.weight_passing_bytes),
        ),
        "B": ActionTable(
            time_s=field_array(lambda c: c.backward_s),
            held_bytes=field_array(lambda c: -c.saved_bytes),
            peak_bytes=field_array(lambda c: c.fused_passing_bytes),
        ),
    }


def kv_gradient_table(costs: Sequence[Sequence[StageCost]], microbatches: int = 1) -> Array:
    """`CostTable.owed_bytes`; arguments as of `action_tables`."""
    return _cost_array(costs, lambda cost: cost.owed_bytes, microbatches)


def _cost_array(costs: Sequence[Sequence[StageCost]], value: Callable[[StageCost], float], microbatches: int) -> Array:
    if microbatches == 1:
        return np.array([[[value(cost) for cost in row]] for row in costs], dtype=np.float64)
    rows = [row if len(row) == microbatches else [row[0]] * microbatches for row in costs]
    return np.array([[[value(cost)] for cost in row] for row in rows], dtype=np.float64)
