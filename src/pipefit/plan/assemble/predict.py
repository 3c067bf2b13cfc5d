"""Simulation of a plan: its timeline, prediction and critical path. All predictions are made here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum, isfinite

from pipefit.cluster.types import Cluster
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import best_costs
from pipefit.cost.compute.roofline import LayerCosts
from pipefit.cost.memory.lanes import lane_limits, lane_parts
from pipefit.cost.memory.step_end import end_bytes
from pipefit.cost.pipeline.contention import with_contention
from pipefit.cost.pipeline.table import cost_table
from pipefit.cost.types import CostTable
from pipefit.cost.work import BUCKET_BYTES, PipelineWork
from pipefit.model.analysis.totals import graph_flops
from pipefit.model.graph import Model
from pipefit.model.ops.kind import Flops
from pipefit.plan.assemble.packed_rows import frozen_layers, packed_symbols
from pipefit.plan.assemble.pipeline_work import pipeline_work, skeleton_from_plan
from pipefit.plan.assemble.shard_programs import ProgramCache
from pipefit.plan.types import KindPrediction, LanePrediction, Plan, PlanPrediction, SampleSpace, Stage
from pipefit.schedule.taskgraph.memory import MemoryCurve
from pipefit.simulate import Timeline, simulate_schedule
from pipefit.units import format_seconds

DOCUMENTS_NOTE = (
    "documents: kept apart; attention is costed as if they were joined, without skipping hidden keys: an upper bound"
)


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """Peak memory of the fullest device of one kind on one lane."""

    kind: str
    "Name of the kind; '' for all devices of the lane, if they hold the same."
    limit_bytes: float
    "Memory of the smallest of these devices."
    peak_bytes: float
    "Maximum over the timeline and the end of the iteration."
    static: Mapping[str, float]
    "Static memory, by part."
    curve: MemoryCurve

    @property
    def static_bytes(self) -> float:
        return fsum(self.static.values())


@dataclass(frozen=True)
class PlanSimulation:
    """A plan's timeline, with the costs and work that it was computed from."""

    timeline: Timeline
    costs: CostTable
    work: PipelineWork
    least_bytes: tuple[float, ...]
    "Per lane: the memory of its smallest device."

    @cached_property
    def device_peaks(self) -> tuple[tuple[DevicePeak, ...], ...]:
        """Per lane: peak memory of each device kind, the fullest relative to its limit first; one entry if all hold the
        same."""
        if not self.costs.kinds:
            ends = end_bytes(self.work, gloo=self.costs.receives_ahead)
            lane_arguments = zip(self.least_bytes, lane_parts(self.work), self.timeline.lane_memory, ends, strict=True)
            return tuple((_device_peak("", *arguments),) for arguments in lane_arguments)
        lanes: list[list[DevicePeak]] = [[] for _ in self.least_bytes]
        for kind in self.costs.kinds:
            curves = self.timeline.memory_under(kind.table)
            kind_lanes = zip(kind.limit_bytes.tolist(), kind.parts, curves, kind.end_bytes.tolist(), strict=True)
            for lane, arguments in enumerate(kind_lanes):
                if isfinite(arguments[0]):
                    lanes[lane].append(_device_peak(kind.name, *arguments))
        return tuple(tuple(sorted(lane, key=lambda peak: -peak.peak_bytes / peak.limit_bytes)) for lane in lanes)

    @property
    def peaks_bytes(self) -> tuple[float, ...]:
        """Per lane: peak of the device that is fullest relative to its limit."""
        return tuple(lane[0].peak_bytes for lane in self.device_peaks)

    @property
    def limits_bytes(self) -> tuple[float, ...]:
        """Per lane: limit of the device that is fullest relative to its limit."""
        return tuple(lane[0].limit_bytes for lane in self.device_peaks)

    @property
    def fits_in_memory(self) -> bool:
        return all(device.peak_bytes <= device.limit_bytes for lane in self.device_peaks for device in lane)


def _device_peak(
    kind: str, limit_bytes: float, static: Mapping[str, float], curve: MemoryCurve, end_bytes: float
) -> DevicePeak:
    peak_bytes = max(float(curve.peak_bytes), fsum(static.values()) + curve.left_bytes + end_bytes)
    return DevicePeak(kind, limit_bytes, peak_bytes, static, curve)


def simulate_plan(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    *,
    programs: ProgramCache | None = None,
    network: Network | None = None,
    layers: LayerCosts | None = None,
    bucket_bytes: float = BUCKET_BYTES,
) -> PlanSimulation:
    """Simulate the plan's lowered lanes, with costs of its stages and links.

    `programs`, `network` and `layers` default to those of the model and the cluster.
    """
    network = network or Network(cluster)
    work = replace(
        pipeline_work(skeleton_from_plan(plan), programs or ProgramCache(model, plan.recipes)),
        bucket_bytes=bucket_bytes,
    )
    layers = layers or best_costs(cluster, graphs=model.graphs.values())
    costs = with_contention(cost_table(work, network, layers), work, network, layers)
    timeline = simulate_schedule(plan.to_schedule(), costs)
    return PlanSimulation(timeline, costs, work, lane_limits(work, network))


def add_prediction(plan: Plan, model: Model, simulation: PlanSimulation, lower_bound_s: float = 0.0) -> Plan:
    """Return the plan with its prediction."""
    timeline = simulation.timeline
    step_s = timeline.makespan_s
    lanes = tuple(
        lane_prediction(plan, simulation, lane, devices[0]) for lane, devices in enumerate(simulation.device_peaks)
    )
    prediction = PlanPrediction(
        step_s=step_s,
        compute_s=max(float(busy) for busy in timeline.busy_s),
        tokens_per_s=plan.job.batch * plan.job.sequence / step_s if step_s else 0.0,
        flops_per_step=step_flops(plan, model),
        lanes=lanes,
        lower_bound_s=lower_bound_s,
        binds=describe_critical_path(timeline, plan.stages),
        assumptions=(*simulation.costs.notes, *([DOCUMENTS_NOTE] if plan.job.documents == "apart" else [])),
    )
    return replace(plan, prediction=prediction)


def lane_prediction(plan: Plan, simulation: PlanSimulation, lane: int, device: DevicePeak) -> LanePrediction:
    """Return the prediction of a lane for one of its device kinds; kinds that hold other amounts are listed beside
    it."""
    members = {kind.name: kind.devices for kind in simulation.costs.kinds}
    other_peaks = [peak for peak in simulation.device_peaks[lane] if peak.kind != device.kind]
    return LanePrediction(
        peak_bytes=device.peak_bytes,
        limit_bytes=device.limit_bytes,
        static_bytes=device.static_bytes,
        busy_s=float(simulation.timeline.busy_s[lane]),
        idle_s=float(simulation.timeline.idle_s[lane]),
        parts={
            **{name: float(value) for name, value in device.static.items()},  # an int would reload with another hash
            "activations": device.peak_bytes - device.static_bytes,
        },
        kind=device.kind,
        others=tuple(
            KindPrediction(
                kind=peak.kind,
                devices=tuple(member for member in plan.lane_mesh(lane).devices if member in members[peak.kind]),
                peak_bytes=peak.peak_bytes,
                limit_bytes=peak.limit_bytes,
            )
            for peak in other_peaks
        ),
    )


def step_flops(plan: Plan, model: Model) -> float:
    """Return the model FLOPs of one step over all rows, without recomputation: forward and both gradients.

    Frozen layers have no weight gradients, and no gradients at all if no layer before them is trained.
    """
    spaces = {space.name: space for space in plan.spaces}
    without, total = frozen_layers(model), 0.0
    for module in model.modules:
        space = spaces.get(module.space)
        if space is None:
            continue
        symbols, times = _flop_sizes(space, plan)
        known: dict[str, Flops] = {}
        for index, layer in enumerate(module.layers):
            graph = model.graphs[layer.graph]
            if layer.graph not in known:
                known[layer.graph] = graph_flops(graph, symbols)
            flops = known[layer.graph]
            back = flops.input_gradient
            if not graph.parameters or any(parameter.trainable for parameter in graph.parameters):
                back += flops.weight_gradient
            total += times * (flops.forward + (0 if index < without[module.name] else back))
    return total


def _flop_sizes(space: SampleSpace, plan: Plan) -> tuple[Mapping[str, int], int]:
    """Return (sizes, number of repeats): one row of the space, or for unequal rows all tokens of the step at once."""
    if space.counts:
        return {"B": 1, "T": sum(space.counts), "squares": sum(space.squares)}, 1
    symbols = {"B": 1, "T": space.tokens or plan.job.sequence}
    return {**symbols, **dict(packed_symbols(plan.spaces, plan.job.batch, 1.0))}, space.rows


def describe_critical_path(timeline: Timeline, stages: Sequence[Stage]) -> str:
    """Return the largest shares of the simulated critical path, in words. Stages are named with their modules if there
    are several."""
    shares = critical_path_shares(timeline, stages)
    total_s = fsum(shares.values())
    if not total_s:
        return ""
    top = sorted(shares.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{value / total_s:.0%} {name} ({format_seconds(value)})" for name, value in top if value > 0)


def critical_path_shares(timeline: Timeline, stages: Sequence[Stage] = ()) -> Mapping[str, float]:
    """Return the seconds of the critical path by part: compute of each stage, transfers, reductions, optimizer."""
    shares: dict[str, float] = defaultdict(float)
    several = len({stage.module for stage in stages}) > 1
    names = [f"stage {index}{f' ({stage.module})' if several else ''}" for index, stage in enumerate(stages)]
    names = names or [f"stage {index}" for index in range(timeline.graph.schedule.num_stages)]
    for span in timeline.critical_path:
        action = span.action
        if action.kind in ("F", "I", "W", "B"):
            name = f"compute of {names[action.stage]}"
        elif action.kind.startswith("SEND"):
            ends = (action.stage, action.peer)
            name = f"link between stages {min(ends)} and {max(ends)}"
        elif action.kind in ("REDUCE", "GATHER"):
            name = f"gradient reduction of {names[action.stage]}" if action.kind == "REDUCE" else "parameter gather"
        else:
            name = "optimizer step"
        shares[name] += span.stop_s - span.start_s
    return shares
