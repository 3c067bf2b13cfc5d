"""Times of every layer slice by slice, without memory, for slicing sequences and for bounds of sliced candidates.

The time of a slice of a layer is computed once for all candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipefit.cost.comm.network import Network
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.roofline import LayerCosts, layer_seconds
from pipefit.cost.pipeline.expert_traffic import collective_key, exchange_rings, stage_collective
from pipefit.cost.pipeline.rings import shard_rings
from pipefit.cost.pipeline.table import slice_places
from pipefit.cost.types import Array, Ints
from pipefit.cost.work import StageWork
from pipefit.layout import split_by_shares
from pipefit.model.graph import Graph
from pipefit.precision import Precision


@dataclass(frozen=True, slots=True)
class SliceRow:
    """Times of every slice of every layer, on the slowest device of a group: seconds [slice, layer]."""

    forward_s: Array
    backward_s: Array
    "Fused or split in two parts, whichever is faster."

    @property
    def first_share(self) -> float:
        """The smallest share of a layer's time in its first slice; layers without time are ignored."""
        times = self.forward_s + self.backward_s
        layer_s = times.sum(axis=0)
        return float((times[0, layer_s > 0] / layer_s[layer_s > 0]).min(initial=1.0))


class SliceRows:
    """The slice rows of one network under one source of costs."""

    def __init__(self, network: Network, layers: LayerCosts) -> None:
        self.network, self.layers = network, layers
        self._known: dict[object, tuple[Array, Array]] = {}
        self._rows: dict[object, SliceRow] = {}
        self._places: dict[int, tuple[StageWork, list[tuple[int, int, int]]]] = {}
        "By the identity of a stage; the entry keeps the stage alive."
        self._alike: dict[tuple[int, int], tuple[list[tuple[Graph, tuple[int, ...]]], Ints]] = {}

    def slice_row(self, stage: StageWork, slices: tuple[int, ...], precision: Precision) -> SliceRow:
        """Return the row of all layers of a stage with these slices. Equal requests must pass the same stage object."""
        key = (id(stage), slices, precision)
        if key not in self._rows:
            places = enumerate(slice_places(slices))
            slice_times = [
                self.times_of_slice(stage, tokens, past, precision, earlier) for earlier, (tokens, past) in places
            ]
            forward, backward = (np.stack(column) for column in zip(*slice_times, strict=True))
            self._rows[key] = SliceRow(forward, backward)
        return self._rows[key]

    def times_of_slice(
        self, stage: StageWork, tokens: int, past: int, precision: Precision, earlier: int | None = None
    ) -> tuple[Array, Array]:
        """Return (forward, backward) seconds of every layer for `tokens` tokens after `past` others.

        The others came in `earlier` slices (None: slices of this length).
        """
        key = (id(stage), tokens, past, precision, earlier)
        if key not in self._known:
            if id(stage) not in self._places:
                self._places[id(stage)] = (stage, _distinct_places(stage, self.network))
            by_place = [
                self._layer_times(stage, location, tokens, past, precision, earlier)
                for location in self._places[id(stage)][1]
            ]
            forward, backward = np.max(by_place, axis=0)
            self._known[key] = forward, backward
        return self._known[key]

    def _layer_times(
        self,
        stage: StageWork,
        at: tuple[int, int, int],
        tokens: int,
        past: int,
        precision: Precision,
        earlier: int | None,
    ) -> Array:
        """Return [forward or backward, layer]."""
        device, rows, position = at
        kind = self.network.kinds[device]
        rings = shard_rings(stage) if stage.group.find_axis("shard").size > 1 else None
        exchanging = exchange_rings(stage, self.network)
        programs, index = self._distinct_programs(stage, position)
        seconds = []
        for graph, shares in programs:
            start, stop = split_by_shares(tokens, shares)[position]
            own_first = None if stage.has_equal_shards else start
            first_row, last_row = split_by_shares(rows, shares)[position]
            shape = MicrobatchShape(
                rows, tokens, past, stop - start, earlier, own_rows=last_row - first_row, own_first=own_first
            )
            collective = stage_collective(self.network, rings, shares, exchanging) if rings else None
            name = collective_key(stage, rings, shares, exchanging)
            query = LayerQuery(graph, shape, kind, precision, stage.recompute, collective, name)
            times = layer_seconds(self.layers, query)
            seconds.append((times.forward_s, times.least_backward_s))
        return np.array(seconds).T[:, index]

    def _distinct_programs(self, stage: StageWork, position: int) -> tuple[list[tuple[Graph, tuple[int, ...]]], Ints]:
        """Return (distinct graphs of a stage at one shard position with their shares, index of each layer's graph)."""
        key = (id(stage), position)
        if key not in self._alike:
            number: dict[int, int] = {}
            programs: list[tuple[Graph, tuple[int, ...]]] = []
            index = []
            for layer, graphs in enumerate(stage.layers):
                graph = graphs[min(position, len(graphs) - 1)]
                if id(graph) not in number:
                    number[id(graph)] = len(programs)
                    programs.append((graph, stage.shares_of(layer)))
                index.append(number[id(graph)])
            self._alike[key] = programs, np.array(index)
        return self._alike[key]


def _distinct_places(stage: StageWork, network: Network) -> list[tuple[int, int, int]]:
    """Return (device, rows, shard position), one for each combination of kind, rows and program."""
    shards = stage.group.find_axis("shard")
    locations: dict[object, tuple[int, int, int]] = {}
    for index, device in enumerate(stage.group.devices):
        group, position = divmod(index, shards.size)
        row_position = stage.part_rows(group // stage.expert_parts), 0 if stage.has_equal_shards else position
        locations.setdefault((network.kinds[device].name, *row_position), (device, *row_position))
    return list(locations.values())
