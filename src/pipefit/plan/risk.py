"""Plans under a memory correction: the probability that one does not fit, and the fastest one for which it is small.

The search counts bytes of the analytic model. So it is given limits in such bytes: first those beyond which no mix of
parts fits with the probability that is asked for; where the plan that it finds is still too risky, because of its own
mix of parts, the limit of that kind of device that this plan could keep with its mix, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipefit.cluster.types import Cluster
from pipefit.codec import content_digest
from pipefit.cost.comm.network import Network
from pipefit.cost.memory.correction import PARTS, MemoryCorrection
from pipefit.cost.memory.correction_file import MemoryFacts
from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.errors import ClusterError, DoesNotFitError, PlanError
from pipefit.model.graph import Model
from pipefit.plan.assemble.predict import DevicePeak, PlanSimulation, lane_prediction, simulate_plan
from pipefit.plan.cutting.rows import scale_need
from pipefit.plan.make import make_plan
from pipefit.plan.types import Job, MemoryRisk, Plan
from pipefit.units import format_bytes

RISK = 0.05
"""The probability of not fitting that a plan may have where the user names none."""

ROUNDS = 8
"""Searches, each under tighter limits, before none is called safe enough."""

Parts = Mapping[str, float]


def make_plan_at_risk(
    model: Model,
    cluster: Cluster,
    job: Job,
    facts: MemoryFacts,
    risk: float = RISK,
    pins: Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """`make_plan` (its `options`), where a plan fits if it does so with probability 1 - `oom_probability` at least.

    Raises ClusterError where `facts` know none of the cluster's kinds of devices, PlanError for a risk that cannot be,
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
    for _ in range(ROUNDS):
        try:
            plan = make_plan(model, _limit_memory(cluster, limits), job, pins, **options)
        except DoesNotFitError as error:
            raise _explain_limits(error, cluster, limits, risk) from None
        plan = attach_risk(_restore_cluster(plan, cluster, limits, risk), model, cluster, facts)
        assert plan.prediction is not None and plan.prediction.risk is not None
        last = plan.prediction.risk
        if last <= risk:
            return plan
        limits = _tighten_limits(plan, simulate_plan(plan, model, cluster), cluster, corrections, limits, risk)
    raise DoesNotFitError(
        f"None of {ROUNDS} plans that were found fits with the certainty that is asked for.",
        where="--risk",
        seen=f"{last:.1%} in the last one",
        allowed=f"{risk:.1%}",
        next_step="allow a higher risk, or record more runs with `pipefit verify --record`: the band gets narrower",
    )


def check_risk(risk: float) -> None:
    """Raises PlanError for a probability that no plan can be asked for."""
    if not 0 < risk < 0.5:
        raise PlanError(
            "A plan cannot be asked for this risk of not fitting.",
            where="--risk",
            seen=risk,
            allowed="a probability above 0 and below 0.5, such as 0.05",
        )


def corrections_for(cluster: Cluster, facts: MemoryFacts) -> Mapping[str, MemoryCorrection]:
    """The corrections of the cluster's kinds of devices. Raises ClusterError where there is none."""
    found = {kind: facts.corrections[kind] for kind in cluster.kinds if kind in facts.corrections}
    if not found:
        raise ClusterError(
            "The memory file knows nothing of the cluster's devices.",
            where="--memory",
            seen=f"corrections for {', '.join(facts.corrections) or 'no kind of device'}; "
            f"runs on {', '.join(sorted({run.kind for run in facts.runs})) or 'none'}",
            allowed=f"some for {', '.join(cluster.kinds)}",
            next_step="record runs on such a device with `pipefit verify PLAN --record FILE`",
        )
    return found


def analytic_limit_bytes(correction: MemoryCorrection, limit_bytes: float, risk: float) -> float:
    """The most that the analytic model may say of a lane that fits into the limit with this risk: no mix of parts has
    lower coefficients, none is closer to what was measured."""
    least = max(0.5, min(value for name, value in correction.coefficients.items() if name != "workspace"))
    constant = correction.coefficients["workspace"] * WORKSPACE_BYTES
    return WORKSPACE_BYTES + (limit_bytes / (1.0 + correction.error_quantile(risk)) - constant) / least


def peak_parts(simulation: PlanSimulation, kind: str = "") -> tuple[Parts, ...]:
    """Of every lane, what the analytic peak of its device of this kind is made of (where it has none, or all hold the
    same: of the device that is fullest for its limit)."""
    return tuple(
        analytic_parts(next((one for one in lane if kind and one.kind == kind), lane[0]))
        for lane in simulation.device_peaks
    )


def analytic_parts(device: DevicePeak) -> Parts:
    """What an analytic peak is made of, by the names of `memory_correction.PARTS`. What the end of an iteration needs
    counts as messages."""
    ends = device.peak_bytes > device.curve.peak_bytes
    moving = {"messages": device.peak_bytes - device.static_bytes} if ends else device.curve.parts_bytes
    return {name: float({**device.static, **moving}.get(name, 0.0)) for name in PARTS}


def attach_risk(plan: Plan, model: Model, cluster: Cluster, facts: MemoryFacts) -> Plan:
    """The plan, its prediction with the probability that each lane, and that some lane, does not fit; what it says of a
    lane is of the kind of device that is likeliest to overflow. On devices whose kind has no correction a lane fits if
    the analytic peak does, as without corrections."""
    assert plan.prediction is not None
    corrections = corrections_for(cluster, facts)
    network, simulation = Network(cluster), simulate_plan(plan, model, cluster)
    lanes, risks = [], []
    for index, devices in enumerate(simulation.device_peaks):
        kinds = {network.kinds[device].name for device in plan.lane_mesh(index).devices}
        judged = _assess_peaks(devices, kinds, cluster, corrections)
        worst, memory = max(judged, key=lambda one: (_overflow_probability(*one), one[1] is not None))
        lanes.append(replace(lane_prediction(plan, simulation, index, worst), memory=memory))
        risks.append(_overflow_probability(worst, memory))
    whole = 1.0 - math.prod(1.0 - risk for risk in risks)
    notes = (*plan.prediction.assumptions, *(_correction_note(one) for one in corrections.values()))
    prediction = replace(plan.prediction, lanes=tuple(lanes), risk=max(whole, *risks, 0.0), assumptions=notes)
    return replace(plan, prediction=prediction)


def _assess_peaks(
    devices: Sequence[DevicePeak], kinds: set[str], cluster: Cluster, corrections: Mapping[str, MemoryCorrection]
) -> list[tuple[DevicePeak, MemoryRisk | None]]:
    """Every kind of device of a lane by itself, with what its correction, if there is one, makes of its peak; known
    ones first. `kinds`: all of the lane."""
    found: list[tuple[DevicePeak, MemoryRisk | None]] = []
    for one in devices:
        for kind in sorted(kinds, key=lambda name: (name not in corrections, name)) if not one.kind else [one.kind]:
            own = replace(one, limit_bytes=float(cluster.kinds[kind].memory_bytes))
            memory = None
            if kind in corrections:
                estimate = corrections[kind].estimate_rank(analytic_parts(own))
                memory = MemoryRisk(
                    expected_bytes=estimate.expected_bytes,
                    margin_bytes=estimate.margin_bytes,
                    risk=estimate.oom_probability(own.limit_bytes),
                )
            found.append((own, memory))
    return found


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
    """Limits that leave the plan out: for the kinds of its risky lanes what these may take with their mix of parts."""
    assert plan.prediction is not None
    network = Network(cluster)
    risks = [lane.memory.risk if lane.memory else 0.0 for lane in plan.prediction.lanes]
    result = dict(limits)
    for index, devices in enumerate(simulation.device_peaks):
        if risks[index] <= risk and risks[index] < max(risks):
            continue
        kinds = {network.kinds[device].name for device in plan.lane_mesh(index).devices} & {*corrections}
        for one in devices:
            for kind in kinds & {one.kind} if one.kind else kinds:
                estimate = corrections[kind].estimate_rank(analytic_parts(one))
                upper = estimate.expected_bytes * (1.0 + corrections[kind].error_quantile(risk) * estimate.distance)
                share = min(cluster.kinds[kind].memory_bytes / upper, 1.0 - 1e-6)
                result[kind] = min(result[kind], one.peak_bytes * share)
    return result


def _limit_memory(cluster: Cluster, limits: Mapping[str, float]) -> Cluster:
    kinds = {name: replace(kind, memory_bytes=int(limits[name])) for name, kind in cluster.kinds.items()}
    return replace(cluster, kinds=kinds)


def _explain_limits(
    error: DoesNotFitError, cluster: Cluster, limits: Mapping[str, float], risk: float
) -> DoesNotFitError:
    """The error, saying what the limits are that it speaks of."""
    return DoesNotFitError(
        error.what,
        where=error.where,
        seen=error.seen,
        allowed=f"{error.allowed}; by the analytic model, {_describe_limits(cluster, limits, risk)}",
        next_step=error.next_step,
    )


def _describe_limits(cluster: Cluster, limits: Mapping[str, float], risk: float) -> str:
    each = ", ".join(
        f"{format_bytes(limits[name])} for the {format_bytes(kind.memory_bytes)} of {name}"
        for name, kind in cluster.kinds.items()
    )
    return f"which may say, at a risk of {risk:.1%}, {each}"


def _restore_cluster(plan: Plan, cluster: Cluster, limits: Mapping[str, float], risk: float) -> Plan:
    """The plan as one for the cluster itself; `attach_risk` tells of its lanes. The memory of alternatives stays in
    bytes of the analytic model, beside the most that it may say, and a note tells so; memory against time, a part of
    the smallest limit, is put into its bytes."""
    assert plan.prediction is not None
    least, kinds = min(lane.least_limit_bytes for lane in plan.prediction.lanes), Network(cluster).kinds
    has = min(float(kinds[device].memory_bytes) for device in plan.used_devices)
    points = tuple(replace(one, memory_bytes=scale_need(one.memory_bytes, least, has)) for one in plan.prediction.trade)
    told = plan.prediction.assumptions
    if plan.alternatives:
        told += (f"memory of alternatives: of the analytic model, {_describe_limits(cluster, limits, risk)}",)
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
