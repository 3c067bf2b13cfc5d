"""The question that every source of layer costs answers: one layer, one microbatch and slice, one device."""

from __future__ import annotations

from typing import NamedTuple

from pipefit.cluster.types import DeviceKind
from pipefit.cost.compute.operator_times import SILENT, CollectiveTime, free_collective
from pipefit.model.analysis.saved import Recompute
from pipefit.model.graph import Graph
from pipefit.precision import Precision


class MicrobatchShape(NamedTuple):
    """The sizes of one microbatch and slice on one device."""

    rows: int
    "Symbol B."
    tokens: int
    "Symbol T: of the slice."
    past: int
    "Symbol P: tokens of earlier slices, to which attention attends."
    own_tokens: int
    "Symbol S: this device's part of the tokens if a shard program splits them."
    earlier: int | None = None
    "Number of slices that form the past; None: past / tokens, rounded."
    own_rows: int = 0
    "Symbol R: this device's part of the rows if a shard program splits them."
    later: int = 0
    "Tokens of later slices."
    symbols: tuple[tuple[str, int], ...] = ()
    "Other sizes named in graphs."
    own_first: int | None = None
    """Tokens of the slice before this device's part; None: of the last part, where causal attention takes longest."""

    @property
    def is_sliced(self) -> bool:
        """Return whether the microbatch has several slices."""
        return self.past + self.later > 0

    @property
    def earlier_chunks(self) -> int:
        """The number of earlier slices that attention processes one by one."""
        if not self.past:
            return 0
        return max(1, round(self.past / max(1, self.tokens)) if self.earlier is None else self.earlier)


class LayerQuery(NamedTuple):
    """One layer and everything that its time and memory depend on."""

    graph: Graph
    shape: MicrobatchShape
    kind: DeviceKind
    precision: Precision
    recompute: Recompute = "none"
    collective: CollectiveTime | None = None
    "Seconds of the collectives inside the layer; a graph with collectives needs it."
    collective_key: object = None
    "The cache key of `collective`: equal keys mean equal seconds."

    def without_collectives(self) -> LayerQuery:
        """Return the same query with free collectives."""
        return self._replace(collective=free_collective, collective_key=SILENT)
