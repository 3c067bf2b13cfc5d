"""From a simulated candidate to the arrays of the placement search: flows, rings and compute, by slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pipefit.cost.comm.collectives import all_reduce_s
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.roofline import LayerCosts
from pipefit.cost.pipeline.overlap import remaining_lines
from pipefit.cost.pipeline.rings import shard_rings
from pipefit.cost.pipeline.table import overlap_share, slice_places, stage_cost
from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES
from pipefit.cost.types import Array, Ints
from pipefit.cost.work import Messages, PipelineWork, StageWork
from pipefit.layout import Mesh
from pipefit.plan.placement.links import TICK_S, LinkArrays, link_arrays, to_ticks
from pipefit.simulate import Timeline

StageFlow = tuple[int, int, str, str, int]
"""(source stage, target stage, tensor, "F" or "B", slice)."""

RowKey = tuple[str, int, int]
"""("F", "I", "W" or "B", stage, slice), or ("STEP", lane, 0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementShape:
    """Transfers, rings and compute to be placed, by slot. `_start` arrays are row offsets, as in a CSR matrix."""

    lanes: int
    replicas: int
    shards: int
    slots: int
    "Slots of the plan; idle ones follow."
    flow_start: Ints
    source: Ints
    "[message]: slot."
    target: Ints
    size: Ints
    "[message]: index into the sizes of LinkArrays."
    flow_of: Ints
    slot_start: Ints
    slot_messages: Ints
    term_start: Ints
    "[lane + 1]: terms are sorted by lane."
    passes: Ints
    "[term]: 2 for an all-reduce, 1 for a reduce-scatter or an all-gather."
    latency_factor: Array
    byte_factor: Array
    bytes: Array
    more: Ints
    "[term]: ticks that do not depend on the placement."
    share: Array
    "[term]: fraction of the time that overlaps with the last backward."
    line_start: Ints
    line_share: Array
    line_beside: Array
    "Lines: at least line_share x time - line_beside (in ticks) remain exposed (`cost.overlap.left_lines`)."
    row_start: Ints
    "[lane + 1]."
    row_time: Ints
    "[row, kind]."
    kind: Ints
    "[device]."
    allowed: Ints
    "[lane + 1, kind]: whether devices of that kind may be on the lane; the last row is for the idle ones."


class CollectiveTerm(NamedTuple):
    """A collective of a stage's replicas."""

    lane: int
    stage: int
    operation: str
    bytes: float
    more_s: float
    share: float
    lines: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """One candidate whose devices are to be chosen, as arrays, with the index of every time in x."""

    links: LinkArrays
    shape: PlacementShape
    devices: Ints
    "[slot]: devices of the candidate, followed by idle ones."
    flow_of: Mapping[StageFlow, int]
    tied: Mapping[int, tuple[int, ...]]
    "Stage -> flows of its tied parameters."
    term_of: Mapping[tuple[str, int], int]
    '("reduce" or "gather", stage) -> term.'
    row_of: Mapping[RowKey, int]
    exact: bool
    "False if x lacks times that depend on the placement: groups across hosts, split sequences, or mixed kinds."

    @property
    def flow_count(self) -> int:
        return len(self.shape.flow_start) - 1

    @property
    def entry_count(self) -> int:
        """Length of x."""
        return 2 * self.flow_count + len(self.shape.passes) + len(self.shape.row_time)

    @property
    def has_choice(self) -> bool:
        """True if there are transfers or collectives to place: not for one device or for one shard group alone."""
        return self.shape.slots > 1 and self.flow_count + len(self.shape.passes) > 0


def build_problem(work: PipelineWork, network: Network, layers: LayerCosts, timeline: Timeline) -> PlacementProblem:
    """Return the placement problem of a candidate with this work, network, layer costs and timeline.

    Each lane has one group; all groups have the same number of replicas and of shards. The parts of a sequence and of
    the experts move together, like shards.
    """
    lane_devices = _lane_devices(work)
    group = work.stages[0].group
    context, expert = work.stages[0].context_parts, work.stages[0].expert_parts
    replicas, shards = group.find_axis("replica").size, context * expert * group.find_axis("shard").size
    used = [device for lane in lane_devices for device in lane]
    devices = np.array([*used, *sorted({*range(network.devices)} - {*used})], dtype=np.int64)
    slot_of = {device: slot for slot, device in enumerate(used)}
    flow_of, tied, flows = _collect_flows(work)
    sizes = sorted({size for messages in flows for _, _, size in messages})
    terms = _collect_terms(work, network, layers, timeline)
    kinds, kind_of = _device_kinds(network)
    even = group.find_axis("replica").is_even and shards == 1
    row_of, row_start, row_time = _compute_rows(work, network, layers, timeline, kinds) if even else ({}, [0], [])
    if not row_time:
        row_start = [0] * (len(lane_devices) + 1)
    shape = PlacementShape(
        lanes=len(lane_devices),
        replicas=replicas,
        shards=shards,
        slots=len(used),
        **_flow_arrays(flows, slot_of, sizes, len(used)),
        **_term_arrays(terms, len(lane_devices), replicas, network),
        row_start=np.array(row_start, dtype=np.int64),
        row_time=np.array(row_time, dtype=np.int64).reshape(-1, len(kinds)),
        kind=np.array(kind_of, dtype=np.int64),
        allowed=_allowed_kinds(lane_devices, network, kinds, kind_of, timeline, free=even),
    )
    rings_in_hosts = all(
        len({network.host[device] for device in ring}) == 1 for s in work.stages for ring in shard_rings(s)
    )
    return PlacementProblem(
        links=link_arrays(network, sizes),
        shape=shape,
        devices=devices,
        flow_of=flow_of,
        tied=tied,
        term_of={("gather" if t.operation == "all_gather" else "reduce", t.stage): i for i, t in enumerate(terms)},
        row_of=row_of,
        exact=rings_in_hosts
        and context == 1
        and not any(stage.row_parts > 1 for stage in work.stages)
        and len(kinds) == 1
        and not network.over_gloo
        and not _by_group(terms, replicas, network),
    )


def _lane_devices(work: PipelineWork) -> list[tuple[int, ...]]:
    lanes: list[tuple[int, ...]] = [()] * work.num_lanes
    for stage in work.stages:
        lanes[stage.lane] = stage.group.devices
    return lanes


def _collect_flows(work: PipelineWork) -> tuple[dict[StageFlow, int], dict[int, tuple[int, ...]], list[Messages]]:
    """Return (flow of every transfer, flows of the exchange of tied parameters by stage, messages of every flow).

    Equal sets of messages are one flow.
    """
    known: dict[Messages, int] = {}
    flow_of: dict[StageFlow, int] = {}
    tied: dict[int, tuple[int, ...]] = {}
    for edge in work.edges:
        for direction, slices in (("F", edge.forward), ("B", edge.backward)):
            for slice_, messages in enumerate(slices):
                flow_of[edge.source, edge.target, edge.tensor, direction, slice_] = known.setdefault(
                    messages, len(known)
                )
    for exchange in work.tied:
        flow = known.setdefault(exchange.messages, len(known))
        for stage in exchange.stages:
            tied[stage] = (*tied.get(stage, ()), flow)
    return flow_of, tied, list(known)


def _flow_arrays(
    flows: Sequence[Messages], slot_of: Mapping[int, int], sizes: Sequence[float], slots: int
) -> dict[str, Any]:
    index_of_size = {size: index for index, size in enumerate(sizes)}
    messages = [
        (flow, slot_of[source], slot_of[target], index_of_size[size])
        for flow, flow_messages in enumerate(flows)
        for source, target, size in flow_messages
        if size and source != target
    ]
    table = np.array(messages, dtype=np.int64).reshape(-1, 4)
    touched = np.concatenate((table[:, 1], table[:, 2]))
    numbers = np.concatenate((np.arange(len(table)), np.arange(len(table))))
    order = np.argsort(touched, kind="stable")
    return {
        "flow_start": np.searchsorted(table[:, 0], np.arange(len(flows) + 1)).astype(np.int64),
        "source": table[:, 1].copy(),
        "target": table[:, 2].copy(),
        "size": table[:, 3].copy(),
        "flow_of": table[:, 0].copy(),
        "slot_start": np.searchsorted(touched[order], np.arange(slots + 1)).astype(np.int64),
        "slot_messages": numbers[order],
    }


def _collect_terms(
    work: PipelineWork, network: Network, layers: LayerCosts, timeline: Timeline
) -> list[CollectiveTerm]:
    """Return the collectives over replicas (`cost.table.reduce_s`, `gather_s`), sorted by lane."""
    terms = []
    parted = {action.stage for _, _, action in timeline.schedule if action.kind == "W"}
    for index, stage in enumerate(work.stages):
        if stage.group.find_axis("replica").size == 1:
            continue
        apart = max(stage.parameters.spread)  # summed over all devices of the stage
        moved = max(stage.parameters.trainable) - apart
        size = float(moved * GRADIENT_BYTES[work.precision])
        more_s = 0.0
        if stage.group.find_axis("shard").size > 1:
            whole_bytes = max(stage.parameters.whole) * GRADIENT_BYTES[work.precision]
            more_s = all_reduce_s(network, shard_rings(stage), whole_bytes)
        share, pieces = overlap_share(stage, work, network, layers)
        lines = tuple(remaining_lines(pieces["W" if index in parted else "B"], work.bucket_bytes)) if share else ()
        operation = "reduce_scatter" if stage.shards_state else "all_reduce"
        terms.append(CollectiveTerm(stage.lane, index, operation, size, more_s, share if lines else 0.0, lines))
        if stage.shards_state:
            gathered = float(moved * COMPUTE_BYTES[work.precision])
            terms.append(CollectiveTerm(stage.lane, index, "all_gather", gathered, 0.0, 0.0, ()))
    return sorted(terms, key=lambda term: term.lane)


def _term_arrays(terms: Sequence[CollectiveTerm], lanes: int, replicas: int, network: Network) -> dict[str, Any]:
    factors = [network.collective_factors(term.operation, replicas) for term in terms]
    lines = [line for term in terms for line in term.lines]
    return {
        "term_start": np.searchsorted([term.lane for term in terms], np.arange(lanes + 1)).astype(np.int64),
        "passes": np.array([1 + (term.operation == "all_reduce") for term in terms], dtype=np.int64),
        "latency_factor": np.array([latency for latency, _ in factors], dtype=np.float64),
        "byte_factor": np.array([per_byte for _, per_byte in factors], dtype=np.float64),
        "bytes": np.array([term.bytes for term in terms], dtype=np.float64),
        "more": np.array([to_ticks(term.more_s) for term in terms], dtype=np.int64),
        "share": np.array([term.share for term in terms], dtype=np.float64),
        "line_start": np.cumsum([0, *(len(term.lines) for term in terms)]).astype(np.int64),
        "line_share": np.array([share for share, _ in lines], dtype=np.float64),
        "line_beside": np.array([beside_s / TICK_S for _, beside_s in lines], dtype=np.float64),
    }


def _by_group(terms: Sequence[CollectiveTerm], replicas: int, network: Network) -> bool:
    """Return whether measured factors of a collective depend on the group: inside a host or between hosts, or its
    size."""
    groups = [(size, inside) for size in range(2, replicas + 1) for inside in (True, False)]
    return any(len({network.collective_factors(term.operation, *group) for group in groups}) > 1 for term in terms)


def _device_kinds(network: Network) -> tuple[list[int], list[int]]:
    """Return (a device of every kind, the kind of every device)."""
    first: dict[str, int] = {}
    index: dict[str, int] = {}
    for device, kind in enumerate(network.kinds):
        first.setdefault(kind.name, device)
        index.setdefault(kind.name, len(index))
    return list(first.values()), [index[kind.name] for kind in network.kinds]


def _compute_rows(
    work: PipelineWork, network: Network, layers: LayerCosts, timeline: Timeline, kinds: Sequence[int]
) -> tuple[dict[RowKey, int], list[int], list[list[int]]]:
    """Return times that depend on the kinds of a lane's devices: (row of each, first row of each lane, ticks by kind).

    There are none if all devices are of one kind.
    """
    if len(kinds) == 1:
        return {}, [], []
    row_of: dict[RowKey, int] = {}
    times: list[list[int]] = []
    starts = []
    for lane in range(work.num_lanes):
        starts.append(len(times))
        for index, stage in enumerate(work.stages):
            if stage.lane == lane:
                _stage_rows(index, stage, work, network, layers, kinds, row_of, times)
        slowest = min(
            network.kinds[d].memory_bandwidth_bytes_per_s
            for s in work.stages
            if s.lane == lane
            for d in s.group.devices
        )
        row_of["STEP", lane, 0] = len(times)
        once_s = float(timeline.costs.step_s[lane])
        times.append([to_ticks(once_s * slowest / network.kinds[d].memory_bandwidth_bytes_per_s) for d in kinds])
    return row_of, [*starts, len(times)], times


def _stage_rows(
    index: int,
    stage: StageWork,
    work: PipelineWork,
    network: Network,
    layers: LayerCosts,
    kinds: Sequence[int],
    row_of: dict[RowKey, int],
    times: list[list[int]],
) -> None:
    alike = [replace(stage, group=Mesh(axes=stage.group.axes, devices=(d,) * stage.group.size)) for d in kinds]
    for slice_, (tokens, past) in enumerate(slice_places(stage.slices)):
        costs_by_kind = [stage_cost(same_kind, tokens, past, work, network, layers) for same_kind in alike]
        for action, seconds in (
            ("F", [cost.forward_s for cost in costs_by_kind]),
            ("I", [cost.input_s for cost in costs_by_kind]),
            ("W", [cost.weight_s for cost in costs_by_kind]),
            ("B", [cost.backward_s for cost in costs_by_kind]),
        ):
            row_of[action, index, slice_] = len(times)
            times.append([to_ticks(value) for value in seconds])


def _allowed_kinds(
    lane_devices: Sequence[Sequence[int]],
    network: Network,
    kinds: Sequence[int],
    kind_of: Sequence[int],
    timeline: Timeline,
    free: bool,
) -> Ints:
    """[lane + 1, kind]: a kind is allowed on a lane if it holds the lane's peak; without `free`, only where it is
    now."""
    allowed = np.ones((len(lane_devices) + 1, len(kinds)), dtype=np.int64)
    if len(kinds) == 1:
        return allowed
    for lane, devices in enumerate(lane_devices):
        present = {kind_of[device] for device in devices}
        for kind, device in enumerate(kinds):
            holds = network.kinds[device].memory_bytes >= float(timeline.peak_bytes[lane])
            allowed[lane, kind] = (kind in present or free) and holds
    if not free and any(len({kind_of[device] for device in devices}) > 1 for devices in lane_devices):
        allowed[:] = 0  # the shares depend on the kinds: nothing may move
    return allowed
