"""Errors when no plan fits: the missing memory, and the nearest change that would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pipefit.cluster.types import Cluster
from pipefit.errors import DoesNotFitError, PlanError
from pipefit.plan.evaluate.outcome import InfeasiblePlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.feasibility import some_plan_fits
from pipefit.plan.request.constraints import Constraints, describe_choices
from pipefit.plan.types import Job
from pipefit.precision import Precision
from pipefit.units import format_bytes

ENOUGH = 16
"""Largest factor by which a change scales the cluster or the job."""


NARROWER_GRADIENTS: Mapping[Precision, Precision] = {
    "bfloat16": "bfloat16-gradients",
    "fp8": "fp8-bfloat16-gradients",
}


def does_not_fit(context: PlannerContext, job: Job, constraints: Constraints, found: SearchResult) -> DoesNotFitError:
    """Return the error for a search without a result: its closest plan, and a change under which some plan fits."""
    closest = found.closest_misfit
    assert closest is not None, "a search without any plan that fits has a misfit"
    change = nearest_change(context, job, constraints)
    spent = found.open_bound_s < float("inf")
    begin = "No plan that fits was found before the search's budget was spent" if spent else "No plan fits"
    return DoesNotFitError(
        f"{begin}: at least {format_bytes(closest.peak_bytes - closest.limit_bytes)} are missing on each device "
        f"of lane {closest.lane} in the plan that comes closest.",
        where=describe_choices(closest.decisions) + _format_devices(context, closest),
        seen=f"{format_bytes(closest.peak_bytes)} needed",
        allowed=f"{format_bytes(closest.limit_bytes)} of memory",
        next_step=change or "use a smaller model, or devices with more memory",
    )


def nearest_change(context: PlannerContext, job: Job, constraints: Constraints) -> str | None:
    """Return the first change, from the least to the most costly, under which some plan fits; None if none helps."""
    for words, cluster, changed, freed in _candidate_changes(context, job, constraints):
        changed_context = context if cluster is None else context.with_cluster(cluster)
        try:
            if some_plan_fits(changed_context, changed, freed):
                return words
        except PlanError:
            continue
    return None


def _candidate_changes(
    context: PlannerContext, job: Job, constraints: Constraints
) -> Iterator[tuple[str, Cluster | None, Job, Constraints]]:
    """Yield (words, other cluster or None, job, constraints) of every change to try."""
    for key in constraints.to_mapping():
        freed: dict[str, Any] = dict.fromkeys(("shards", "sharding") if key == "shards" else (key,))
        yield f"drop --fix {key}: without it a plan fits", None, job, replace(constraints, **freed)
    narrower = NARROWER_GRADIENTS.get(job.precision)
    if narrower is not None:
        words = f"use --precision {narrower}: half the memory of gradients"
        yield words, None, replace(job, precision=narrower), constraints
    factor = 2
    while factor <= ENOUGH:
        grown = grow_cluster(context.cluster, factor)
        if grown is not None:
            yield f"use {factor} times as many devices like these", grown, job, constraints
        if job.batch % factor == 0:
            yield f"use --batch {job.batch // factor}", None, replace(job, batch=job.batch // factor), constraints
        if job.sequence % factor == 0:
            yield (
                f"use --seq {job.sequence // factor}",
                None,
                replace(job, sequence=job.sequence // factor),
                constraints,
            )
        factor *= 2


def grow_cluster(cluster: Cluster, factor: int) -> Cluster | None:
    """Return the cluster with `factor` times the devices on its only host; None if it has several hosts."""
    if len(cluster.hosts) != 1:
        return None
    host = cluster.hosts[0]
    if not host.link or host.link not in cluster.links:
        return None
    return replace(cluster, hosts=(replace(host, devices=host.devices * factor),))


def _format_devices(context: PlannerContext, misfit: InfeasiblePlan) -> str:
    devices = misfit.decisions.lane_devices()[misfit.lane]
    kinds = sorted({context.network.kinds[device].name for device in devices})
    return (
        f"; lane {misfit.lane} is device{'s' if len(devices) > 1 else ''} {_format_run(devices)} ({', '.join(kinds)})"
    )


def _format_run(devices: tuple[int, ...]) -> str:
    if len(devices) > 4 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]} to {devices[-1]}"
    return ", ".join(map(str, devices[:8])) + (", ..." if len(devices) > 8 else "")
