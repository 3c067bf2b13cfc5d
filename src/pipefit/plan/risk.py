"""Plans under a memory correction: the probability of running out of memory, and the fastest plan that keeps it small.

The search counts bytes of the analytic memory model, so its limits are stated in those bytes. The first limits are
those beyond which no mix of memory parts fits with the requested probability. If the resulting plan is still too risky,
the limit of the device kind concerned is lowered to the bytes that this plan's mix could use, and the search is
repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipefit.cluster.types import Cluster
from pipefit.codec import content_digest
from pipefit.cost.comm.network import Network
from pipefit.cost.memory.correction import PEAK_PARTS, MemoryCorrection
from pipefit.cost.memory.correction_file import MemoryFacts
from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.errors import ClusterError, DoesNotFitError, PlanError
from pipefit.model.graph import Model
from pipefit.plan.assemble.predict import DevicePeak, PlanSimulation, lane_prediction, simulate_plan
from pipefit.plan.cutting.rows import scale_need
from pipefit.plan.make import is_interrupted, make_plan
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints
from pipefit.plan.types import Job, MemoryRisk, Plan
from pipefit.units import format_bytes

RISK = 0.05
"""Default limit for the probability that a plan does not fit."""

RISK_SEARCHES = 8
"""Searches under ever tighter limits before DoesNotFitError is raised."""

PeakParts = Mapping[str, float]


def make_plan_at_risk(
    model: Model,
    cluster: Cluster,
    job: Job,
    facts: MemoryFacts,
    risk: float = RISK,
    constraints: Constraints = NO_CONSTRAINTS,
    **options: Any,
) -> Plan:
    """Return a plan of `make_plan` (with its `options`) that fits with a probability of at least 1 - `risk`.

    Raises ClusterError if `facts` has no correction for any device kind of the cluster, PlanError for an invalid risk,
    and DoesNotFitError as `make_plan` does.
    """
    check_risk(risk)
    corrections = corrections_for(cluster, facts)
    limits = {
        kind: max(1.0, analytic_limit_bytes(corrections[kind], float(device.memory_bytes), risk))
        if kind in corrections
        else float(device.memory_bytes)
        for kind, device in cluster.kinds.items()
    }
    last = 0.0
    for _ in range(RISK_SEARCHES):
        try:
            plan = make_plan(model, _limit_memory(cluster, limits), job, constraints, **options)
        except DoesNotFitError as error:
            raise _explain_limits(error, cluster, limits, risk) from None
        plan = attach_risk(_restore_cluster(plan, cluster, limits, risk), model, cluster, facts)
        assert plan.prediction is not None and plan.prediction.risk is not None
        last = plan.prediction.risk
        if last <= risk:
            return plan
        if is_interrupted(plan):  # it does not keep the risk, so there is no plan yet
            raise KeyboardInterrupt
        limits = _tighten_limits(plan, simulate_plan(plan, model, cluster), cluster, corrections, limits, risk)
    raise DoesNotFitError(
        f"None of the {RISK_SEARCHES} plans found fits within the requested risk.",
        where="--max-oom-probability",
        seen=f"{last:.1%} in the last one",
        allowed=f"{risk:.1%}",
        next_step="allow a higher risk, or record more runs with `pipefit verify --record` to narrow the error band",
    )


def check_risk(risk: float) -> None:
    """Raise PlanError if `risk` is not above 0 and below 0.5."""
    if not 0 < risk < 0.5:
        raise PlanError(
            "This is not a valid risk of running out of memory.",
            where="--max-oom-probability",
            seen=risk,
            allowed="a probability above 0 and below 0.5, such as 0.05",
        )


def corrections_for(cluster: Cluster, facts: MemoryFacts) -> Mapping[str, MemoryCorrection]:
    """Return the corrections of the cluster's device kinds. Raises ClusterError if there is none."""
    corrections = {kind: facts.corrections[kind] for kind in cluster.kinds if kind in facts.corrections}
    if not corrections:
        raise ClusterError(
            "The memory file has no correction for the cluster's devices.",
            where="--memory-correction",
            seen=f"corrections for {', '.join(facts.corrections) or 'no kind of device'}; "
            f"runs on {', '.join(sorted({run.kind for run in facts.runs})) or 'none'}",
            allowed=f"corrections for {', '.join(cluster.kinds)}",
            next_step="record runs on such a device with `pipefit verify PLAN --record FILE`",
        )
    return corrections


def analytic_limit_bytes(correction: MemoryCorrection, limit_bytes: float, risk: float) -> float:
    """Return the largest analytic peak that any lane can have and still fit into the limit with this risk.

    It assumes the smallest coefficients of any mix of parts, and the least distance to the measured plans.
    """
    least = max(0.5, min(value for name, value in correction.coefficients.items() if name != "workspace"))
    constant = correction.coefficients["workspace"] * WORKSPACE_BYTES
    return WORKSPACE_BYTES + (limit_bytes / (1.0 + correction.error_quantile(risk)) - constant) / least


def peak_parts(simulation: PlanSimulation, kind: str = "") -> tuple[PeakParts, ...]:
    """Return, for each lane, the parts of the analytic peak on its device of this kind.

    Without such a device, or if all devices hold the same, they are the parts of the device that is fullest relative to
    its limit.
    """
    return tuple(
        analytic_parts(next((device for device in lane if kind and device.kind == kind), lane[0]))
        for lane in simulation.device_peaks
    )


def analytic_parts(device: DevicePeak) -> PeakParts:
    """Return the parts of an analytic peak, by the names in `PEAK_PARTS` of `cost/memory/correction.py`. Memory of the
    end of an iteration counts as messages."""
    ends = device.peak_bytes > device.curve.peak_bytes
    moving = {"messages": device.peak_bytes - device.static_bytes} if ends else device.curve.parts_bytes
    return {name: float({**device.static, **moving}.get(name, 0.0)) for name in PEAK_PARTS}


def attach_risk(plan: Plan, model: Model, cluster: Cluster, facts: MemoryFacts) -> Plan:
    """Return the plan with the probability that each lane, and any lane, runs out of memory.

    Each lane's prediction describes the device kind most likely to overflow. Device kinds without a correction fit if
    their analytic peak does.
    """
    assert plan.prediction is not None
    corrections = corrections_for(cluster, facts)
    network, simulation = Network(cluster), simulate_plan(plan, model, cluster)
    lanes, risks = [], []
    for index, devices in enumerate(simulation.device_peaks):
        kinds = {network.kinds[device].name for device in plan.lane_mesh(index).devices}
        judged = _assess_peaks(devices, kinds, cluster, corrections)
        worst, memory = max(judged, key=lambda pair: (_overflow_probability(*pair), pair[1] is not None))
        lanes.append(replace(lane_prediction(plan, simulation, index, worst), memory=memory))
        risks.append(_overflow_probability(worst, memory))
    any_overflows = 1.0 - math.prod(1.0 - risk for risk in risks)
    notes = (*plan.prediction.assumptions, *(_correction_note(correction) for correction in corrections.values()))
    prediction = replace(plan.prediction, lanes=tuple(lanes), risk=max(any_overflows, *risks, 0.0), assumptions=notes)
    return replace(plan, prediction=prediction)


def _assess_peaks(
    devices: Sequence[DevicePeak], kinds: set[str], cluster: Cluster, corrections: Mapping[str, MemoryCorrection]
) -> list[tuple[DevicePeak, MemoryRisk | None]]:
    """Return the peak of each device kind of a lane with its corrected memory, if there is a correction. Corrected
    kinds come first. `kinds` are all kinds of the lane."""
    assessed: list[tuple[DevicePeak, MemoryRisk | None]] = []
    for device in devices:
        for kind in (
            sorted(kinds, key=lambda name: (name not in corrections, name)) if not device.kind else [device.kind]
        ):
            peak = replace(device, limit_bytes=float(cluster.kinds[kind].memory_bytes))
            memory = None
            if kind in corrections:
                estimate = corrections[kind].estimate_rank(analytic_parts(peak))
                memory = MemoryRisk(
                    expected_bytes=estimate.expected_bytes,
                    margin_bytes=estimate.margin_bytes,
                    risk=estimate.oom_probability(peak.limit_bytes),
                )
            assessed.append((peak, memory))
    return assessed


def _overflow_probability(device: DevicePeak, memory: MemoryRisk | None) -> float:
    return float(device.peak_bytes > device.limit_bytes) if memory is None else memory.risk


def _tighten_limits(
    plan: Plan,
    simulation: PlanSimulation,
    cluster: Cluster,
    corrections: Mapping[str, MemoryCorrection],
    limits: Mapping[str, float],
    risk: float,
) -> dict[str, float]:
    """Return limits that exclude the plan: for the kinds of its risky lanes, the bytes allowed for their mix of
    parts."""
    assert plan.prediction is not None
    network = Network(cluster)
    risks = [lane.memory.risk if lane.memory else 0.0 for lane in plan.prediction.lanes]
    result = dict(limits)
    for index, devices in enumerate(simulation.device_peaks):
        if risks[index] <= risk and risks[index] < max(risks):
            continue
        kinds = {network.kinds[device].name for device in plan.lane_mesh(index).devices} & {*corrections}
        for peak in devices:
            for kind in kinds & {peak.kind} if peak.kind else kinds:
                estimate = corrections[kind].estimate_rank(analytic_parts(peak))
                upper = estimate.expected_bytes * (1.0 + corrections[kind].error_quantile(risk) * estimate.distance)
                share = min(cluster.kinds[kind].memory_bytes / upper, 1.0 - 1e-6)
                result[kind] = min(result[kind], peak.peak_bytes * share)
    return result


def _limit_memory(cluster: Cluster, limits: Mapping[str, float]) -> Cluster:
    kinds = {name: replace(kind, memory_bytes=int(limits[name])) for name, kind in cluster.kinds.items()}
    return replace(cluster, kinds=kinds)


def _explain_limits(
    error: DoesNotFitError, cluster: Cluster, limits: Mapping[str, float], risk: float
) -> DoesNotFitError:
    """Return the error with an explanation of the limits that it refers to."""
    return DoesNotFitError(
        error.what,
        where=error.where,
        seen=error.seen,
        allowed=f"{error.allowed}; in bytes of the analytic model, {_describe_limits(cluster, limits, risk)}",
        next_step=error.next_step,
    )


def _describe_limits(cluster: Cluster, limits: Mapping[str, float], risk: float) -> str:
    per_kind = ", ".join(
        f"{format_bytes(limits[name])} for the {format_bytes(kind.memory_bytes)} of {name}"
        for name, kind in cluster.kinds.items()
    )
    return f"limited at a risk of {risk:.1%} to {per_kind}"


def _restore_cluster(plan: Plan, cluster: Cluster, limits: Mapping[str, float], risk: float) -> Plan:
    """Return the plan as one for the original cluster; `attach_risk` then corrects its lanes.

    The memory of alternatives stays in bytes of the analytic model, and a note says so. Points of the trade curve are
    rescaled to bytes of the smallest device.
    """
    assert plan.prediction is not None
    least, kinds = min(lane.least_limit_bytes for lane in plan.prediction.lanes), Network(cluster).kinds
    has = min(float(kinds[device].memory_bytes) for device in plan.used_devices)
    points = tuple(
        replace(point, memory_bytes=scale_need(point.memory_bytes, least, has)) for point in plan.prediction.trade
    )
    told = plan.prediction.assumptions
    if plan.alternatives:
        told += (f"memory of alternatives: in bytes of the analytic model, {_describe_limits(cluster, limits, risk)}",)
    return replace(
        plan,
        prediction=replace(plan.prediction, trade=points, assumptions=told),
        hashes=replace(plan.hashes, cluster=content_digest(cluster)),
    )


def _correction_note(correction: MemoryCorrection) -> str:
    smallest, largest = correction.range_bytes
    return (
        f"memory on {correction.kind}: corrected by {correction.configurations} measured plans of up to "
        f"{correction.most_devices} devices ({format_bytes(smallest)} to {format_bytes(largest)}); "
        f"spread of its errors {correction.spread:.1%}"
    )
