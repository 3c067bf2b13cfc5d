"""Times of the stages of a cut with the collectives of ZeRO-2 and ZeRO-3, before the stage has a cost table.

The times of layers in a cut lack these collectives, which decide most comparisons on slow links. The costs are those of
the cost table, so the bound of a cut with these times is never above that of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import fsum
from typing import NamedTuple

import numpy as np

from pipefit.cost.pipeline.state_traffic import StateTraffic, stage_seconds, state_traffic
from pipefit.cost.types import Array
from pipefit.layout import Mesh
from pipefit.optimizers.sharded_state import shards_gradients, shards_parameters
from pipefit.plan.assemble.structure import make_groups
from pipefit.plan.cutting.cutter import LayerCutter
from pipefit.plan.cutting.layer_cut import LayerCut
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.schedule.families import family_facts


class ModuleTraffic(NamedTuple):
    """The collectives of all layers of a module, each once."""

    gather_s: float
    reduce_s: float
    overlap: float
    "Part of the time beside the computation that costs nothing."


NO_TRAFFIC = ModuleTraffic(0.0, 0.0, 1.0)


class TrafficBounds:
    """The collectives of all layers on each group of devices, priced once."""

    def __init__(self, cutter: LayerCutter, job: Job) -> None:
        self.cutter = cutter
        self.job = job
        self._known: dict[object, StateTraffic | None] = {}
        self._modules: dict[object, ModuleTraffic] = {}

    def stage_times_s(self, decisions: ParallelConfig, cut: LayerCut) -> tuple[Sequence[float], Sequence[float]]:
        """Return (seconds forward, seconds backward) of a microbatch on every stage of a cut.

        The times are those of the cut where replicas hold complete layers, and on devices of several kinds.
        """
        if not shards_gradients(decisions.sharded_state) or self.cutter.fleet.is_mixed:
            return cut.forward_s, cut.backward_s
        rows = self.cutter.stage_rows(self.job, decisions)
        traffic_of_stage = self._stage_traffic(decisions, cut.cuts)
        runs = pairwise((0, *cut.cuts, len(rows[0].layers)))
        forward_s, backward_s = [], []
        for run, row, traffic in zip(runs, rows, traffic_of_stage, strict=True):
            if traffic is None:
                return cut.forward_s, cut.backward_s
            seconds = stage_seconds(row.layers[slice(*run)], traffic)
            forward_s.append(seconds.forward_s)
            is_fused = family_facts(decisions.schedule).fused
            parted_s = seconds.input_s + seconds.weight_s
            backward_s.append(seconds.backward_s if is_fused else min(seconds.backward_s, parted_s))
        return forward_s, backward_s

    def add_to_slices(self, decisions: ParallelConfig, forward_s: Array, backward_s: Array) -> tuple[Array, Array]:
        """Return lower bounds of the times [slice, stage] of slices with these collectives, which every slice repeats.

        The layers of a stage hide at most all of their time behind all of the stage's collectives.
        """
        if not shards_gradients(decisions.sharded_state) or self.cutter.fleet.is_mixed:
            return forward_s, backward_s
        traffic = self._stage_traffic(decisions, decisions.cuts)
        if any(entry is None for entry in traffic):
            return forward_s, backward_s
        gather_s = np.array([fsum(entry.gather_s) for entry in traffic if entry])
        again_s = np.array([fsum(entry.gather_again_s) for entry in traffic if entry])
        reduce_s = np.array([fsum(entry.reduce_s) for entry in traffic if entry])
        overlap = min(entry.overlap for entry in traffic if entry)
        return hidden_s(forward_s, gather_s, overlap), hidden_s(backward_s, again_s + reduce_s, overlap)

    def module_traffic(self, decisions: ParallelConfig) -> ModuleTraffic:
        """Return the least seconds of the collectives of all layers on any lane; nothing where replicas hold complete
        layers. Stages and cuts do not matter."""
        if not shards_gradients(decisions.sharded_state):
            return NO_TRAFFIC
        lanes, context, shards = decisions.lane_count, decisions.context, decisions.shards
        key = (
            (decisions.replicas, context, shards, decisions.sharding_key(0), lanes),
            (decisions.inner, decisions.devices, decisions.sharded_state, decisions.state_group),
        )
        if key not in self._modules:
            groups = [group.to_mesh() for group in make_groups(decisions)]
            traffic_of_lane = [self._traffic_of(decisions, group, lane) for lane, group in enumerate(groups)]
            traffic = {id(entry): entry for entry in traffic_of_lane if entry}.values()
            self._modules[key] = ModuleTraffic(
                gather_s=min((fsum(entry.gather_s) for entry in traffic), default=0.0),
                reduce_s=min((fsum(entry.reduce_s) for entry in traffic), default=0.0),
                overlap=max((entry.overlap for entry in traffic), default=1.0),
            )
        return self._modules[key]

    def _stage_traffic(self, decisions: ParallelConfig, cuts: Sequence[int]) -> list[StateTraffic | None]:
        """Return the collectives of every stage; None where replicas hold complete layers."""
        groups = [group.to_mesh() for group in make_groups(decisions)]
        count = len(self.cutter.programs.modules[self.cutter.module].layers)
        traffic_of_stage = []
        for run, lane in zip(pairwise((0, *cuts, count)), decisions.lane_of_stage, strict=True):
            traffic = self._traffic_of(decisions, groups[lane], lane)
            traffic_of_stage.append(traffic and traffic.take_layers(*run))
        return traffic_of_stage

    def _traffic_of(self, decisions: ParallelConfig, group: Mesh, lane: int) -> StateTraffic | None:
        """Return the collectives of all layers of the module on the devices of a lane."""
        network, program = self.cutter.network, (decisions.sharding_key(lane), decisions.shards_of(lane))
        group = replace(group, devices=network.representative_devices(group.devices))
        key = group, program, decisions.sharded_state, decisions.state_group
        if key not in self._known:
            counts, gathers = self.cutter.sharded_counts(*program), shards_parameters(decisions.sharded_state)
            probe = replace(
                self.cutter.probe_stage(self.job, group, (1,) * len(decisions.replicas), "none", *program),
                sharded_state=decisions.sharded_state,
                state_group=decisions.state_group,
                sharded_elements=counts.elements,
                sharded_spread=counts.spread,
                sharded_frozen=counts.frozen if gathers else (),
                sharded_frozen_spread=counts.frozen_spread if gathers else (),
            )
            self._known[key] = state_traffic(probe, self.job.precision, network)
        return self._known[key]


def hidden_s(computed_s: Array, collected_s: Array, overlap: float) -> Array:
    """Return the least seconds of computation and collectives of which `overlap` of the shorter part is free."""
    return computed_s + collected_s - overlap * np.minimum(computed_s, collected_s)
