"""What a group of devices needs at least, before any program is searched: so that hardly any has to be.

Computing is divided as the devices' speeds are, perfectly. Nothing is divided for nothing: a layer's gradients are
summed over the group once an iteration, or what goes into it or comes out of it is gathered in one direction and summed
in the other, in every microbatch; the cheaper of the two counts, by the links of the very groups. (Megatron's sequence
parallelism does the second four times in a block; a layer of one product may do with one.)
"""

from __future__ import annotations

from collections import Counter

from pipefit.cost.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from pipefit.cost.memory import COMPUTE_BYTES, GRADIENT_BYTES, WORKSPACE_BYTES
from pipefit.model.graph import element_count
from pipefit.plan.build import Workbench
from pipefit.plan.groups.layouts import FEW, Devices, Layout
from pipefit.plan.types import Job, Recompute

FILLING = 1 / 3
"""Of a lane's time for a microbatch, what the lanes behind wait for at least: its forward."""


class GroupFloors:
    """Floors for one search; what devices of a kind take is worked out once."""

    def __init__(self, bench: Workbench, job: Job) -> None:
        self.bench, self.job = bench, job
        self._groups: dict[object, float] = {}
        self._alike: dict[tuple[Devices, ...], object] = {}
        self._distinct: dict[Layout, list[tuple[tuple[Devices, ...], int]]] = {}
        "Of a layout the lanes that differ, with how many there are."
        self._times = {way: bench.cutter.row_time(job, way) for way in ("none", "selective", "full")}
        layers = bench.module.layers
        self._layers = Counter(layer.graph for layer in layers)

    def whole_s(self, device: int, rows: int, recompute: Recompute = "none") -> float:
        """All layers of a microbatch of so many rows on one device."""
        return self._times[recompute](int(self.bench.cutter.fleet.kind[device]), rows)

    def group_s(self, lane: tuple[Devices, ...], rows: int, microbatches: int, recompute: Recompute = "none") -> float:
        """All layers of a microbatch on the slowest group of a lane."""
        key = (self.alike(lane), rows, microbatches, recompute)
        if key not in self._groups:
            slowest = max(1 / sum(1 / self.whole_s(device, rows, recompute) for device in group) for group in lane)
            self._groups[key] = slowest + (self._moved_s(lane, rows, microbatches) if len(lane[0]) > 1 else 0.0)
        return self._groups[key]

    def alike(self, lane: tuple[Devices, ...]) -> object:
        """Equal for lanes that floors do not tell apart: on many devices, those with as many groups of the same kinds,
        each on as many hosts."""
        if lane not in self._alike:
            key: object = lane
            if self.bench.network.devices > FEW:
                network, kind = self.bench.network, self.bench.cutter.fleet.kind
                each = {(tuple(kind[list(g)].tolist()), len({network.host[device] for device in g})) for g in lane}
                key = (len(lane), frozenset(each))
            self._alike[lane] = key
        return self._alike[lane]

    def lane_s(self, layout: Layout, rows: int, microbatches: int, recompute: Recompute = "none") -> float:
        """The busiest lane of a microbatch, were layers divided as the groups are fast."""
        if layout not in self._distinct:
            counts = Counter(map(self.alike, layout.lanes))
            first = {self.alike(lane): lane for lane in layout.lanes}
            self._distinct[layout] = [(first[key], count) for key, count in counts.items()]
        every = self._distinct[layout]
        return 1 / sum(count / self.group_s(lane, rows, microbatches, recompute) for lane, count in every)

    def has_room(self, layout: Layout, zero1: bool) -> bool:
        """Whether all that stays fits in the memory of one replica's devices, were it divided perfectly."""
        share = 1 / layout.replicas if zero1 else 1.0
        stays = self.bench.cutter.static_bytes(self.job, share, "none", (1,))
        kinds = self.bench.network.kinds
        return stays <= sum(kinds[device].memory_bytes - WORKSPACE_BYTES for lane in layout.lanes for device in lane[0])

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
            elements = min(element_count(shape, symbols) for shape in (*shapes, graph.tensor(graph.outputs[0]).shape))
            size = float(elements * COMPUTE_BYTES[precision])
            once_s = all_gather_s(network, lane, size) + reduce_scatter_s(network, lane, size)
            total += min(gradient_s, count * once_s)
        return total


def step_floor_s(lane_s: float, lanes: int, microbatches: int) -> float:
    """A step of lanes that are busy for `lane_s` with every microbatch: no order takes less."""
    return (microbatches + FILLING * (lanes - 1)) * lane_s


def step_guess_s(lane_s: float, lanes: int, microbatches: int) -> float:
    """What 1F1B takes of it."""
    return (microbatches + lanes - 1) * lane_s
