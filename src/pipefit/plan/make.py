"""Search for the fastest plan of a model, a cluster and a job, and explain it.

`make_plan` runs the passes of `PASSES` in order, from the layout search to the memory trade. The best plan gets a
prediction, runners-up and notes. If nothing fits, the error says how much memory is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipefit.cluster.files import check_peaks
from pipefit.cluster.topology import device_count
from pipefit.cluster.types import Cluster
from pipefit.cost.compute.roofline import LayerCosts
from pipefit.errors import PlanError
from pipefit.model.graph import Model
from pipefit.plan.assemble.shard_recipes import request_from_constraints
from pipefit.plan.candidates.space_checks import check_space
from pipefit.plan.evaluate.garbage_collection import defer_collection
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.evaluate.search_progress import (
    CONTEXTS,
    GROUPS,
    INTERRUPTED,
    LAYOUTS,
    MISFIT,
    PLACING,
    STATE_GROUPS,
    TRADE,
    SearchObserver,
    SearchTracker,
)
from pipefit.plan.evaluate.simplicity import TOLERANCE, check_tolerance, choose_simplest
from pipefit.plan.explain.nearest_fit import does_not_fit
from pipefit.plan.explain.reasons import fastest_plan
from pipefit.plan.explain.result import explain_modules, explain_result
from pipefit.plan.modules.search import search_modules
from pipefit.plan.passes.device_groups.search import search_groups
from pipefit.plan.passes.fitted_orders import best_plans, relabel_fitted
from pipefit.plan.passes.group_state import search_state_groups
from pipefit.plan.passes.memory_trade import TRADE_BUDGET, trade_memory
from pipefit.plan.passes.pass_state import NOTHING_SEARCHED, PassState, SearchPass, SearchRequest
from pipefit.plan.passes.place_devices import place_candidates
from pipefit.plan.passes.split_sequences import search_contexts
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints, check_one_module
from pipefit.plan.request.expert_parts import check_experts, splits_rows
from pipefit.plan.request.narrow_blocks import check_blocks
from pipefit.plan.request.nearest_constraints import explain_contradiction
from pipefit.plan.request.sampled_batches import (
    Arrange,
    SampledBatches,
    assumed_samples,
    complete_samples,
    deal_samples,
)
from pipefit.plan.request.sequence_length import fixed_length
from pipefit.plan.types import Job, Plan
from pipefit.schedule.fit.family import FIT
from pipefit.shard.apart import check_row_independence


@defer_collection()
def make_plan(
    model: Model,
    cluster: Cluster,
    job: Job,
    constraints: Constraints = NO_CONSTRAINTS,
    *,
    top: int = 5,
    tolerance: float = TOLERANCE,
    name: str = "",
    cluster_source: str = "",
    layers: LayerCosts | None = None,
    progress: SearchObserver | None = None,
    keep_best: bool = False,
    samples: SampledBatches | None = None,
    arrange: Arrange = deal_samples,
) -> Plan:
    """Return the simplest plan that fits, of those about as fast as the fastest, with its prediction and runners-up.

    For a model of one module, plans within `tolerance` (a fraction, 0: the fastest alone) of the fastest step count as
    equally fast (`evaluate/simplicity.py`). Models of several modules get the fastest plan.

    `name` and `cluster_source` are the texts that the user typed for the model and the cluster. `constraints` fix
    choices (`--fix`). `top` counts the winner and its runners-up. `layers` replaces the roofline. For a model of
    several modules, `samples` are the global batches to plan for (default: `assumed_samples`), and `arrange` assigns
    samples to replicas and microbatches. `progress` gets the reports of the search (`search_progress.py`). With
    `keep_best`, a KeyboardInterrupt gives the best plan so far, with a note (`is_interrupted`); without a plan, and by
    default, it propagates.

    Raises DoesNotFitError with the missing bytes and the nearest change that would fit. Raises PlanError if the
    constraints leave no candidate, with the nearest that do, for a bad tolerance, or if the model mixes rows.
    """
    check_tolerance(tolerance, tolerance)
    check_row_independence(model)
    check_peaks(cluster, job.precision, "--precision")
    check_blocks(model, job.precision, "--precision")
    context = PlannerContext(model, cluster, layers, name, cluster_source)
    context.tracker = SearchTracker(progress)
    if len(model.modules) > 1:
        sampled = complete_samples(samples, model, job) if samples else assumed_samples(model, job)
        module_search = search_modules(context, job, constraints, sampled, arrange, keep_best)
        return explain_modules(context, job, module_search, top)
    request = prepare_request(context, job, constraints, top, tolerance)
    state = PassState(NOTHING_SEARCHED)
    try:
        for state in iter_passes(request):  # noqa: B007 - the state so far, in case of an interruption
            pass
        return explain_result(request, state)
    except KeyboardInterrupt:
        if not keep_best:
            raise
        return explain_result(request, _best_so_far(request, state))


def is_interrupted(plan: Plan) -> bool:
    """Return whether the search of this plan was interrupted."""
    return plan.prediction is not None and INTERRUPTED in plan.prediction.assumptions


def _check_constraints(context: PlannerContext, job: Job, constraints: Constraints) -> None:
    """Raise PlanError, with the nearest constraints that go together, if these leave nothing to consider."""
    layers, devices = len(context.only_module.layers), device_count(context.cluster)

    def check_fixes(fixes: Constraints) -> None:
        check_space(job, layers, devices, fixes)

    try:
        check_fixes(constraints)
    except PlanError as error:
        raise explain_contradiction(error, constraints, max(devices, job.batch), check_fixes) from None


def search_layouts(request: SearchRequest, state: PassState) -> PassState:
    """Search all layouts of single devices, then fit orders to the memory of the best ones."""
    request.context.tracker.start_pass(LAYOUTS)
    return replace(state, result=best_plans(request.context, request.job, request.constraints, request.top))


def split_sequences(request: SearchRequest, state: PassState) -> PassState:
    """Search layouts whose sequences are split over devices."""
    request.context.tracker.start_pass(CONTEXTS)
    found = search_contexts(request.context, request.job, request.constraints, state.result, request.top)
    return replace(state, result=found)


def group_state(request: SearchRequest, state: PassState) -> PassState:
    """Search layouts whose replicas shard their state within hosts only."""
    request.context.tracker.start_pass(STATE_GROUPS)
    result = search_state_groups(request.context, request.job, request.constraints, state.result, request.top)
    return replace(state, result=result)


def place_devices(request: SearchRequest, state: PassState) -> PassState:
    """Choose the device of every slot, where links or devices differ."""
    request.context.tracker.start_pass(PLACING)
    request = request.hold_context(state.result.fitting[:1])
    placing = place_candidates(request.context, request.job, request.constraints, state.result)
    return replace(state, result=placing.found, placement_note=placing.note)


def group_devices(request: SearchRequest, state: PassState) -> PassState:
    """Search stages held by groups of devices. Raise DoesNotFitError if nothing fits up to here."""
    request.context.tracker.start_pass(GROUPS)
    request = request.hold_context(state.result.fitting[:1])
    grouping = search_groups(request.context, request.job, request.constraints, state.result)
    if not grouping.found.fitting:
        request.context.tracker.start_pass(MISFIT, keeps_plans=False)
        raise does_not_fit(request.context, request.job, request.constraints, state.result)
    return replace(state, result=grouping.found, group_note=grouping.note)


def trade_time(request: SearchRequest, state: PassState) -> PassState:
    """Choose the simplest plan within the tolerance, and trade memory against time on its layout."""
    request.context.tracker.start_pass(TRADE, keeps_plans=False)
    result, tolerance = state.result, request.tolerance
    for _ in range(TRADE_BUDGET.traded_layouts if tolerance else 1):
        simplest = choose_simplest(result.fitting, tolerance)
        fastest_s = fastest_plan(result).step_s
        held = request.hold_context([simplest])
        curve = trade_memory(held.context, held.job, held.constraints, simplest, tolerance, fastest_s)
        result = curve.lead_result(result)
        if choose_simplest(result.fitting, tolerance) is curve.best:
            break
    return replace(state, result=result, trade=curve.points)


PASSES: tuple[SearchPass, ...] = (
    search_layouts, split_sequences, group_state, place_devices, group_devices, trade_time,
)  # fmt: skip
"""The planner of a model of one module. Every pass returns a result that is at least as good as the one it got, but the
last may choose a simpler plan within the tolerance."""


def prepare_request(
    context: PlannerContext,
    job: Job,
    constraints: Constraints = NO_CONSTRAINTS,
    top: int = 5,
    tolerance: float = 0.0,
) -> SearchRequest:
    """Return the inputs of the passes for a model of one module, with its fixed programs searched.

    Raises PlanError for constraints that contradict each other, or that leave no candidate.
    """
    check_one_module(constraints)
    constraints = default_constraints(context.model, constraints).with_context_defaults
    _check_constraints(context, job, constraints)
    if splits_rows(constraints.sharding):
        check_experts(context.model, constraints.shards or (1,), "--fix shards, sharding")
    elif constraints.expert is not None:
        check_experts(context.model, constraints.shards or (1,), "--fix expert, shards", constraints.expert)
    context.split_sequences(constraints.context_size)
    if constraints.sharding == "searched":
        request = request_from_constraints(constraints, job, device_count(context.cluster))
        context.search_recipes(job, request)
    return SearchRequest(context, job, constraints, top, tolerance)


def iter_passes(request: SearchRequest) -> Iterator[PassState]:
    """Yield the state after every pass; the last one is the result. Raises as `make_plan` does."""
    state = PassState(NOTHING_SEARCHED)
    for search_pass in PASSES:
        state = search_pass(request, state)
        yield state


def _best_so_far(request: SearchRequest, state: PassState) -> PassState:
    """Return the state with the best plan of the passes so far as its first. Raises KeyboardInterrupt if there is
    none."""
    tracker = request.context.tracker
    known = [*state.result.fitting[:1], *([] if tracker.best is None else [tracker.best])]
    if not known:
        raise KeyboardInterrupt
    best = min(known, key=lambda plan: plan.rank_key)
    if request.constraints.schedule == FIT and best.decisions.schedule != FIT:
        best = relabel_fitted(best)
    runners_up = [plan for plan in state.result.fitting if plan.decisions != best.decisions]
    state = replace(state, result=replace(state.result, fitting=(best, *runners_up)), interrupted=True)
    if isinstance(request.constraints.mapping, tuple) and best.decisions.devices != request.constraints.mapping:
        try:
            return place_devices(request, state)
        except PlanError:
            raise KeyboardInterrupt from None
    return state


def default_constraints(model: Model, constraints: Constraints) -> Constraints:
    """Return the constraints, with the sharding if it follows from fixed shards.

    A model captured as one graph has its sharding searched; Megatron's fixed program is for layers over any number of
    tokens.
    """
    if constraints.shard_count > 1 and fixed_length(model) is not None:
        return constraints.with_defaults(sharding="searched")
    return constraints
