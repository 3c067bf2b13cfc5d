"""The costs of one stage, microbatch and slice, and action tables made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipefit.cost.types import ActionTable, Array


class StageCost(NamedTuple):
    """The cost of one stage, microbatch and slice: the worst over its devices."""

    forward_s: float
    input_s: float
    weight_s: float
    backward_s: float
    "Fused backward."
    saved_bytes: float
    pending_bytes: float
    forward_passing_bytes: float
    input_passing_bytes: float
    fused_passing_bytes: float
    weight_passing_bytes: float
    kv_gradient_bytes: float
    "Gradients for the keys and values of earlier slices, after the backward."


def worst_stage(each: Iterable[StageCost]) -> StageCost:
    """Return the largest value of every field."""
    return StageCost(*(max(column) for column in zip(*each, strict=True)))


def action_tables(costs: Sequence[Sequence[StageCost]], microbatches: int = 1) -> Mapping[str, ActionTable]:
    """Return the action tables of stages with one entry per slice.

    If several `microbatches` differ, each stage has one entry per microbatch, or one entry for all.
    """

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
    """Return `CostTable.kv_gradient_bytes`; the arguments are those of `action_tables`."""
    return _cost_array(costs, lambda cost: cost.kv_gradient_bytes, microbatches)


def _cost_array(costs: Sequence[Sequence[StageCost]], value: Callable[[StageCost], float], microbatches: int) -> Array:
    if microbatches == 1:
        return np.array([[[value(cost) for cost in row]] for row in costs], dtype=np.float64)
    rows = [row if len(row) == microbatches else [row[0]] * microbatches for row in costs]
    return np.array([[[value(cost)] for cost in row] for row in rows], dtype=np.float64)
