"""What a group of devices needs at least, before any program is searched: so that hardly any has to be.

Computing is divided as the devices' speeds are, perfectly. Nothing is divided for nothing: a layer's gradients are
summed over the group once an iteration, or what goes into it or comes out of it is gathered in one direction and summed
in the other, in every microbatch; the cheaper of the two counts, by the links of the very groups. (Megatron's sequence
parallelism does the second four times in a block; a layer of one product may do with one.) And layers are not cut: of
those that are alike every lane holds a whole number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipefit.cost.comm.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES, WORKSPACE_BYTES
from pipefit.model.graph import element_count
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.device_groups.layouts import FEW, Devices, GroupLayout
from pipefit.plan.types import Job, Recompute

FILLING = 1 / 3
"""Of a lane's time for a microbatch, what the lanes behind wait for at least: its forward."""


EXACT = 1 + 1e-9
"""What a whole number of layers may miss by rounding."""


@dataclass(frozen=True, slots=True)
class LaneLoads:
    """What the lanes of a layout do for a microbatch."""

    even_s: float
    "Every lane, were all layers divided as the lanes are fast."
    cut_s: float
    "The busiest lane, where layers that are alike are not cut."


class GroupLowerBounds:
    """Floors for one search; what devices of a kind take is worked out once."""

    def __init__(self, bench: PlannerContext, job: Job) -> None:
        self.bench, self.job = bench, job
        self._groups: dict[object, float] = {}
        self._alike: dict[tuple[Devices, ...], object] = {}
        self._distinct: dict[GroupLayout, list[tuple[tuple[Devices, ...], int]]] = {}
        "Of a layout the lanes that differ, with how many there are."
        self._times = {way: bench.layer_cutter.row_time(job, way) for way in ("none", "selective", "full")}
        layers = bench.only_module.layers
        self._layers = Counter(layer.graph for layer in layers)
        self._block, self._blocks = self._layers.most_common(1)[0]

    def whole_s(self, device: int, rows: int, recompute: Recompute = "none") -> float:
        """All layers of a microbatch of so many rows on one device."""
        return self._times[recompute](int(self.bench.layer_cutter.fleet.kind[device]), rows)

    def group_s(self, lane: tuple[Devices, ...], rows: int, microbatches: int, recompute: Recompute = "none") -> float:
        """All layers of a microbatch on the slowest group of a lane."""
        key = (self.lane_key(lane), rows, microbatches, recompute)
        if key not in self._groups:
            slowest = max(1 / sum(1 / self.whole_s(device, rows, recompute) for device in group) for group in lane)
            self._groups[key] = slowest + (self._moved_s(lane, rows, microbatches) if len(lane[0]) > 1 else 0.0)
        return self._groups[key]

    def lane_key(self, lane: tuple[Devices, ...]) -> object:
        """Equal for lanes that floors do not tell apart: on many devices, those with as many groups of the same kinds,
        each on as many hosts."""
        if lane not in self._alike:
            key: object = lane
            if self.bench.network.devices > FEW:
                network, kind = self.bench.network, self.bench.layer_cutter.fleet.kind
                each = {(tuple(kind[list(g)].tolist()), len({network.host[device] for device in g})) for g in lane}
                key = (len(lane), frozenset(each))
            self._alike[lane] = key
        return self._alike[lane]

    def lane_loads(self, layout: GroupLayout, rows: int, microbatches: int, recompute: Recompute = "none") -> LaneLoads:
        """The lanes of a layout with a microbatch."""
        return self.shared_loads(
            [(n, self.group_s(one, rows, microbatches, recompute)) for one, n in self.distinct_lanes(layout)]
        )

    def distinct_lanes(self, layout: GroupLayout) -> list[tuple[tuple[Devices, ...], int]]:
        """Of a layout the lanes that differ, with how many there are."""
        if layout not in self._distinct:
            counts = Counter(map(self.lane_key, layout.lanes))
            first = {self.lane_key(lane): lane for lane in layout.lanes}
            self._distinct[layout] = [(first[key], count) for key, count in counts.items()]
        return self._distinct[layout]

    def shared_loads(self, lanes: Sequence[tuple[int, float]]) -> LaneLoads:
        """All layers divided over lanes: of each kind of lane how many there are, and what all layers take on one."""
        if any(whole_s == float("inf") for _, whole_s in lanes):
            return LaneLoads(float("inf"), float("inf"))
        even_s = 1 / sum(count / whole_s for count, whole_s in lanes)
        each = [(count, self._layer_fraction * whole_s) for count, whole_s in lanes]
        cut_s = even_s
        while sum(count * int(cut_s / block_s * EXACT) for count, block_s in each) < self._blocks:
            cut_s = min((int(cut_s / block_s * EXACT) + 1) * block_s for _, block_s in each)
        return LaneLoads(even_s, cut_s)

    def has_room(self, layout: GroupLayout, zero1: bool) -> bool:
        """Whether all that stays fits in the memory of one replica's devices, were it divided perfectly."""
        share = 1 / layout.replica_count if zero1 else 1.0
        stays = self.bench.layer_cutter.static_bytes(self.job, share, "none", (1,))
        kinds = self.bench.network.kinds
        return stays <= sum(kinds[device].memory_bytes - WORKSPACE_BYTES for lane in layout.lanes for device in lane[0])

    @cached_property
    def _layer_fraction(self) -> float:
        """One of the commonest layers, as a part of all: where it is least, of the kinds of devices."""
        names = [layer.graph for layer in self.bench.only_module.layers]
        parts = []
        for kind in self.bench.layer_cutter.fleet.names:
            row = self.bench.layer_cutter.layer_row(self.job, frozenset({(kind, 1)}), "none", 1.0)
            times = row.forward_s + row.backward_s
            parts.append(float(times[names.index(self._block)] / times.sum()))
        return min(parts)

    def _moved_s(self, lane: tuple[Devices, ...], rows: int, microbatches: int) -> float:
        """What dividing all layers costs at least, of a microbatch."""
        network, precision = self.bench.network, self.job.precision
        symbols = {"B": rows, "T": self.job.sequence, "P": 0}
        total = 0.0
        for name, count in self._layers.items():
            graph = self.bench.model.graphs[name]
            trained = sum(element_count(one.shape, {}) for one in graph.parameters if one.trainable)
            gradient_s = all_reduce_s(network, lane, float(count * trained * GRADIENT_BYTES[precision])) / microbatches
            shapes = [tensor.shape for tensor in graph.inputs if tensor.role == "activation"]
            elements = min(
                element_count(shape, symbols) for shape in (*shapes, graph.find_tensor(graph.outputs[0]).shape)
            )
            size = float(elements * COMPUTE_BYTES[precision])
            once_s = all_gather_s(network, lane, size) + reduce_scatter_s(network, lane, size)
            total += min(gradient_s, count * once_s)
        return total


def step_bound_s(busy: LaneLoads, lanes: int, microbatches: int) -> float:
    """A step in which the lanes do so much with every microbatch: no order takes less."""
    return max((microbatches + FILLING * (lanes - 1)) * busy.even_s, microbatches * busy.cut_s)


def step_guess_s(busy: LaneLoads, lanes: int, microbatches: int) -> float:
    """What 1F1B takes of it."""
    return (microbatches - 1) * busy.cut_s + lanes * busy.even_s
