"""The plan of a finished search: the best candidate with its prediction, notes, sensitivity and alternatives."""

from __future__ import annotations

from dataclasses import replace

from pipefit.plan.assemble.predict import add_prediction
from pipefit.plan.evaluate.outcome import SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.evaluate.search_progress import INTERRUPTED, SENSITIVITY
from pipefit.plan.explain.reasons import PartsOf, binding_memory, fastest_plan, list_alternatives, tolerance_note
from pipefit.plan.explain.slice_notes import slice_note
from pipefit.plan.explain.step_parts import step_parts
from pipefit.plan.explain.unused_kinds import unused_kind_notes
from pipefit.plan.modules.search import ModuleSearchResult
from pipefit.plan.passes.pass_state import PassState, SearchRequest
from pipefit.plan.passes.sensitivity import analyse_sensitivity
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import Job, Plan, PlanPrediction
from pipefit.schedule.fit.family import FIT
from pipefit.units import format_seconds


def explain_result(request: SearchRequest, state: PassState) -> Plan:
    """Return the best plan with its prediction, notes, sensitivity and alternatives."""
    result, best = state.result, state.result.fitting[0]
    request = request.hold_context([best])
    context, job, constraints = request.context, request.job, request.constraints
    plan, prediction = _predict_best(context, result, fastest_plan(result).step_s)
    context.tracker.start_pass(SENSITIVITY, keeps_plans=False)
    if state.interrupted:
        notes: tuple[str, ...] = (INTERRUPTED, f"search: {context.tracker.simulated} simulated until the interruption")
    else:
        notes = (
            *unused_kind_notes(context, job, result),
            *filter(None, [tolerance_note(result)]),
            *(_note_subject(result, note) for note in state.searched_notes),
            slice_note(context, job, constraints, result),
            _search_note(request, state),
        )
    prediction = replace(
        prediction,
        assumptions=(*prediction.assumptions, *notes),
        sensitivity=() if state.interrupted else analyse_sensitivity(context, job, constraints, best),
        trade=state.trade,
    )
    alternatives = list_alternatives(result, request.top, _parts_in(context))
    return replace(plan, prediction=prediction, alternatives=alternatives)


def explain_modules(context: PlannerContext, job: Job, module_search: ModuleSearchResult, top: int) -> Plan:
    """Return the plan of the best layout of several modules."""
    result = module_search.found
    plan, prediction = _predict_best(context, result, result.fitting[0].step_s)
    counted = (
        f"search: {result.considered} layouts of modules, {result.simulated} simulated, {result.unfit} did not fit"
    )
    prediction = replace(prediction, assumptions=(*prediction.assumptions, *module_search.notes, counted))
    alternatives = list_alternatives(result, top, _parts_in(context), module_search.mean_s)
    return replace(plan, prediction=prediction, alternatives=alternatives, arranging=module_search.arranging)


def _predict_best(context: PlannerContext, result: SearchResult, step_s: float) -> tuple[Plan, PlanPrediction]:
    """Return the plan of the best candidate, and its prediction with the candidates that memory rules out. The lower
    bound is given if it holds for a plan of `step_s`."""
    best = result.fitting[0]
    plan = context.assemble_plan(best.parts, best.decisions, best.simulation.timeline.schedule)
    plan = add_prediction(plan, context.model, best.simulation, _sound_bound_s(result.lower_bound_s, step_s))
    assert plan.prediction is not None
    binds = "; ".join(filter(None, (plan.prediction.binds, binding_memory(result))))
    return plan, replace(plan.prediction, binds=binds)


def _parts_in(context: PlannerContext) -> PartsOf:
    """Return the function from a plan to the parts of its step."""
    return lambda plan: step_parts(plan.simulation, context.network, context.layers)


def _sound_bound_s(bound_s: float, step_s: float) -> float:
    """Return the lower bound, or 0 if it does not hold.

    The bound is proved for replicas that run in lockstep. On unlike devices or links, replicas that run at their own
    pace can be faster than it.
    """
    return bound_s if bound_s <= step_s else 0.0


def _note_subject(result: SearchResult, note: str) -> str:
    """Return a note about the fastest plan, which says so if another plan is chosen."""
    begin, _, text = note.partition(": ")
    return note if fastest_plan(result) is result.fitting[0] else f"{begin}: of the fastest plan: {text}"


def _search_note(request: SearchRequest, state: PassState) -> str:
    """Return the counts of the search, whether it proved the plan, and the gain of a fitted order."""
    result = state.result
    best, fastest = result.fitting[0], fastest_plan(result)
    if result.open_bound_s >= fastest.step_s:
        whose = "this" if fastest is best else "the fastest"
        proof = f"no candidate left has a lower bound below {whose} plan's time"
    else:
        proof = f"the search budget was used up: a plan of {format_seconds(result.open_bound_s)} is not ruled out"
    counted = (
        f"search: {result.considered} candidates, {result.simulated} simulated, {result.unfit} did not fit; {proof}"
    )
    if state.placement_note:
        mixed = request.context.layer_cutter.fleet.is_mixed
        counted += "; before device placement" if mixed else "; all in hostname order"
    return counted + fitted_order_note(result, request.constraints)


def fitted_order_note(found: SearchResult, constraints: Constraints) -> str:
    """Return a note on the gain of a fitted order over the best schedule family; '' if a family won or none can be
    compared.

    Plans of device groups are not compared with plans of single devices: their difference is not due to the order.
    """
    best = found.fitting[0]
    alike = [
        candidate
        for candidate in found.fitting
        if bool(candidate.decisions.lane_shards) == bool(best.decisions.lane_shards)
    ]
    families = [candidate.step_s for candidate in alike if candidate.decisions.schedule != FIT]
    if best.decisions.schedule != FIT or constraints.schedule == FIT or not families:
        return ""
    return f"; a fitted order takes {1 - best.step_s / min(families):.1%} less than the best schedule family"
