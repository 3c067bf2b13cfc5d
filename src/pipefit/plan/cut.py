"""Where to cut a chain of layers into stages: the exact partition, over the costs of every layer on every stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipefit.cost.memory import COMPUTE_BYTES, GRADIENT_BYTES, STATE_BYTES, WORKSPACE_BYTES
from pipefit.cost.network import Network
from pipefit.cost.roofline import LayerCost, LayerCosts
from pipefit.cost.table import layer_costs, state_share
from pipefit.cost.work import StageWork
from pipefit.layout import split
from pipefit.plan.bounds import in_flight
from pipefit.plan.decisions import Decisions
from pipefit.plan.partition import partition
from pipefit.plan.sharded import Programs
from pipefit.plan.structure import make_groups
from pipefit.plan.types import Job


@dataclass(frozen=True, slots=True)
class LayerTables:
    """Rows [stage][layer], one stage for each place of the chain, whatever layers it will hold."""

    costs: tuple[tuple[LayerCost, ...], ...]
    "Of one microbatch."
    static_bytes: tuple[tuple[float, ...], ...]
    "Parameters, gradients and optimizer state."
    limit_bytes: tuple[float, ...]
    "Per stage: memory of its smallest device without the workspace."

    def times_s(self) -> list[list[float]]:
        """[stage][layer]: forward and backward of one microbatch."""
        return [[cost.forward_s + cost.input_s + cost.weight_s for cost in row] for row in self.costs]

    def memory_bytes(self, flights: list[int]) -> list[list[float]]:
        """[stage][layer]: what stays, and what `flights[stage]` microbatches keep."""
        return [
            [static + flight * cost.saved_bytes for static, cost in zip(statics, costs, strict=True)]
            for statics, costs, flight in zip(self.static_bytes, self.costs, flights, strict=True)
        ]


def cost_cuts(decisions: Decisions, tables: LayerTables) -> tuple[int, ...]:
    """The first layer of every stage but the first, so that the slowest stage is as fast as can be within memory.

    If no cut fits the memory, the fastest cut without that limit: whoever simulates it says what is missing.
    """
    count = decisions.stage_count
    if count == 1:
        return ()
    flights = [in_flight(decisions.schedule, stage, count, decisions.microbatches) for stage in range(count)]
    times, memory = tables.times_s(), tables.memory_bytes(flights)
    bounds = partition(times, memory, tables.limit_bytes) or partition(times, memory)
    assert bounds is not None, "without limits some cut always exists"
    return bounds[1:-1]


def layer_tables(
    job: Job, decisions: Decisions, programs: Programs, module: str, network: Network, layers: LayerCosts
) -> LayerTables:
    """What every layer of the module would cost on the devices of every stage."""
    probes = _probes(job, decisions, programs, module)
    known: dict[object, tuple[tuple[LayerCost, ...], tuple[float, ...]]] = {}
    rows, statics, limits = [], [], []
    for stage, probe in enumerate(probes):
        kinds = tuple(sorted({network.kinds[device].name for device in probe.group.devices}))
        key: object = (kinds, probe.recompute) if probe.group.axis("shard").size == 1 else stage
        if key not in known:
            costs = layer_costs(probe, job.precision, network, layers)
            known[key] = (tuple(costs), _statics(probe, job, programs, module, decisions))
        rows.append(known[key][0])
        statics.append(known[key][1])
        limits.append(min(network.kinds[device].memory_bytes for device in probe.group.devices) - WORKSPACE_BYTES)
    return LayerTables(tuple(rows), tuple(statics), tuple(map(float, limits)))


def _probes(job: Job, decisions: Decisions, programs: Programs, module: str) -> list[StageWork]:
    """A stage of all layers on the devices of every stage."""
    layers = programs.modules[module].layers
    graphs = tuple(programs.program(layer, decisions.sharding, decisions.shards).graphs for layer in layers)
    counts = programs.counts(layers, decisions.sharding, decisions.shards)
    runs = split(job.batch // decisions.microbatches, decisions.replicas)
    groups = [group.group() for group in make_groups(decisions)]
    probe = StageWork(
        lane=0,
        group=groups[0],
        layers=graphs,
        rows=tuple(stop - start for start, stop in runs),
        slices=(job.sequence,),
        recompute=decisions.recompute_of(0),
        parameters=counts,
        split_state=decisions.zero1 and len(decisions.replicas) > 1,
    )
    return [
        replace(probe, lane=lane, group=groups[lane], recompute=decisions.recompute_of(stage))
        for stage, lane in enumerate(decisions.lane_of_stage)
    ]


def _statics(probe: StageWork, job: Job, programs: Programs, module: str, decisions: Decisions) -> tuple[float, ...]:
    """Bytes that stay of each layer alone, on the shard position that stores most."""
    per_element = COMPUTE_BYTES[job.precision] + GRADIENT_BYTES[job.precision]
    per_element_state = STATE_BYTES[job.precision] * state_share(probe)
    result = []
    for layer in programs.modules[module].layers:
        counts = programs.counts((layer,), decisions.sharding, decisions.shards)
        result.append(
            max(
                trainable * (per_element + per_element_state) + frozen * COMPUTE_BYTES[job.precision]
                for trainable, frozen in zip(counts.trainable, counts.frozen, strict=True)
            )
        )
    return tuple(result)
