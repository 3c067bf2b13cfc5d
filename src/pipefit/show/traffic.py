"""Bytes between every pair of devices in one step, for the link heat-map.

Transfers between stages are the messages of the cost model. So are the collectives of shard programs, including those
that gather parameters and factors or send tokens to experts (`cost/compute/shard_exchanges.py`). Collectives are
counted as rings over their groups. If a group has equally many devices on every host, the ring runs first inside the
hosts and then between them, as in the cost model's two-level form (reference: `cost/comm/collectives.py`). gloo has
only flat rings, and sums go round them backwards. Uneven parts are sent as in their lowering
(`cost/comm/lowerings.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

from pipefit.cost.comm.collectives import runs_backwards
from pipefit.cost.comm.lowerings import lowerings_over
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.shard_exchanges import operator_exchanges
from pipefit.cost.pipeline.context_traffic import context_symbols, gathered_bytes
from pipefit.cost.pipeline.rings import context_rings, copy_rings, expert_rings, shard_rings, split_elements
from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES
from pipefit.cost.work import PipelineWork, StageWork
from pipefit.layout import split_by_shares
from pipefit.model.analysis.saved import kept_values
from pipefit.model.graph import LOCAL
from pipefit.model.ops.kind import Said
from pipefit.model.ops.moe import EXPERT_EXCHANGE
from pipefit.model.ops.packed_attention import SQUARES
from pipefit.model.ops.reshare import KIND as RESHARE
from pipefit.optimizers.sharded_state import shards_parameters
from pipefit.precision import Precision

RING_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""Number of times a ring collective sends (n - 1)/n of the tensor over every hop; gloo implements a reduce-scatter by
an all-reduce."""

REASONS = ("activations", "gradients", "shards", "context", "reduction", "parameters")
"""Forward transfers, backward transfers, collectives of shard programs, keys and values of split sequences, gradient
sums, ZeRO-1 all-gathers."""


@dataclass(slots=True)
class StepTraffic:
    """Bytes of one step by (source device, target device) and by reason."""

    bytes: dict[tuple[int, int], dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )

    def add_bytes(self, source: int, target: int, size: float, reason: str) -> None:
        if source != target and size:
            self.bytes[source, target][reason] += size

    def pair_totals(self) -> Mapping[tuple[int, int], float]:
        """Return the total bytes of each pair."""
        return {pair: fsum(parts.values()) for pair, parts in self.bytes.items()}


def step_traffic(work: PipelineWork, network: Network, microbatches: int) -> StepTraffic:
    """Return the traffic of one step of a pipeline."""
    traffic = StepTraffic()
    for edge in work.edges:
        alike = ((*itertools.chain(*edge.forward),), (*itertools.chain(*edge.backward),))
        batches = [(1, *pair) for pair in edge.ragged] or [(microbatches, *alike)]
        for times, forward, backward in batches:
            for reason, messages in (("activations", forward), ("gradients", backward)):
                for source, target, size in messages:
                    traffic.add_bytes(source, target, size * times, reason)
    for tied in work.tied:
        for source, target, size in tied.messages:
            traffic.add_bytes(source, target, size, "reduction")
    for stage in work.stages:
        _add_shard_collectives(traffic, stage, work, network, microbatches)
        _add_expert_exchanges(traffic, stage, work, network, microbatches)
        _add_context_collectives(traffic, stage, work, network, microbatches)
        _add_reductions(traffic, stage, work, network)
        _add_sharded_layers(traffic, stage, work, network, microbatches)
    return traffic


def _add_shard_collectives(
    traffic: StepTraffic, stage: StageWork, work: PipelineWork, network: Network, microbatches: int
) -> None:
    for ring in shard_rings(stage):
        if len(ring) < 2:
            continue
        for times, symbols in _slice_sizes(stage, stage.group.axis_position(ring[0], "replica"), microbatches):
            lowerings, passed = lowerings_over(network, [ring]), Counter[str]()
            for shares, (kind, size, how, units) in _layer_collectives(stage, symbols, work.precision):
                if kind == EXPERT_EXCHANGE:  # over other rings
                    continue
                if kind == RESHARE:  # for these, units are shares
                    parts: list[tuple[float, ...]] = [units[: len(ring)], units[len(ring) :]]
                else:
                    parts = [_share_fractions(count, shares) for count in units]
                if kind != "all_to_all" and how == "padded":
                    passes = 2 if kind == "reduce_scatter" and network.over_gloo else RING_PASSES[kind]
                    passed[kind] += passes * size * (len(ring) * max(parts[0]) if parts else 1.0)
                else:
                    for i, j, part in lowerings.sent_messages(kind, how, size * times, *parts):
                        traffic.add_bytes(ring[i], ring[j], part, "shards")
            for kind, size in passed.items():
                _add_ring(traffic, ring, size * times, "shards", network, kind)


def _add_expert_exchanges(
    traffic: StepTraffic, stage: StageWork, work: PipelineWork, network: Network, microbatches: int
) -> None:
    """Add the exchanges of tokens over an expert axis and its shards."""
    for ring in expert_rings(stage) if stage.expert_parts > 1 else ():
        lowerings, parts = lowerings_over(network, [ring]), (1.0 / len(ring),) * len(ring)
        for times, symbols in _slice_sizes(stage, stage.group.axis_position(ring[0], "replica"), microbatches):
            for _, (kind, size, how, _) in _layer_collectives(stage, symbols, work.precision):
                if kind == EXPERT_EXCHANGE:
                    for i, j, part in lowerings.sent_messages("all_to_all", how, size * times, parts, parts):
                        traffic.add_bytes(ring[i], ring[j], part, "shards")


def _add_context_collectives(
    traffic: StepTraffic, stage: StageWork, work: PipelineWork, network: Network, microbatches: int
) -> None:
    """Add the gathers of keys and values, and the sums of their gradients, over the parts of sequences."""
    for ring in context_rings(stage) if stage.context_parts > 1 else ():
        for times, symbols in _slice_sizes(stage, stage.group.axis_position(ring[0], "replica"), microbatches):
            for layer, graphs in enumerate(stage.layers):
                for size, gathers in gathered_bytes(graphs[0], symbols, stage.recompute, work.precision):
                    ahead = gathers if layer >= stage.frozen else 1
                    _add_ring(traffic, ring, ahead * times * size, "context", network, "all_gather")
                    if layer >= stage.frozen:
                        passes, kind = (2, "all_reduce") if network.over_gloo else (1, "reduce_scatter")
                        _add_ring(traffic, ring, passes * times * size, "context", network, kind)


def _slice_sizes(stage: StageWork, replica: int, microbatches: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield (number of microbatches, sizes of a slice). Packed rows have different sizes in every microbatch."""
    for row in stage.packed:
        tokens, squares = row[replica]
        if tokens:
            yield 1, {"B": 1, "T": tokens, "P": 0, SQUARES: squares}
    if not stage.packed:
        for tokens, past in zip(stage.slices, _slice_starts(stage.slices), strict=True):
            local = tokens // stage.context_parts
            parts = dict(context_symbols(stage.context_parts))
            yield microbatches, {"B": stage.part_rows(replica), "T": local, "P": past, **dict(stage.symbols), **parts}


def _layer_collectives(
    stage: StageWork, sizes: Mapping[str, int], precision: Precision
) -> Iterator[tuple[tuple[int, ...], Said]]:
    """Yield all collectives of a microbatch with the shares of their layer: forward, and for layers with a backward
    pass also backward and recomputation."""
    for layer, graphs in enumerate(stage.layers):
        graph, shares = graphs[0], stage.shares_of(layer)
        local_sizes = {
            str(part): split_by_shares(sizes[str(size)], shares)[0][1] for size, part in LOCAL.items() if size in sizes
        }
        symbols = {**sizes, **local_sizes}
        again = set(kept_values(graph, stage.recompute, COMPUTE_BYTES[precision]).again)
        for index, operator in enumerate(graph.operators):
            ahead, back, late = operator_exchanges(graph, operator, symbols, precision)
            behind = itertools.chain(ahead if index in again else (), back, late) if layer >= stage.frozen else ()
            for said in itertools.chain(ahead, behind):
                yield shares, said


def _share_fractions(units: int, shares: Sequence[int]) -> tuple[float, ...]:
    """Return each device's fraction of `units`. Without units (for example no images to generate) it is the device's
    share."""
    if not units:
        return tuple(share / sum(shares) for share in shares)
    return tuple((stop - start) / units for start, stop in split_by_shares(units, shares))


def _add_reductions(traffic: StepTraffic, stage: StageWork, work: PipelineWork, network: Network) -> None:
    width, parameters = GRADIENT_BYTES[work.precision], stage.parameters
    for ring in () if stage.splits_rows else shard_rings(stage):
        _add_ring(traffic, ring, 2 * max(parameters.whole) * width, "reduction", network, "all_reduce")
    for ring in copy_rings(stage):
        _add_ring(traffic, ring, 2 * stage.copied_elements * width, "reduction", network, "all_reduce")
    passes, kind = (1, "reduce_scatter") if stage.shards_state and not network.over_gloo else (2, "all_reduce")
    for elements, rings in split_elements(stage, stage.reduced_elements, stage.reduced_spread):
        for ring in rings:
            _add_ring(traffic, ring, elements * width * passes, "reduction", network, kind)
    for elements, rings in split_elements(stage, stage.gathered_elements, stage.gathered_spread):
        for ring in rings if elements else ():
            _add_ring(traffic, ring, elements * COMPUTE_BYTES[work.precision], "parameters", network, "all_gather")


def _add_sharded_layers(
    traffic: StepTraffic, stage: StageWork, work: PipelineWork, network: Network, microbatches: int
) -> None:
    """Add the collectives of ZeRO-2 and 3 within the actions of all microbatches and slices."""
    if not stage.has_sharded_layers:
        return
    times = microbatches * len(stage.slices)
    total = sum(map(max, stage.sharded_elements))
    passes, kind = (2, "all_reduce") if network.over_gloo else (1, "reduce_scatter")
    for elements, rings in split_elements(stage, total, sum(stage.sharded_spread)):
        for ring in rings:
            gradients = elements * GRADIENT_BYTES[work.precision] * passes * times
            _add_ring(traffic, ring, gradients, "reduction", network, kind)
            if shards_parameters(stage.sharded_state):
                gathered = 2 * elements * COMPUTE_BYTES[work.precision] * times
                _add_ring(traffic, ring, gathered, "parameters", network, "all_gather")
    for layer, counts in enumerate(stage.sharded_frozen):
        spread = stage.sharded_frozen_spread[layer]
        passes = 2 if layer >= stage.frozen else 1
        for elements, rings in split_elements(stage, max(counts), spread):
            for ring in rings if elements else ():
                gathered = passes * elements * COMPUTE_BYTES[work.precision] * times
                _add_ring(traffic, ring, gathered, "parameters", network, "all_gather")


def _add_ring(
    traffic: StepTraffic, ring: Sequence[int], passed: float, reason: str, network: Network, kind: str
) -> None:
    """Add `passed` bytes of a collective, times (n - 1)/n, on every hop of a ring of its n devices."""
    hosts: dict[int, list[int]] = defaultdict(list)
    for device in sorted(ring):
        hosts[network.host[device]].append(device)
    sizes = {len(devices) for devices in hosts.values()}
    if len(hosts) > 1 and len(sizes) == 1 and sizes != {1} and not network.over_gloo:
        size = sizes.pop()
        for devices in hosts.values():
            _add_hops(traffic, devices, passed, reason)
        for index in range(size):
            _add_hops(traffic, [devices[index] for devices in hosts.values()], passed / size, reason)
    else:
        _add_hops(traffic, sorted(ring, reverse=runs_backwards(network, kind)), passed, reason)


def _add_hops(traffic: StepTraffic, ring: Sequence[int], passed: float, reason: str) -> None:
    size = passed * (len(ring) - 1) / len(ring)
    for source, target in zip(ring, (*ring[1:], ring[0]), strict=True):
        traffic.add_bytes(source, target, size, reason)


def _slice_starts(slices: Sequence[int]) -> list[int]:
    return [sum(slices[:index]) for index in range(len(slices))]
