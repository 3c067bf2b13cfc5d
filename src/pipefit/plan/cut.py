"""Where to cut a chain of layers into stages: the exact partition, over the costs of every layer on every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipefit.cost.memory import COMPUTE_BYTES, GRADIENT_BYTES, STATE_BYTES, WORKSPACE_BYTES
from pipefit.cost.network import Network
from pipefit.cost.roofline import LayerCosts
from pipefit.cost.table import layer_costs, state_share
from pipefit.cost.types import Array
from pipefit.cost.work import StageWork
from pipefit.layout import Group, split
from pipefit.plan.bounds import in_flight
from pipefit.plan.decisions import Decisions
from pipefit.plan.partition import partition
from pipefit.plan.sharded import Programs
from pipefit.plan.structure import make_groups
from pipefit.plan.types import Job


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Every layer of a module on the devices of one stage: arrays over layers, of one microbatch."""

    forward_s: Array
    backward_s: Array
    saved_bytes: Array
    static_bytes: Array
    "Parameters, gradients and optimizer state; what an earlier layer shares counts there."
    passing_bytes: float
    "The largest passing memory of a layer."
    limit_bytes: float
    "Memory of the smallest device, without the workspace."


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut of the layers, with the closed-form figures of its stages."""

    cuts: tuple[int, ...]
    "First layer of every stage but the first."
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    floor_bytes: tuple[float, ...]
    "Least memory of each stage, workspace included."
    limit_bytes: tuple[float, ...]
    fits: bool
    "False where it is certain that this cut cannot fit, and no other cut either."


class Cutter:
    """Cuts of one module on one cluster. What layers cost on a kind of stage is worked out once."""

    def __init__(self, programs: Programs, module: str, network: Network, layers: LayerCosts) -> None:
        self.programs = programs
        self.module = module
        self.network = network
        self.layers = layers
        self._rows: dict[object, LayerRow] = {}
        self._cuts: dict[object, Cut] = {}
        self._one_kind = len({kind.name for kind in network.kinds}) == 1

    def cut(self, job: Job, decisions: Decisions) -> Cut:
        """The cut that makes the slowest stage as fast as can be within memory, or the one that is pinned.

        Within the closed form of memory, that is, which is a lower bound: the simulator may still find that the
        plan does not fit. If no cut fits, the one that needs least memory.
        """
        rows = self.rows(job, decisions)
        count = decisions.stage_count
        alone = len({*decisions.lane_of_stage}) == count
        flights = [
            in_flight(decisions.schedule, stage, count, decisions.microbatches) if alone else 1
            for stage in range(count)
        ]
        key = (tuple(map(id, rows)), tuple(flights), decisions.cuts)
        if key not in self._cuts:
            self._cuts[key] = _best_cut(rows, flights, decisions.cuts)
        return self._cuts[key]

    def rows(self, job: Job, decisions: Decisions) -> list[LayerRow]:
        """What every layer would cost on the devices of every stage."""
        groups = [group.group() for group in make_groups(decisions)]
        result = []
        for stage, lane in enumerate(decisions.lane_of_stage):
            devices = groups[lane].devices
            kinds = tuple(self.network.kinds[device].name for device in (devices[:1] if self._one_kind else devices))
            key = (
                (job.precision, job.sequence, job.batch // decisions.microbatches),
                (decisions.replicas, decisions.shards, decisions.sharding, decisions.zero1),
                decisions.recompute_of(stage),
                kinds,
                devices if len(decisions.shards) > 1 else None,
            )
            if key not in self._rows:
                self._rows[key] = self._row(self._probe(job, decisions, stage, groups[lane]), job, decisions)
            result.append(self._rows[key])
        return result

    def floor_s(self, job: Job, decisions: Decisions) -> tuple[float, float]:
        """(all layers, the slowest layer): seconds of one microbatch, each layer where it is fastest."""
        rows = self.rows(job, decisions)
        both = [row.forward_s + row.backward_s for row in rows]
        least = np.minimum.reduce(both)
        return float(least.sum()), float(least.max())

    def _probe(self, job: Job, decisions: Decisions, stage: int, group: Group) -> StageWork:
        """A stage of all layers on these devices."""
        layers = self.programs.modules[self.module].layers
        runs = split(job.batch // decisions.microbatches, decisions.replicas)
        return StageWork(
            lane=0,
            group=group,
            layers=tuple(self.programs.program(layer, decisions.sharding, decisions.shards).graphs for layer in layers),
            rows=tuple(stop - start for start, stop in runs),
            slices=(job.sequence,),
            recompute=decisions.recompute_of(stage),
            parameters=self.programs.counts(layers, decisions.sharding, decisions.shards),
            split_state=decisions.zero1 and len(decisions.replicas) > 1,
        )

    def _row(self, probe: StageWork, job: Job, decisions: Decisions) -> LayerRow:
        costs = layer_costs(probe, job.precision, self.network, self.layers)
        smallest = min(self.network.kinds[device].memory_bytes for device in probe.group.devices)
        return LayerRow(
            forward_s=np.array([cost.forward_s for cost in costs]),
            backward_s=np.array([cost.input_s + cost.weight_s for cost in costs]),
            saved_bytes=np.array([cost.saved_bytes for cost in costs]),
            static_bytes=np.array(self._statics(probe, job, decisions)),
            passing_bytes=max(max(cost.forward_peak_bytes, cost.backward_peak_bytes) for cost in costs),
            limit_bytes=float(smallest - WORKSPACE_BYTES),
        )

    def _statics(self, probe: StageWork, job: Job, decisions: Decisions) -> list[float]:
        """Bytes that stay of each layer, on the shard position that stores most of it."""
        width = COMPUTE_BYTES[job.precision]
        per_element = width + GRADIENT_BYTES[job.precision] + STATE_BYTES[job.precision] * state_share(probe)
        result = []
        seen: set[str] = set()
        for layer in self.programs.modules[self.module].layers:
            names = {*layer.parameters.values()}
            counts = self.programs.counts((layer,), decisions.sharding, decisions.shards)
            stored = max(
                trainable * per_element + frozen * width
                for trainable, frozen in zip(counts.trainable, counts.frozen, strict=True)
            )
            result.append(0.0 if names & seen else stored)
            seen |= names
        return result


def _best_cut(rows: Sequence[LayerRow], flights: Sequence[int], pinned: tuple[int, ...]) -> Cut:
    layers, stages = len(rows[0].forward_s), len(rows)
    times = np.stack([row.forward_s + row.backward_s for row in rows])
    memory = np.stack([row.static_bytes + flight * row.saved_bytes for row, flight in zip(rows, flights, strict=True)])
    limits = np.array([row.limit_bytes for row in rows])
    passing = np.array([row.passing_bytes for row in rows])
    fits = True
    bounds: tuple[int, ...] | None
    if pinned or stages == 1:
        bounds = (0, *pinned, layers)
        fits = all(
            memory[stage, start:stop].sum() <= limits[stage] for stage, (start, stop) in enumerate(pairwise(bounds))
        )
    else:
        bounds = partition(times, memory, limits - passing) or partition(times, memory, limits)
        if bounds is None:
            fits = False
            bounds = partition(memory)
            assert bounds is not None, "without limits some cut always exists"
    runs = list(pairwise(bounds))
    return Cut(
        cuts=bounds[1:-1],
        forward_s=tuple(float(row.forward_s[a:b].sum()) for row, (a, b) in zip(rows, runs, strict=True)),
        backward_s=tuple(float(row.backward_s[a:b].sum()) for row, (a, b) in zip(rows, runs, strict=True)),
        floor_bytes=tuple(float(memory[s, a:b].sum()) + WORKSPACE_BYTES for s, (a, b) in enumerate(runs)),
        limit_bytes=tuple(row.limit_bytes + WORKSPACE_BYTES for row in rows),
        fits=fits,
    )
