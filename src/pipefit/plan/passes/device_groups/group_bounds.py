"""Lower bounds of a group of devices before any program is searched, so that few programs have to be searched.

Compute is divided perfectly, in proportion to the devices' speeds. Dividing a layer has a cost: either its gradients
are all-reduced over the group once an iteration, or its input or output is all-gathered in one direction and
reduce-scattered in the other in every microbatch. The cheaper of the two counts, by the links of the group. (Megatron's
sequence parallelism does the second four times in a block; a layer of one matrix product may need only one.) Layers are
not cut: every lane holds a whole number of equal layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from pipefit.cost.comm.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES, WORKSPACE_BYTES
from pipefit.cost.work import COMPLETE_STATE, state_share
from pipefit.model.analysis.saved import Recompute
from pipefit.model.graph import element_count
from pipefit.optimizers.sharded_state import ShardedState
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.device_groups.group_budget import GROUP_BUDGET
from pipefit.plan.passes.device_groups.layouts import Devices, GroupLayout
from pipefit.plan.types import Job

FILLING = 1 / 3
"""Minimum fraction of a lane's time for a microbatch that the next lane waits: its forward."""


EXACT = 1 + 1e-9
"""Tolerance for rounding in a whole number of layers."""


@dataclass(frozen=True, slots=True)
class LaneLoads:
    """Time of the lanes of a layout for a microbatch."""

    even_s: float
    "Every lane, with all layers divided in proportion to the lanes' speeds."
    cut_s: float
    "The busiest lane, with equal layers not cut."


class GroupLowerBounds:
    """Lower bounds for one search; results are cached by kinds of devices."""

    def __init__(self, context: PlannerContext, job: Job) -> None:
        self.context, self.job = context, job
        self._groups: dict[object, float] = {}
        self._alike: dict[tuple[Devices, ...], object] = {}
        self._distinct: dict[GroupLayout, list[tuple[tuple[Devices, ...], int]]] = {}
        "Distinct lanes of a layout, with their number."
        self._times = {
            recompute: context.layer_cutter.row_time(job, recompute) for recompute in ("none", "selective", "full")
        }
        layers = context.only_module.layers
        self._layers = Counter(layer.graph for layer in layers)
        self._block, self._blocks = self._layers.most_common(1)[0]

    def whole_s(self, device: int, rows: int, recompute: Recompute = "none") -> float:
        """Return the time of all layers of a microbatch of `rows` rows on one device."""
        return self._times[recompute](int(self.context.layer_cutter.fleet.kind[device]), rows)

    def group_s(self, lane: tuple[Devices, ...], rows: int, microbatches: int, recompute: Recompute = "none") -> float:
        """Return the time of all layers of a microbatch on the slowest group of a lane."""
        key = (self.lane_key(lane), rows, microbatches, recompute)
        if key not in self._groups:
            slowest = max(1 / fsum(1 / self.whole_s(device, rows, recompute) for device in group) for group in lane)
            self._groups[key] = slowest + (self._moved_s(lane, rows, microbatches) if len(lane[0]) > 1 else 0.0)
        return self._groups[key]

    def lane_key(self, lane: tuple[Devices, ...]) -> object:
        """Return a key that is equal for lanes with equal bounds.

        On many devices these are lanes with the same number of groups of the same kinds, each on the same number of
        hosts.
        """
        if lane not in self._alike:
            key: object = lane
            if self.context.network.devices > GROUP_BUDGET.exhaustive_devices:
                network, kind = self.context.network, self.context.layer_cutter.fleet.kind
                groups = {(tuple(kind[list(g)].tolist()), len({network.host[device] for device in g})) for g in lane}
                key = (len(lane), frozenset(groups))
            self._alike[lane] = key
        return self._alike[lane]

    def lane_loads(self, layout: GroupLayout, rows: int, microbatches: int, recompute: Recompute = "none") -> LaneLoads:
        """Return the load of a layout's lanes for a microbatch."""
        return self.shared_loads(
            [(n, self.group_s(lane, rows, microbatches, recompute)) for lane, n in self.distinct_lanes(layout)]
        )

    def distinct_lanes(self, layout: GroupLayout) -> list[tuple[tuple[Devices, ...], int]]:
        """Return the distinct lanes of a layout, with their number."""
        if layout not in self._distinct:
            counts = Counter(map(self.lane_key, layout.lanes))
            first = {self.lane_key(lane): lane for lane in layout.lanes}
            self._distinct[layout] = [(first[key], count) for key, count in counts.items()]
        return self._distinct[layout]

    def shared_loads(self, lanes: Sequence[tuple[int, float]]) -> LaneLoads:
        """Return the load of all layers divided over lanes, given (number of lanes, time of all layers on one) for each
        kind."""
        if any(whole_s == float("inf") for _, whole_s in lanes):
            return LaneLoads(float("inf"), float("inf"))
        even_s = 1 / fsum(count / whole_s for count, whole_s in lanes)
        block_times = [(count, self._layer_fraction * whole_s) for count, whole_s in lanes]
        cut_s = even_s
        while sum(count * int(cut_s / block_s * EXACT) for count, block_s in block_times) < self._blocks:
            cut_s = min((int(cut_s / block_s * EXACT) + 1) * block_s for _, block_s in block_times)
        return LaneLoads(even_s, cut_s)

    def has_room(self, layout: GroupLayout, sharded_state: ShardedState) -> bool:
        """Return whether the static memory, divided perfectly, fits on the devices of one replica."""
        share = state_share(sharded_state, (1,) * layout.replica_count)
        stays = float(self.context.layer_cutter.layer_static_bytes(self.job, share).sum())
        kinds = self.context.network.kinds
        return stays <= fsum(
            kinds[device].memory_bytes - WORKSPACE_BYTES for lane in layout.lanes for device in lane[0]
        )

    @cached_property
    def _layer_fraction(self) -> float:
        """One of the most common layers as a fraction of all layers, on the kind of device where it is smallest."""
        names = [layer.graph for layer in self.context.only_module.layers]
        parts = []
        for kind in self.context.layer_cutter.fleet.names:
            row = self.context.layer_cutter.layer_row(self.job, frozenset({(kind, 1)}), "none", COMPLETE_STATE)
            times = row.forward_s + row.backward_s
            parts.append(float(times[names.index(self._block)] / times.sum()))
        return min(parts)

    def _moved_s(self, lane: tuple[Devices, ...], rows: int, microbatches: int) -> float:
        """Return a lower bound of the communication of dividing all layers, for one microbatch."""
        network, precision = self.context.network, self.job.precision
        symbols = {"B": rows, "T": self.job.sequence, "P": 0}
        total = 0.0
        for name, count in self._layers.items():
            graph = self.context.model.graphs[name]
            trained = sum(element_count(parameter.shape, {}) for parameter in graph.parameters if parameter.trainable)
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
    """Return a lower bound of the step over all orders, for these loads per microbatch."""
    return max((microbatches + FILLING * (lanes - 1)) * busy.even_s, microbatches * busy.cut_s)


def step_guess_s(busy: LaneLoads, lanes: int, microbatches: int) -> float:
    """Return the step time of 1F1B for these loads."""
    return (microbatches - 1) * busy.cut_s + lanes * busy.even_s
