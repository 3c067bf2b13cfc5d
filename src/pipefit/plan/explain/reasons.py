"""Reasons why a plan won and others lost, in words and figures from the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipefit.plan.evaluate.outcome import EvaluatedPlan, InfeasiblePlan, SearchResult
from pipefit.plan.evaluate.simplicity import less_simple_by
from pipefit.plan.explain.step_parts import describe_part
from pipefit.plan.request.constraints import describe_choices
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.plan.request.plan_kinds import kind_name
from pipefit.plan.types import AlternativePlan
from pipefit.units import format_bytes, format_seconds

MISFITS_SHOWN = 3

REASON_KEYS = (
    "replicas", "stages", "context", "expert", "shards", "sharding", "microbatches", "slices", "schedule", "recompute",
    "sharded_state", "state_group",
)  # fmt: skip
"""Choices in which two rows of the table of alternatives differ."""

PartsOf = Callable[[EvaluatedPlan], Mapping[str, float]]
"""A plan -> the seconds of its step by part (`step_parts.py`)."""


def list_alternatives(
    found: SearchResult, top: int, parts_of: PartsOf, mean_s: Mapping[int, float] | None = None
) -> tuple[AlternativePlan, ...]:
    """Return the runners-up, fastest first, then plans that would be faster but do not fit.

    For a model of one module these are the best plan of each other kind (`plan_kinds.py`), and places left go to the
    next fastest plans that differ in a shown choice. `mean_s` maps the `id` of a plan to its mean step time over all
    batches, if plans were ranked by that.
    """
    best = found.fitting[0]
    losers = [
        AlternativePlan(
            decisions=plan.decisions.to_constraints(plan.decisions.cuts),
            step_s=plan.step_s,
            peak_bytes=plan.peak_bytes,
            limit_bytes=plan.limit_bytes,
            reason=_kind_prefix(plan) + explain_loss(plan, best, parts_of, mean_s),
        )
        for plan in _select_runners(found, top - 1)
    ]
    return (*losers, *(misfit_alternative(misfit) for misfit in faster_misfits(found)))


def fastest_plan(found: SearchResult) -> EvaluatedPlan:
    """Return the fastest plan of a result: the first one, unless a simpler one was chosen within the tolerance."""
    return min(found.fitting, key=lambda plan: plan.rank_key[0])


def tolerance_note(found: SearchResult) -> str:
    """Return a note on a faster plan within the tolerance, with its gain; '' if the chosen plan is the fastest."""
    best, fastest = found.fitting[0], fastest_plan(found)
    if fastest.step_s >= best.step_s:
        return ""
    return (
        f"tolerance: the fastest plan takes {format_seconds(best.step_s - fastest.step_s)} "
        f"({1 - fastest.step_s / best.step_s:.2%}) less, with {less_simple_by(fastest, best) or 'another layout'}: "
        f"{describe_choices(fastest.decisions)}; --tolerance 0 takes it in place of this simpler plan"
    )


def _select_runners(found: SearchResult, most: int) -> Sequence[EvaluatedPlan]:
    """Return at most this many runners-up: the fastest, and the best of each kind before a second one of any."""
    best, *rest = found.fitting
    if isinstance(best.decisions, MultiModuleConfig):
        return rest[: max(0, most)]
    kinds, rows = {kind_name(best.decisions)}, {_shown_choices(best.decisions)}
    firsts: list[int] = []
    seconds: list[int] = []
    for index, plan in enumerate(rest):
        kind, row = kind_name(plan.decisions), _shown_choices(plan.decisions)
        if row not in rows:
            is_first = kind not in kinds or (index == 0 and plan.step_s < best.step_s)
            (firsts if is_first else seconds).append(index)
            kinds.add(kind)
            rows.add(row)
    return [rest[index] for index in sorted((firsts + seconds)[: max(0, most)])]


def _shown_choices(decisions: ParallelConfig) -> tuple[str, ...]:
    """Return the choices that a row of the table of alternatives shows."""
    words = decisions.to_constraints(decisions.cuts)
    return tuple(words.get(key, "") for key in REASON_KEYS)


def _kind_prefix(plan: EvaluatedPlan) -> str:
    return "" if isinstance(plan.decisions, MultiModuleConfig) else f"{kind_name(plan.decisions)}: "


def faster_misfits(found: SearchResult) -> list[InfeasiblePlan]:
    """Return plans that do not fit and would beat the winner by their bound or simulation; one for each grid of
    devices."""
    best = found.fitting[0].step_s if found.fitting else float("inf")
    shown: dict[tuple[int, int], InfeasiblePlan] = {}
    for misfit in found.misfits:
        grid = (len(misfit.decisions.replicas), misfit.decisions.stage_count)
        if misfit.bound_s < best:
            shown.setdefault(grid, misfit)
    return list(shown.values())[:MISFITS_SHOWN]


def misfit_alternative(misfit: InfeasiblePlan) -> AlternativePlan:
    """Return the plan file's entry for a plan that does not fit. Its time is a lower bound."""
    return AlternativePlan(
        decisions=misfit.decisions.to_constraints(misfit.decisions.cuts),
        step_s=misfit.bound_s,
        peak_bytes=misfit.peak_bytes,
        limit_bytes=misfit.limit_bytes,
        reason=(
            f"does not fit: lane {misfit.lane} needs {format_bytes(misfit.peak_bytes)} of "
            f"{format_bytes(misfit.limit_bytes)} (would take at least {format_seconds(misfit.bound_s)})"
        ),
    )


def explain_loss(
    one: EvaluatedPlan, best: EvaluatedPlan, parts_of: PartsOf, mean_s: Mapping[int, float] | None = None
) -> str:
    """Return the difference to the winner, with the part of the step that grew most.

    Plans that are faster on the batch shown have a larger mean over all batches.
    """
    slower = one.step_s / best.step_s - 1
    if slower < -1e-6 and mean_s and id(one) in mean_s:
        more = mean_s[id(one)] / mean_s[id(best)] - 1
        return f"{-slower:.1%} faster on the batch shown, {more:.1%} slower on average over all batches"
    if slower < -1e-6 and not isinstance(one.decisions, MultiModuleConfig):
        feature = less_simple_by(one, best) or "another layout"
        return f"{-slower:.2%} faster ({format_seconds(best.step_s - one.step_s)}), but less simple: {feature}"
    if slower < 1e-6:
        return f"as fast, {_tie_reason(one, best)}"
    mine, theirs = parts_of(one), parts_of(best)
    grew, by_s = max(((name, mine[name] - theirs[name]) for name in mine), key=lambda item: item[1])
    return f"{slower:.1%} slower: {format_seconds(by_s)} more {describe_part(grew)}"


def binding_memory(found: SearchResult) -> str:
    """Return a note on the fastest plan excluded by memory, or '' if nothing faster was excluded."""
    faster = faster_misfits(found)
    if not faster:
        return ""
    first = faster[0]
    return (
        f"memory rules out {describe_choices(first.decisions)}: lane {first.lane} needs "
        f"{format_bytes(first.peak_bytes)} of "
        f"{format_bytes(first.limit_bytes)}"
    )


def _tie_reason(one: EvaluatedPlan, best: EvaluatedPlan) -> str:
    if one.peak_bytes > best.peak_bytes:
        return f"with {format_bytes(one.peak_bytes - best.peak_bytes)} more memory"
    if one.decisions.device_count > best.decisions.device_count:
        return f"with {one.decisions.device_count - best.decisions.device_count} more devices"
    return "with more stages" if one.decisions.stage_count > best.decisions.stage_count else "later in the search order"
