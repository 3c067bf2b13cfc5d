"""What the layers of a module cost on the devices of a stage: what cuts are made from.

Where the kinds of devices of a stage hold different amounts, each kind has its own memory to keep to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipefit.cost.compute.roofline import LayerCost
from pipefit.cost.memory.stage import stage_memory
from pipefit.cost.types import Array

Need = tuple[float, float]
"""(bytes needed, bytes there are)."""


@dataclass(frozen=True, slots=True)
class KindRow:
    """What every layer of a module needs on the devices of one kind: arrays over layers, of one microbatch."""

    saved_bytes: Array
    static_bytes: Array
    passing_bytes: float
    "The largest passing memory of a layer."
    limit_bytes: float
    "Memory of the smallest of these devices, without the workspace."
    part: float
    "Their rows as a part of the most that any device of the stage has."

    def filled_bytes(self, flight: float) -> Array:
        """Bytes of layers 0 to i, for every i from 0 on, with `flight` microbatches in flight."""
        sums: Array = np.concatenate(([0.0], np.cumsum(self.static_bytes + flight * self.saved_bytes)))
        return sums

    def with_less_memory(self, spare_bytes: float) -> KindRow:
        """With less memory: by what a device holds of `spare_bytes` of the fullest one."""
        return replace(self, limit_bytes=self.limit_bytes - self.part * spare_bytes)


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Every layer of a module on the devices of one stage: arrays over layers, of one microbatch."""

    forward_s: Array
    backward_s: Array
    input_s: Array
    "The part of `backward_s` that I does."
    saved_bytes: Array
    static_bytes: Array
    "Parameters, gradients and optimizer state; what an earlier layer shares counts there."
    passing_bytes: float
    "The largest passing memory of a layer."
    limit_bytes: float
    "Memory of the smallest device, without the workspace; where kinds hold different amounts, what the fullest device"
    " may hold at most for all to fit."
    layers: tuple[LayerCost, ...]
    "What the arrays are made of, and the passing memory of every layer."
    kinds: tuple[KindRow, ...] = ()
    "The kinds of devices, where they hold different amounts: each has to keep to its own memory."

    def filled_bytes(self, flight: float) -> Array:
        """Bytes of layers 0 to i, for every i from 0 on, with `flight` microbatches in flight."""
        sums: Array = np.concatenate(([0.0], np.cumsum(self.static_bytes + flight * self.saved_bytes)))
        return sums

    @property
    def memory_rows(self) -> Sequence[LayerRow | KindRow]:
        """What has to fit: every kind, or where all hold the same the row itself."""
        return self.kinds or (self,)

    def with_less_memory(self, spare_bytes: float) -> LayerRow:
        """With so much less memory."""
        kinds = tuple(kind.with_less_memory(spare_bytes) for kind in self.kinds)
        return replace(self, limit_bytes=self.limit_bytes - spare_bytes, kinds=kinds)


def kind_rows(
    costs: Mapping[str, Sequence[LayerCost]], limits: Mapping[str, float], rows: Mapping[str, int]
) -> tuple[KindRow, ...]:
    """Of every kind, from the costs of its layers, its memory and its rows; nothing where all hold the same. Their
    static bytes are left out."""
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
    """The largest passing memory of a layer."""
    return max(max(stage_memory([cost]).passing.values()) for cost in costs)


def most_bytes(kinds: Sequence[KindRow], static_bytes: Array, saved_bytes: Array) -> float:
    """What the fullest device, with these bytes of each layer, may hold at most of any cut for all kinds to fit."""
    least = float("inf")
    for kind in kinds:
        part = min(_least_part(kind.static_bytes, static_bytes), _least_part(kind.saved_bytes, saved_bytes))
        least = min(least, kind.limit_bytes / part if part > 0 else float("inf"))
    return least


def lane_need(
    stages: Sequence[tuple[Sequence[KindRow], int, int]], held: float, fullest: tuple[float, Sequence[float]]
) -> tuple[float, Need]:
    """(limit for what the fullest device needs, need of the kind that is fullest for its own memory) of a lane that
    holds `held` microbatches of its leanest stage. `stages`: the kinds of each, and its first and last layer but one;
    `fullest`: (what stays, what a microbatch keeps of each stage) on the fullest device. All without the workspace."""
    static, saved = fullest
    limit, need = float("inf"), (0.0, float("inf"))
    for kinds in zip(*(stage_kinds for stage_kinds, _, _ in stages), strict=True):
        runs = [(kind, start, stop) for kind, (_, start, stop) in zip(kinds, stages, strict=True)]
        stays = sum(float(kind.static_bytes[start:stop].sum()) for kind, start, stop in runs)
        keeps = [float(kind.saved_bytes[start:stop].sum()) for kind, start, stop in runs]
        has = min(kind.limit_bytes for kind in kinds)
        parts = [kind_saved / full_saved for kind_saved, full_saved in zip(keeps, saved, strict=True) if full_saved > 0]
        part = min(parts, default=1.0)
        limit = min(limit, static + (has - stays) / part if part > 0 else float("inf"))
        mine = (stays + held * min(keeps), has)
        if mine[0] - mine[1] > need[0] - need[1]:
            need = mine
    return limit, need


def stack_rows(rows: Sequence[LayerRow], value: Callable[[LayerRow], Array]) -> Array:
    """[stage][layer]."""
    table = np.empty((len(rows), len(rows[0].forward_s)))
    for row, stages in stages_by_row(rows):
        table[stages] = value(row)
    return table


def stages_by_row(rows: Sequence[LayerRow]) -> Iterator[tuple[LayerRow, list[int]]]:
    """Every row, with the stages that it is the row of."""
    row_stages: dict[int, list[int]] = {}
    for stage, row in enumerate(rows):
        row_stages.setdefault(id(row), []).append(stage)
    return ((rows[stages[0]], stages) for stages in row_stages.values())


def memory_of(rows: Sequence[LayerRow], flights: Sequence[float]) -> Array:
    """[stage][kind][layer]: bytes with what is in flight; where kinds hold the same, one stands for all of them."""
    kind_count, flight_column = max(len(row.memory_rows) for row in rows), np.asarray(flights, dtype=float)[:, None]
    table = np.empty((len(rows), kind_count, len(rows[0].forward_s)))
    for row, stages in stages_by_row(rows):
        for kind in range(kind_count):
            kind_row = row.memory_rows[kind if kind < len(row.memory_rows) else 0]
            table[stages, kind] = kind_row.static_bytes + flight_column[stages] * kind_row.saved_bytes
    return table


def limits_of(rows: Sequence[LayerRow], turns: Sequence[int], passing: bool = False) -> Array:
    """[stage][kind], as `memory_of` has them: its equal part of its lane's memory; without what passes, if asked
    for."""
    kind_count = max(len(row.memory_rows) for row in rows)
    table = np.empty((len(rows), kind_count))
    for row, stages in stages_by_row(rows):
        kind_limits = [kind_row.limit_bytes - passing * kind_row.passing_bytes for kind_row in row.memory_rows]
        table[stages] = [*kind_limits, *kind_limits[:1] * (kind_count - len(kind_limits))]
    table /= np.asarray(turns)[:, None]
    return table


def scale_need(need_bytes: float, limit_bytes: float, other_bytes: float) -> float:
    """What fills the other limit as much as the need fills its own."""
    return need_bytes if limit_bytes == other_bytes else need_bytes / limit_bytes * other_bytes


def _least_part(own: Array, whole: Array) -> float:
    nonzero = whole > 0
    return float((own[nonzero] / whole[nonzero]).min(initial=1.0))
