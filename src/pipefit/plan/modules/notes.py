"""Notes of a plan of several modules: each module's devices and work, its placement, and the alternatives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import fsum

import numpy as np

from pipefit.plan.assemble.predict import describe_critical_path
from pipefit.plan.evaluate.outcome import EvaluatedPlan, InfeasiblePlan
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.plan.types import SampleArrangement
from pipefit.schedule.taskgraph.table import CODE
from pipefit.simulate import Timeline
from pipefit.units import format_bytes, format_seconds


def placement_notes(
    fitting: Sequence[EvaluatedPlan],
    misfits: Sequence[InfeasiblePlan],
    choices: Sequence[Mapping[str, str]],
    backbone: str,
    mean_s: Mapping[int, float],
) -> Iterator[str]:
    """Yield the chosen placement, and the result of every choice of modules on the devices of the `backbone` (name ->
    word).

    A result is the best simulated step and its critical path, or the memory missing in `misfits`. `fitting` is sorted,
    with the plans whose mean over all batches is known (`mean_s`, by identity) first.
    """
    chosen = _module_placements(fitting[0])
    how = f"{_join_names(chosen)} on the devices of {backbone}" if chosen else "every one on devices of its own"
    yield f"{how} ({_placement_word(chosen)})"
    for placed in choices:
        words = f"{_join_names(placed)} {_placement_word(placed)}" if placed else "all disjoint"
        first = next((plan for plan in fitting if _module_placements(plan) == placed), None)
        if first is None:
            lacking = [plan.peak_bytes - plan.limit_bytes for plan in misfits if _module_placements(plan) == placed]
            closest = f": {format_bytes(min(lacking))} are missing in the closest one" if lacking else ""
            yield f"{words}: no plan that was simulated fits{closest}"
            continue
        known = mean_s.get(id(first))
        step = format_seconds(known) if known else f"{format_seconds(first.step_s)} for the batch shown"
        yield (
            f"{words}: {step} at best; limited by "
            f"{describe_critical_path(first.simulation.timeline, first.parts.stages)}"
        )
    if len(choices) == 1:
        yield "no other placement was looked at, because the placement is fixed or no module can share devices"


def arranging_note(arranging: SampleArrangement) -> str:
    """Return how the samples of a batch are assigned to replicas and microbatches."""
    balanced = "balanced over replicas and microbatches" if arranging.balance else "as they come"
    return f"{balanced}, microbatches {'put in order for the pipeline' if arranging.order else 'in that order'}"


def shares_note(one: EvaluatedPlan) -> str:
    """Return every module's devices, its part of the work, and the utilisation of its busiest stage."""
    parts, timeline = one.parts, one.simulation.timeline
    count: dict[str, int] = {}
    work: dict[str, float] = {}
    busiest: dict[str, float] = {}
    device_total = len({device for group in parts.groups for device in group.devices})
    for stage, busy_s in zip(parts.stages, _busy_s(timeline), strict=True):
        devices = len(parts.groups[stage.group].devices)
        count[stage.module] = count.get(stage.module, 0) + devices
        work[stage.module] = work.get(stage.module, 0.0) + devices * busy_s
        busiest[stage.module] = max(busiest.get(stage.module, 0.0), busy_s)
    total_work = fsum(work.values()) or 1.0
    return "; ".join(
        f"{name} has {count[name]} of {device_total} devices for {work[name] / total_work:.0%} of the device time, "
        f"its busiest stage {busiest[name] / timeline.makespan_s:.0%} of the step"
        for name in count
    )


def _busy_s(timeline: Timeline) -> list[float]:
    """Return the seconds of compute of every stage."""
    graph = timeline.graph
    compute = graph.kind <= CODE["B"]
    seconds = np.bincount(graph.stage[compute], timeline.times.duration_s[compute], graph.schedule.num_stages)
    return [float(stage_s) for stage_s in seconds]


def _module_placements(one: EvaluatedPlan | InfeasiblePlan) -> dict[str, str]:
    assert isinstance(one.decisions, MultiModuleConfig)
    return dict(one.decisions.shared_modules)


def _placement_word(placed: Mapping[str, str]) -> str:
    """Return the placement of these modules; they all have the same."""
    return next(iter(placed.values()), "disjoint")


def _join_names(modules: Collection[str]) -> str:
    return " and ".join(sorted(modules))
