"""Notes of a plan on device kinds that it leaves out."""

from __future__ import annotations

from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.cost.work import StateShare
from pipefit.optimizers.sharded_state import searched_states
from pipefit.plan.evaluate.outcome import SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.units import format_bytes, format_seconds


def unused_kind_notes(context: PlannerContext, job: Job, found: SearchResult) -> tuple[str, ...]:
    """Return one note for every device kind without a device in the best plan."""
    used = _used_kinds(context, found.fitting[0].decisions)
    return tuple(
        _unused_reason(context, job, found, name) for name in context.layer_cutter.fleet.names if name not in used
    )


def _unused_reason(context: PlannerContext, job: Job, found: SearchResult, name: str) -> str:
    lack = _too_small_note(context, job, name)
    if lack:
        return f"{name} is left out: {lack}"
    best = found.fitting[0]
    tried = [plan for plan in found.fitting if name in _used_kinds(context, plan.decisions)]
    if tried:
        slower = tried[0].step_s / best.step_s - 1
        if slower < -1e-6:
            return f"{name} is left out: the best plan with it takes only {-slower:.2%} less"
        if slower < 1e-6:
            return f"{name} is left out: the best plan with it is as fast"
        return f"{name} is left out: the best plan found with it takes {slower:.1%} longer"
    bounds = [plan.bound_s for plan in found.misfits if name in _used_kinds(context, plan.decisions)]
    if bounds and min(bounds) < best.step_s:
        return f"{name} is left out: plans with it that could be faster do not fit (from {format_seconds(min(bounds))})"
    return f"{name} is left out: no plan tried with it was estimated to be faster"


def _used_kinds(context: PlannerContext, decisions: ParallelConfig) -> set[str]:
    return {context.network.kinds[device].name for lane in decisions.lane_devices() for device in lane}


def _too_small_note(context: PlannerContext, job: Job, name: str) -> str:
    """Return a note on the memory that a layer of the most common graph needs and such a device lacks; '' if the layer
    fits alone.

    It assumes one row, full recomputation, and optimizer state sharded over all devices.
    """
    cutter, layers = context.layer_cutter, context.only_module.layers
    lean = StateShare(searched_states(unlike_devices=True)[-1], 1 / context.network.devices)
    row = cutter.layer_row(job, frozenset({(name, 1)}), "full", lean)
    graphs = [layer.graph for layer in layers]
    index = graphs.index(max(graphs, key=graphs.count))
    need = float(row.static_bytes[index] + row.saved_bytes[index])
    if need <= row.limit_bytes:
        return ""
    has = format_bytes(row.limit_bytes) if row.limit_bytes > 0 else "nothing"
    return (
        f"besides the {format_bytes(WORKSPACE_BYTES)} for libraries it has {has}, but "
        f"layer {layers[index].name} needs {format_bytes(need)}"
    )
