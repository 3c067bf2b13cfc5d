"""What the simulator says of a plan: its timeline, its prediction, and what limits it. The only evaluator there is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipefit.cluster.types import Cluster
from pipefit.cost.contention import with_contention
from pipefit.cost.curves import best_costs
from pipefit.cost.memory_end import end_bytes
from pipefit.cost.network import Network
from pipefit.cost.overlap import BUCKET_BYTES
from pipefit.cost.roofline import LayerCosts
from pipefit.cost.table import cost_table, lane_parts
from pipefit.cost.types import CostTable
from pipefit.cost.work import PipelineWork
from pipefit.model.graph import Model
from pipefit.model.ops import graph_flops
from pipefit.plan.sharded import Programs
from pipefit.plan.types import LanePrediction, Plan, Prediction
from pipefit.plan.work import parts_of, pipeline_work
from pipefit.simulate import Timeline, simulate
from pipefit.units import format_seconds


@dataclass(frozen=True, slots=True)
class Simulation:
    """A plan's timeline with what it was computed from."""

    timeline: Timeline
    costs: CostTable
    work: PipelineWork
    limits_bytes: tuple[float, ...]
    "Per lane: the memory of its smallest device."

    @property
    def peaks_bytes(self) -> tuple[float, ...]:
        """Per lane: the most of its timeline, or of the end of the iteration."""
        ends = end_bytes(self.work, gloo=self.costs.receives_ahead)
        stays = self.costs.static_bytes
        return tuple(
            max(float(peak), float(static) + end)
            for peak, static, end in zip(self.timeline.peak_bytes, stays, ends, strict=True)
        )

    @property
    def fits(self) -> bool:
        return all(peak <= limit for peak, limit in zip(self.peaks_bytes, self.limits_bytes, strict=True))


def simulate_plan(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    *,
    programs: Programs | None = None,
    network: Network | None = None,
    layers: LayerCosts | None = None,
    bucket_bytes: float = BUCKET_BYTES,
) -> Simulation:
    """Run the plan's own lowered lanes through the simulator, with costs for its own stages and links.

    `programs`, `network` and `layers` are made from the model and the cluster where they are not handed in.
    """
    network = network or Network(cluster)
    work = replace(pipeline_work(parts_of(plan), programs or Programs(model)), bucket_bytes=bucket_bytes)
    layers = layers or best_costs(cluster)
    costs = with_contention(cost_table(work, network, layers), work, network, layers)
    timeline = simulate(plan.order.schedule(), costs)
    return Simulation(timeline, costs, work, lane_limits(work, network))


def lane_limits(work: PipelineWork, network: Network) -> tuple[float, ...]:
    """Bytes that a process may use on every lane: of its smallest device."""
    limits = [float("inf")] * work.lanes
    for stage in work.stages:
        smallest = min(network.kinds[device].memory_bytes for device in stage.group.devices)
        limits[stage.lane] = min(limits[stage.lane], float(smallest))
    return tuple(limits)


def predict(plan: Plan, model: Model, simulation: Simulation, lower_bound_s: float = 0.0) -> Plan:
    """The plan with its prediction filled in."""
    timeline = simulation.timeline
    step_s = timeline.makespan_s
    peaks_bytes = simulation.peaks_bytes
    lanes = tuple(
        LanePrediction(
            peak_bytes=peaks_bytes[lane],
            limit_bytes=simulation.limits_bytes[lane],
            static_bytes=float(simulation.costs.static_bytes[lane]),
            busy_s=float(timeline.busy_s[lane]),
            idle_s=float(timeline.idle_s[lane]),
            parts={
                **{name: float(value) for name, value in parts.items()},  # an int would reload as another hash
                "activations": peaks_bytes[lane] - float(simulation.costs.static_bytes[lane]),
            },
        )
        for lane, parts in enumerate(lane_parts(simulation.work))
    )
    prediction = Prediction(
        step_s=step_s,
        compute_s=max(float(busy) for busy in timeline.busy_s),
        tokens_per_s=plan.job.batch * plan.job.sequence / step_s if step_s else 0.0,
        flops_per_step=step_flops(plan, model),
        lanes=lanes,
        lower_bound_s=lower_bound_s,
        binds=what_binds(timeline),
        assumptions=simulation.costs.notes,
    )
    return replace(plan, prediction=prediction)


def step_flops(plan: Plan, model: Model) -> float:
    """Model FLOPs of one step over all rows, without recomputation: forward and both gradients."""
    spaces = {space.name: space for space in plan.spaces}
    total = 0.0
    for module in model.modules:
        space = spaces.get(module.space)
        if space is None:
            continue
        symbols = {"B": 1, "T": space.tokens or plan.job.sequence}
        known: dict[str, int] = {}
        for layer in module.layers:
            if layer.graph not in known:
                known[layer.graph] = graph_flops(model.graphs[layer.graph], symbols).total
            total += known[layer.graph] * space.rows
    return total


def what_binds(timeline: Timeline) -> str:
    """What the step time hangs on: the largest shares of the simulated critical path, in words."""
    shares = path_shares(timeline)
    whole = sum(shares.values())
    if not whole:
        return ""
    top = sorted(shares.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {value / whole:.0%} ({format_seconds(value)})" for name, value in top if value > 0)


def path_shares(timeline: Timeline) -> Mapping[str, float]:
    """Seconds of the critical path by what they are: compute of each stage, transfers, reductions, optimizer."""
    shares: dict[str, float] = defaultdict(float)
    for span in timeline.critical_path:
        action = span.action
        if action.kind in ("F", "I", "W", "B"):
            name = f"compute of stage {action.stage}"
        elif action.kind.startswith("SEND"):
            ends = (action.stage, action.peer)
            name = f"link between stages {min(ends)} and {max(ends)}"
        elif action.kind in ("REDUCE", "GATHER"):
            name = f"gradient reduction of stage {action.stage}" if action.kind == "REDUCE" else "parameter gather"
        else:
            name = "optimizer step"
        shares[name] += span.stop_s - span.start_s
    return shares
