"""Costs of the layers of a module on the devices of a stage, the input of all cuts.

If the device kinds of a stage hold different amounts, each kind has its memory limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np

from pipefit.cost.compute.roofline import LayerCost
from pipefit.cost.memory.stage import stage_memory
from pipefit.cost.types import Array

Need = tuple[float, float]
"""(bytes needed, bytes available)."""


@dataclass(frozen=True, slots=True)
class KindRow:
    """Memory of every layer of a module on the devices of one kind: arrays over layers, of one microbatch."""

    saved_bytes: Array
    static_bytes: Array
    passing_bytes: float
    "The largest temporary memory of a layer."
    limit_bytes: float
    "Memory of the smallest of these devices, without the workspace."
    part: float
    "Their rows relative to the most rows of any device of the stage."

    def filled_bytes(self, flight: float) -> Array:
        """Return the bytes of the first i layers, for i from 0 on, with `flight` microbatches in flight."""
        sums: Array = np.concatenate(([0.0], np.cumsum(self.static_bytes + flight * self.saved_bytes)))
        return sums

    def with_less_memory(self, spare_bytes: float) -> KindRow:
        """Return the row with a smaller limit: reduced by this kind's share of `spare_bytes` on the fullest device."""
        return replace(self, limit_bytes=self.limit_bytes - self.part * spare_bytes)


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Costs of every layer of a module on the devices of one stage: arrays over layers, of one microbatch."""

    forward_s: Array
    backward_s: Array
    input_s: Array
    "The part of `backward_s` spent in I."
    saved_bytes: Array
    pending_bytes: Array
    "Kept from I to W."
    static_bytes: Array
    "Parameters, gradients and optimizer state; a shared parameter counts at its first layer."
    passing_bytes: float
    "The largest temporary memory of a layer."
    limit_bytes: float
    """Memory of the smallest device, without the workspace. If kinds hold different amounts, the largest memory of the
    fullest device with which all fit."""
    layers: tuple[LayerCost, ...]
    "The costs behind the arrays, with the temporary memory of every layer."
    kinds: tuple[KindRow, ...] = ()
    "The device kinds, if they hold different amounts: each has its memory limit."

    def filled_bytes(self, flight: float) -> Array:
        """Return the bytes of the first i layers, for i from 0 on, with `flight` microbatches in flight."""
        sums: Array = np.concatenate(([0.0], np.cumsum(self.static_bytes + flight * self.saved_bytes)))
        return sums

    @property
    def memory_rows(self) -> Sequence[LayerRow | KindRow]:
        """The rows that have to fit: every kind, or the row itself if all kinds hold the same."""
        return self.kinds or (self,)

    def with_less_memory(self, spare_bytes: float) -> LayerRow:
        """Return the row with this much less memory."""
        kinds = tuple(kind.with_less_memory(spare_bytes) for kind in self.kinds)
        return replace(self, limit_bytes=self.limit_bytes - spare_bytes, kinds=kinds)


def kind_rows(
    costs: Mapping[str, Sequence[LayerCost]], limits: Mapping[str, float], rows: Mapping[str, int]
) -> tuple[KindRow, ...]:
    """Return the row of every kind, from its layer costs, memory and rows, without static bytes; empty if all hold the
    same."""
    rows_by_kind = [
        KindRow(
            saved_bytes=np.array([cost.saved_bytes for cost in layer_costs]),
            static_bytes=np.zeros(len(layer_costs)),
            passing_bytes=passing_bytes(layer_costs),
            limit_bytes=limits[kind],
            part=rows[kind] / max(rows.values()),
        )
        for kind, layer_costs in sorted(costs.items())
        if kind
    ]
    return () if len({row.saved_bytes.tobytes() for row in rows_by_kind}) == 1 else tuple(rows_by_kind)


def passing_bytes(costs: Sequence[LayerCost]) -> float:
    """Return the largest temporary memory of a layer."""
    distinct = {id(cost): cost for cost in costs}
    return max(max(stage_memory([cost]).passing.values()) for cost in distinct.values())


def most_bytes(kinds: Sequence[KindRow], static_bytes: Array, saved_bytes: Array) -> float:
    """Return the largest memory of the fullest device, with these bytes per layer, at which all kinds fit with any
    cut."""
    least = float("inf")
    for kind in kinds:
        part = min(_least_part(kind.static_bytes, static_bytes), _least_part(kind.saved_bytes, saved_bytes))
        least = min(least, kind.limit_bytes / part if part > 0 else float("inf"))
    return least


def lane_need(
    stages: Sequence[tuple[Sequence[KindRow], int, int]], held: float, fullest: tuple[float, Sequence[float]]
) -> tuple[float, Need]:
    """Return (limit of the fullest device's memory, need of the kind that is fullest relative to its memory) of a lane.

    The lane holds `held` microbatches of its leanest stage, and at least one of every stage. `stages` has the kinds of
    each stage and its half-open range of layers. `fullest` is (static memory, memory kept by a microbatch on each
    stage) on the fullest device. All without the workspace.
    """
    static, saved = fullest
    limit, need = float("inf"), (0.0, float("inf"))
    for kinds in zip(*(stage_kinds for stage_kinds, _, _ in stages), strict=True):
        runs = [(kind, start, stop) for kind, (_, start, stop) in zip(kinds, stages, strict=True)]
        stays = fsum(float(kind.static_bytes[start:stop].sum()) for kind, start, stop in runs)
        keeps = [float(kind.saved_bytes[start:stop].sum()) for kind, start, stop in runs]
        has = min(kind.limit_bytes for kind in kinds)
        parts = [kind_saved / full_saved for kind_saved, full_saved in zip(keeps, saved, strict=True) if full_saved > 0]
        part = min(parts, default=1.0)
        limit = min(limit, static + (has - stays) / part if part > 0 else float("inf"))
        mine = (stays + max(held * min(keeps), fsum(keeps)), has)
        if mine[0] - mine[1] > need[0] - need[1]:
            need = mine
    return limit, need


def stack_rows(rows: Sequence[LayerRow], value: Callable[[LayerRow], Array]) -> Array:
    """Return [stage][layer]."""
    table = np.empty((len(rows), len(rows[0].forward_s)))
    for row, stages in stages_by_row(rows):
        table[_index_of(stages, rows)] = value(row)
    return table


def _index_of(stages: list[int], rows: Sequence[LayerRow]) -> list[int] | slice:
    """Return the index of these stages in a table of all; of all of them, one that numpy takes at once."""
    return slice(None) if len(stages) == len(rows) else stages


def stages_by_row(rows: Sequence[LayerRow]) -> list[tuple[LayerRow, list[int]]]:
    """Return every distinct row with its stages."""
    row_stages: dict[int, list[int]] = {}
    for stage, row in enumerate(rows):
        row_stages.setdefault(id(row), []).append(stage)
    return [(rows[stages[0]], stages) for stages in row_stages.values()]


def memory_of(rows: Sequence[LayerRow], flights: Sequence[float]) -> Array:
    """Return [stage][kind][layer]: bytes with the microbatches in flight. If all kinds hold the same, one stands for
    all."""
    kind_count, flight_column = max(len(row.memory_rows) for row in rows), np.asarray(flights, dtype=float)[:, None]
    table = np.empty((len(rows), kind_count, len(rows[0].forward_s)))
    for row, stages in stages_by_row(rows):
        index = _index_of(stages, rows)
        for kind in range(kind_count):
            kind_row = row.memory_rows[kind if kind < len(row.memory_rows) else 0]
            table[index, kind] = kind_row.static_bytes + flight_column[index] * kind_row.saved_bytes
    return table


def limits_of(rows: Sequence[LayerRow], turns: Sequence[int], passing: bool = False) -> Array:
    """Return [stage][kind], as in `memory_of`: an equal part of the lane's memory; with `passing`, less temporary
    memory."""
    kind_count = max(len(row.memory_rows) for row in rows)
    table = np.empty((len(rows), kind_count))
    for row, stages in stages_by_row(rows):
        kind_limits = [kind_row.limit_bytes - passing * kind_row.passing_bytes for kind_row in row.memory_rows]
        table[_index_of(stages, rows)] = [*kind_limits, *kind_limits[:1] * (kind_count - len(kind_limits))]
    table /= np.asarray(turns)[:, None]
    return table


def scale_need(need_bytes: float, limit_bytes: float, other_bytes: float) -> float:
    """Return the need rescaled to another limit, with the same filled share."""
    return need_bytes if limit_bytes == other_bytes else need_bytes / limit_bytes * other_bytes


def _least_part(own: Array, whole: Array) -> float:
    nonzero = whole > 0
    return float((own[nonzero] / whole[nonzero]).min(initial=1.0))
