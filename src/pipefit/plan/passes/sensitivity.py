"""Gain from a better cluster: links twice as fast, or one more host. Both are simulated.

Faster links: the same plan under the costs of the faster links. One more host: a search on the extended cluster over
replicas, stages, microbatches and cuts, with the schedule, recomputation and ZeRO-1 of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipefit.cluster.measured import ClusterMeasurements, PortSharing
from pipefit.cluster.types import Cluster, Link, Rail
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import best_costs
from pipefit.cost.pipeline.contention import with_contention
from pipefit.cost.pipeline.table import cost_table
from pipefit.errors import PlanError
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.fitted_orders import best_plans
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import ClusterSensitivity, Job
from pipefit.simulate import simulate_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityBudget:
    """The better clusters that are compared, and the work on planning for one of them again."""

    link_speedup: float = 2.0
    "Factor by which all links are faster."
    fitted_layouts: int = 1
    "Layouts that get fitted orders on the larger cluster."


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
    if constraints.devices is None:
        words, cluster = extend_cluster(context.cluster)
        chosen = best.decisions
        held = constraints.with_defaults(
            schedule=chosen.schedule, recompute=chosen.recompute, sharded_state=chosen.sharded_state
        )
        try:
            grown = context.with_cluster(cluster)
            better = best_plans(grown, job, held, top=1, layouts=SENSITIVITY_BUDGET.fitted_layouts).fitting
        except PlanError:
            better = ()
        step_s = min((best.step_s, *(plan.step_s for plan in better)))
        changes.append(
            ClusterSensitivity(
                change=words, step_s=step_s, how="planned again, same schedule, recomputation and ZeRO-1"
            )
        )
    return tuple(changes)


def faster_links(cluster: Cluster, factor: float = SENSITIVITY_BUDGET.link_speedup) -> Cluster:
    """Return the cluster with every message `factor` times as fast: latency, bandwidth, and the measured curves."""
    measured = cluster.measured
    return replace(
        cluster,
        links={name: _faster_link(link, factor) for name, link in cluster.links.items()},
        rails=tuple(
            replace(
                rail,
                latency_s=_scale_matrix(rail.latency_s, 1 / factor),
                bandwidth_bytes_per_s=_scale_matrix(rail.bandwidth_bytes_per_s, factor),
            )
            for rail in cluster.rails
        ),
        measured=None if measured is None else _faster_curves(measured, factor),
    )


def extend_cluster(cluster: Cluster) -> tuple[str, Cluster]:
    """Return (description, the cluster with one more host like the last one).

    A single host gets one more device instead, since nothing is known of a network then.
    """
    last = cluster.hosts[-1]
    if len(cluster.hosts) == 1:
        grown = replace(last, devices=last.devices + 1)
        return "one more device like the last", replace(cluster, hosts=(grown,))
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


def _faster_link(link: Link, factor: float) -> Link:
    return replace(link, latency_s=link.latency_s / factor, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)


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
                time_s=tuple(_scale_matrix(matrix, 1 / factor) for matrix in curve.time_s),
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


def _scale_matrix(matrix: Sequence[Sequence[float]], factor: float) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(entry * factor for entry in row) for row in matrix)


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
