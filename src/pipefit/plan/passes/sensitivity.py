"""Gain from a better cluster: links twice as fast, twice the memory, one more host, or the next kind of device.

Faster links: the same plan under the costs of the faster links. The others: a search on the better cluster over
replicas, stages, microbatches and cuts, with the schedule and shards of the plan, and on more hosts with its
recomputation and ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import ge

from pipefit.cluster.calibration import scale_links, scale_matrix
from pipefit.cluster.catalogue import DataSheet, device_sheets
from pipefit.cluster.kinds import data_sheet_kind, sheet_peaks
from pipefit.cluster.measured import ClusterMeasurements, PortSharing
from pipefit.cluster.spec import uniform_rail
from pipefit.cluster.types import Cluster, Rail, is_processor
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import best_costs
from pipefit.cost.pipeline.contention import with_contention
from pipefit.cost.pipeline.table import cost_table
from pipefit.errors import PlanError
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.search import search_plans
from pipefit.plan.passes.search_budget import SearchBudget
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import ClusterSensitivity, Job
from pipefit.precision import PRODUCT_TYPE, Precision
from pipefit.simulate import simulate_schedule
from pipefit.units import format_bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityBudget:
    """The better clusters that are compared, and the work on planning for one of them again."""

    link_speedup: float = 2.0
    "Factor by which all links are faster."
    memory_factor: int = 2
    "Factor by which the memory of all devices is larger."
    network_bytes_per_s: float = 50e9
    "Assumed bandwidth of a host in a network of two, where the cluster has a single host: 400 Gbit/s."
    network_latency_s: float = 1e-5
    "Assumed latency of that network."
    free_depth_devices: int = 128
    "Devices up to which the number of stages may change."
    search: SearchBudget = field(
        default_factory=lambda: SearchBudget(
            order_actions=8_000, sliced_actions=4_000, infeasible_actions=16_000, alternative_simulations=0
        )
    )
    "Work on each cluster that is planned for again."


SENSITIVITY_BUDGET = SensitivityBudget()


def analyse_sensitivity(
    context: PlannerContext, job: Job, constraints: Constraints, best: EvaluatedPlan
) -> tuple[ClusterSensitivity, ...]:
    """Return the step times on the better clusters, without the changes that do not apply to this cluster."""
    changes = []
    if best.decisions.device_count > 1:
        changes.append(
            ClusterSensitivity(
                change="links twice as fast",
                step_s=_on_faster_links(context, best),
                how="the same plan, simulated again",
            )
        )
    chosen = best.decisions
    held = constraints.with_defaults(
        schedule=chosen.schedule,
        slices=chosen.slices or 1,
        recompute=chosen.recompute[:1],
        sharded_state=chosen.sharded_state,
        state_group=chosen.hybrid_group or None,
    )
    if not chosen.lane_shards:
        held = held.with_defaults(shards=chosen.shards, sharding=chosen.sharding)
    if context.network.devices > SENSITIVITY_BUDGET.free_depth_devices:
        held = held.with_defaults(stages=chosen.stage_count)
    looser = replace(
        held,
        recompute=constraints.recompute,
        sharded_state=constraints.sharded_state,
        state_group=constraints.state_group,
    )
    bigger = larger_memory(context.cluster)
    changes.append(_plan_again(context, bigger, job, looser, best, "twice the memory"))
    if constraints.devices is None:
        words, cluster = extend_cluster(context.cluster)
        changes.append(_plan_again(context, cluster, job, held, best, words))
    newer = next_kind(context.cluster, job.precision)
    if newer is not None:
        changes.append(_plan_again(context, newer[1], job, looser, best, f"{newer[0]} devices"))
    return tuple(changes)


def _plan_again(
    context: PlannerContext, cluster: Cluster, job: Job, held: Constraints, best: EvaluatedPlan, change: str
) -> ClusterSensitivity:
    """Return the step of the best plan on another cluster; no plan there is slower than the one on this cluster."""
    try:
        grown = PlannerContext(context.model, cluster, None if cluster.measured is None else context.layers)
        grown.programs, grown.context_parts = context.programs, context.context_parts
        better = search_plans(grown, job, held, top=1, budget=SENSITIVITY_BUDGET.search).fitting
    except PlanError:
        better = ()
    step_s = min((best.step_s, *(plan.step_s for plan in better)))
    return ClusterSensitivity(change=change, step_s=step_s, how="planned again")


def larger_memory(cluster: Cluster, factor: int = SENSITIVITY_BUDGET.memory_factor) -> Cluster:
    """Return the cluster whose devices have `factor` times the memory."""
    kinds = {name: replace(kind, memory_bytes=factor * kind.memory_bytes) for name, kind in cluster.kinds.items()}
    return replace(cluster, kinds=kinds)


NEAR_MIB = 4096
"""Memories within this many MiB of each other are alike: drivers report less of an H100 than of an A100 of 80 GB."""


def next_kind(cluster: Cluster, precision: Precision = "bfloat16") -> tuple[str, Cluster] | None:
    """Return (name, the cluster with the next better kind of device of the data sheets in place of its only kind).

    The next kind is the one with the least compute of those of the same vendor with more compute or memory and no less
    of either, nor of memory bandwidth or links, and with products in the precision. None for several kinds, for
    measured clusters, and without a data sheet or a better one.
    """
    sheets, name = device_sheets(), next(iter(cluster.kinds))
    if len(cluster.kinds) > 1 or cluster.measured is not None or name not in sheets:
        return None
    product_type, vendor = PRODUCT_TYPE[precision], sheets[name].vendor
    known = {
        key: _comparable_figures(sheet)
        for key, sheet in sheets.items()
        if sheet.vendor == vendor and product_type in sheet_peaks(sheet)
    }
    figures = _comparable_figures(sheets[name])
    better = {name: values for name, values in known.items() if values > figures and all(map(ge, values, figures))}
    if not better:
        return None
    name = min(better, key=better.__getitem__)
    device_kind, link = data_sheet_kind(name)
    hosts = tuple(replace(host, kind=device_kind.name) for host in cluster.hosts)
    links = dict.fromkeys(cluster.links, link)
    return name, replace(cluster, kinds={device_kind.name: device_kind}, hosts=hosts, links=links)


def _comparable_figures(sheet: DataSheet) -> tuple[float, ...]:
    memory = round(sheet.memory_mib / NEAR_MIB)
    return sheet_peaks(sheet)["bfloat16"], memory, sheet.memory_gb_per_s, sheet.link.gb_per_s


def faster_links(cluster: Cluster, factor: float = SENSITIVITY_BUDGET.link_speedup) -> Cluster:
    """Return the cluster with every message `factor` times as fast: latency, bandwidth, and the measured curves."""
    measured = cluster.measured
    faster = scale_links(cluster, factor, 1 / factor)
    return faster if measured is None else replace(faster, measured=_faster_curves(measured, factor))


def extend_cluster(cluster: Cluster) -> tuple[str, Cluster]:
    """Return (description, the cluster with one more host like the last one).

    A single host of accelerators is joined to the second one by an assumed network. A host of processes gets one more
    process.
    """
    last = cluster.hosts[-1]
    if len(cluster.hosts) == 1 and is_processor(cluster.kinds[last.kind]):
        grown = replace(last, devices=last.devices + 1)
        return "one more process", replace(cluster, hosts=(grown,))
    if len(cluster.hosts) == 1:
        bandwidth = SENSITIVITY_BUDGET.network_bytes_per_s
        rail = uniform_rail("network", 2, SENSITIVITY_BUDGET.network_latency_s, bandwidth)
        hosts = (last, replace(last, name=_copy_name(last.name)))
        words = f"one more host, joined by {format_bandwidth(bandwidth)} (assumed)"
        return words, replace(cluster, hosts=hosts, rails=(rail,))
    measured = cluster.measured
    if measured is not None:
        rows = {
            name: replace(
                curve, time_s=tuple(map(_widen_matrix, curve.time_s)), sharing=_extend_ports(curve.sharing, last.name)
            )
            for name, curve in measured.rails.items()
        }
        measured = replace(measured, rails=rows)
    host = replace(last, name=_copy_name(last.name))
    rails = tuple(_grow_rail(rail) for rail in cluster.rails)
    return "one more host", replace(cluster, hosts=(*cluster.hosts, host), rails=rails, measured=measured)


def _extend_ports(sharing: PortSharing | None, last: str) -> PortSharing | None:
    """Return the ports with those of the last host repeated for the new host, which shares the same uplinks."""
    if sharing is None:
        return None
    return replace(
        sharing,
        out_bytes_per_s=(*sharing.out_bytes_per_s, sharing.out_bytes_per_s[-1]),
        out_shared=(*sharing.out_shared, sharing.out_shared[-1]),
        in_bytes_per_s=(*sharing.in_bytes_per_s, sharing.in_bytes_per_s[-1]),
        in_shared=(*sharing.in_shared, sharing.in_shared[-1]),
        uplinks=tuple(
            replace(uplink, hosts=(*uplink.hosts, _copy_name(last))) if last in uplink.hosts else uplink
            for uplink in sharing.uplinks
        ),
    )


def _copy_name(name: str) -> str:
    return f"{name} again"


def _on_faster_links(context: PlannerContext, best: EvaluatedPlan) -> float:
    simulation = best.simulation
    network = Network(faster_links(context.cluster))
    # The context's layer costs cache collectives by their devices, at the speed of the original links.
    layers = best_costs(network.cluster, graphs=context.model.graphs.values())
    costs = cost_table(simulation.work, network, layers)
    costs = with_contention(costs, simulation.work, network, layers)
    return simulate_schedule(simulation.timeline.schedule, costs).makespan_s


def _faster_curves(measured: ClusterMeasurements, factor: float) -> ClusterMeasurements:
    return replace(
        measured,
        links={
            name: replace(curve, time_s=tuple(time_s / factor for time_s in curve.time_s))
            for name, curve in measured.links.items()
        },
        rails={
            name: replace(
                curve,
                time_s=tuple(scale_matrix(matrix, 1 / factor) for matrix in curve.time_s),
                sharing=None if curve.sharing is None else _wider_ports(curve.sharing, factor),
            )
            for name, curve in measured.rails.items()
        },
    )


def _wider_ports(sharing: PortSharing, factor: float) -> PortSharing:
    def scale_value(value: float | None) -> float | None:
        return None if value is None else value * factor

    return replace(
        sharing,
        out_bytes_per_s=tuple(value * factor for value in sharing.out_bytes_per_s),
        in_bytes_per_s=tuple(value * factor for value in sharing.in_bytes_per_s),
        uplinks=tuple(
            replace(
                uplink,
                up_bytes_per_s=scale_value(uplink.up_bytes_per_s),
                down_bytes_per_s=scale_value(uplink.down_bytes_per_s),
            )
            for uplink in sharing.uplinks
        ),
    )


def _grow_rail(rail: Rail) -> Rail:
    """Return the rail with one more row and column: those of the last host.

    Between the two hosts it has the values between the last host and the one before it.
    """
    return replace(
        rail,
        latency_s=_widen_matrix(rail.latency_s),
        bandwidth_bytes_per_s=_widen_matrix(rail.bandwidth_bytes_per_s),
        repeatability=_widen_matrix(rail.repeatability) if rail.repeatability else (),
    )


def _widen_matrix(matrix: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    rows = [[*row, row[-1]] for row in matrix]
    rows[-1][-1] = matrix[-1][-2]
    added = [*matrix[-1][:-1], matrix[-2][-1], matrix[-1][-1]]
    return tuple(map(tuple, (*rows, added)))
