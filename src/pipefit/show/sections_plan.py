"""The text sections of the report: decisions and alternatives, lower bound, provenance."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from pipefit import __version__
from pipefit.plan.explain.text import choice_cells, fullest_lane, search_notes, stage_table
from pipefit.plan.types import AlternativePlan, Plan, PlanPrediction
from pipefit.show.figures import format_percent
from pipefit.show.html import escape_text, html_table
from pipefit.show.sections import section_card
from pipefit.show.subject import ReportSubject, prediction_drift
from pipefit.units import format_bytes, format_flops, format_seconds

DRIFT = 1e-6
"""Relative difference above which the report says that the plan's prediction differs from the simulation now."""


def bound_section(prediction: PlanPrediction) -> str:
    """Return the gap between the plan and the lower bound, its critical path, and its sensitivity."""
    parts = ['<p class="lead">The plan carries no lower bound.</p>']
    if prediction.lower_bound_s > 0:
        share = prediction.lower_bound_s / prediction.step_s
        above = prediction.step_s / prediction.lower_bound_s - 1.0
        parts = [
            f"<p>No plan in the space that was searched, its replicas in step, can take less than "
            f"<b>{format_seconds(prediction.lower_bound_s)}</b> a step (a lower bound, which may not be reachable). "
            f"This one is predicted to take <b>{format_seconds(prediction.step_s)}</b>, {format_percent(above)} "
            "above it.</p>"
            f'<div class="gauge" role="img" aria-label="The bound is {format_percent(share)} of the predicted step">'
            f'<i style="width:{100 * share:.2f}%"></i></div>'
            f'<p class="note">The filled part is the bound, the full bar the predicted step.</p>'
        ]
    if prediction.binds:
        parts.append(f"<p>Critical path: <b>{escape_text(prediction.binds)}</b>.</p>")
    if prediction.sensitivity:
        rows = "".join(
            f"<li>{escape_text(entry.change)}: <b>{format_seconds(entry.step_s)}</b> ({escape_text(entry.how)})</li>"
            for entry in prediction.sensitivity
        )
        parts.append(f'<h3>Sensitivity of the step time</h3><ul class="plain">{rows}</ul>')
    return section_card("bound", "What limits it", "".join(parts))


def decisions_section(plan: Plan, prediction: PlanPrediction) -> str:
    """Return the decisions, and the alternatives with the reason why each was slower or did not fit."""
    chosen = "".join(
        f"<li><span>{escape_text(name)}</span>{escape_text(value)}</li>"
        for name, value in plan.decisions.items()
        if value
    )
    names = _varied_decisions(plan.decisions, plan.alternatives)
    fullest = fullest_lane(prediction)
    figures = _cost_cells(prediction.step_s, fullest.peak_bytes, fullest.limit_bytes)
    rows = [["<b>this plan</b>", *_decision_cells(plan.decisions, names), *figures, "chosen"]]
    for number, alternative in enumerate(plan.alternatives, 2):
        rows.append(
            [
                str(number),
                *_decision_cells(alternative.decisions, names),
                *_cost_cells(alternative.step_s, alternative.peak_bytes, alternative.limit_bytes),
                f'<span class="why">{escape_text(alternative.reason)}</span>',
            ]
        )
    heads = ["", *names, "Step time", "Peak", "Of limit", "Why"]
    width = len(names)
    comparison = (
        html_table(
            "This plan and its alternatives",
            heads,
            rows,
            numeric=range(width + 1, width + 4),
            stack=True,
        )
        if plan.alternatives
        else '<p class="note">The plan records no alternatives.</p>'
    )
    why = "".join(
        f'<p class="note">{escape_text(note[:1].upper() + note[1:])}.</p>' for note in search_notes(prediction)
    )
    stages = stage_table(replace(plan, prediction=prediction))
    held = html_table(
        "Layers of each stage",
        stages.columns,
        [[escape_text(cell) for cell in row] for row in stages.rows],
        numeric=range(len(stages.columns) - 2, len(stages.columns)),
        stack=True,
    )
    return section_card("decisions", "Decisions", f'<ul class="choices">{chosen}</ul>{why}{held}{comparison}')


def provenance_section(subject: ReportSubject) -> str:
    """Return the plan, model, cluster, versions and machine, the assumptions, and the drift of the prediction."""
    plan, cluster, record = subject.plan, subject.cluster, subject.record
    source, python = cluster.provenance, ".".join(map(str, sys.version_info[:3]))
    facts = [
        ("Plan", f"<code>{subject.plan_hash}</code>, format {plan.version}"),
        (
            "Model",
            f"{escape_text(plan.model.name)} ({escape_text(plan.model.family)}), <code>{plan.hashes.model}</code>",
        ),
        (
            "Cluster",
            f"{escape_text(cluster.name)}, <code>{plan.hashes.cluster}</code>; {escape_text(source.source)}"
            + "".join(f", {escape_text(part)}" for part in (source.where, source.when) if part),
        ),
        ("Model FLOPs of a step", f"{format_flops(subject.prediction.flops_per_step)} without recomputation"),
        (
            "Report",
            f"pipefit {__version__}, Python {python}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        ),
    ]
    if record is not None:
        facts.append(("Run", f"<code>{escape_text(record.path)}</code>, {len(record.steps)} steps"))
        facts += [(f"Run: {escape_text(key)}", escape_text(value)) for key, value in record.environment.items()]
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts)
    notes = "".join(f"<li>{escape_text(note)}</li>" for note in subject.prediction.assumptions)
    assumed = f'<h3>Assumptions of the prediction</h3><ul class="plain">{notes}</ul>' if notes else ""
    return section_card("provenance", "Provenance", f'{_drift_note(subject)}<dl class="facts">{listed}</dl>{assumed}')


def _drift_note(subject: ReportSubject) -> str:
    if prediction_drift(subject) <= DRIFT:
        return ""
    now = format_seconds(subject.simulation.timeline.makespan_s)
    return (
        f'<p class="warning">The plan predicts {format_seconds(subject.prediction.step_s)} a step; simulated now, with '
        f"this version of pipefit, it takes {now}. The timeline, memory curves and breakdown show the latter.</p>"
    )


def _varied_decisions(chosen: Mapping[str, str], others: Sequence[AlternativePlan]) -> list[str]:
    """Return the decisions in which alternatives differ, in the plan's order, without the long list of cuts."""
    named = {name for alternative in others for name in alternative.decisions} - {"cuts"}
    names = [name for name in dict.fromkeys([*chosen, *sorted(named)]) if name in named]
    return [
        name
        for name in names
        if len({alternative.decisions.get(name, "") for alternative in others} | {chosen.get(name, "")}) > 1
    ]


def _decision_cells(decisions: Mapping[str, str], names: Sequence[str]) -> list[str]:
    return [escape_text(word) for word in choice_cells(decisions, names)]


def _cost_cells(step_s: float, peak: float, limit: float) -> list[str]:
    return [
        ("" if peak <= limit else "at least ") + format_seconds(step_s) if step_s > 0 else "",
        format_bytes(peak) if peak > 0 else "",
        format_percent(peak / limit) if limit and peak > 0 else "",
    ]
