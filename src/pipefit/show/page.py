"""The report: one self-contained HTML file. It loads nothing from a network."""

from __future__ import annotations

import math
from importlib import resources
from string import Template
from typing import Any

from pipefit import __version__
from pipefit.show.breakdown import measured_breakdown, predicted_breakdown, with_waits
from pipefit.show.encode import critical_flags, encode_curve, encode_traces
from pipefit.show.figures import figures_of
from pipefit.show.html import embed_json, escape_text
from pipefit.show.record import RunRecord
from pipefit.show.sections import (
    breakdown_section,
    crowding_words,
    headline_tiles,
    links_section,
    memory_section,
    timeline_section,
    training_section,
)
from pipefit.show.sections_plan import bound_section, decisions_section, provenance_section
from pipefit.show.sections_trade import trade_section
from pipefit.show.subject import ReportSubject
from pipefit.show.trace import StepTrace, from_timeline
from pipefit.show.traffic import REASONS, StepTraffic, step_traffic
from pipefit.units import format_seconds

SCRIPTS = ("decode.js", "timeline.js", "controls.js", "charts.js", "links.js", "trade.js", "page.js")
LEGEND_KEYS = {"SEND_F": "T", "SEND_B": "T", "RECV_F": "T", "RECV_B": "T", "REDUCE": "R", "GATHER": "R"}
"""Legend keys of the action kinds without a key of their own; NORM, STEP and FREE are `O`."""

MOST_STEPS = 1500
"""Largest number of points of a curve over the run; of more steps, every k-th is drawn."""


def render_report(subject: ReportSubject) -> str:
    """Return the HTML text of the report."""
    plan, record = subject.plan, subject.record
    measured = record.trace if record is not None else None
    predicted = from_timeline(subject.simulation.timeline)
    traces = [predicted] if measured is None else [predicted, with_waits(measured, plan)]
    traffic = step_traffic(subject.simulation.work, subject.network, plan.order.microbatches)
    timeline = _timeline_data(subject, traces)
    peaks = record.peak_bytes if record is not None else {}
    sections = [
        _page_head(subject),
        timeline_section(subject, _action_kinds(traces), timeline["left_out"]),
        breakdown_section(
            subject,
            predicted_breakdown(subject.simulation.timeline),
            measured_breakdown(measured, plan) if measured is not None else (),
        ),
        memory_section(subject, peaks),
        links_section(subject, traffic),
        training_section(record, subject.prediction.step_s) if record is not None and record.steps else "",
        trade_section(subject.prediction),
        bound_section(subject.prediction),
        decisions_section(plan, subject.prediction),
        provenance_section(subject),
    ]
    data: dict[str, Any] = {"timeline": timeline, "memory": _memory_data(subject, peaks)}
    if traffic.bytes:
        data["links"] = _links_data(subject, traffic)
    if record is not None and record.steps:
        data["training"] = _training_data(record, subject.prediction.step_s)
    return fill_template("\n".join(filter(None, sections)), data, _page_title(subject), _navigation_links(subject))


def read_asset(name: str) -> str:
    """Read a file that ships beside this module."""
    return resources.files("pipefit.show").joinpath("assets", name).read_text(encoding="utf-8")


def fill_template(body: str, data: dict[str, Any], title: str, navigation: str) -> str:
    """Return the page: styles, scripts and data are in it. The sections of `body` are HTML, the title is text."""
    return Template(read_asset("template.html")).substitute(
        version=__version__,
        title=escape_text(title),
        css=read_asset("report.css"),
        navigation=navigation,
        body=body,
        footer=f"Made by pipefit {__version__}. The file is complete: it opens without a network.",
        data=embed_json(data),
        script="\n".join(map(read_asset, SCRIPTS)),
    )


def _page_title(subject: ReportSubject) -> str:
    return f"{subject.plan.model.name} on {subject.cluster.name}"


def _navigation_links(subject: ReportSubject) -> str:
    entries = [
        ("timeline-section", "Timeline"),
        ("breakdown", "Step"),
        ("memory", "Memory"),
        ("links", "Links"),
        *([("training", "Training")] if subject.record is not None and subject.record.steps else []),
        *([("trade", "Trade")] if subject.prediction.trade else []),
        ("bound", "Limits"),
        ("decisions", "Decisions"),
        ("provenance", "Provenance"),
    ]
    return "".join(f'<a href="#{anchor}">{name}</a>' for anchor, name in entries)


def _page_head(subject: ReportSubject) -> str:
    plan, prediction = subject.plan, subject.prediction
    lanes = len(prediction.lanes)
    facts = [
        ("Devices", str(len(plan.used_devices))),
        ("Lanes", str(lanes)),
        ("Stages", str(len(plan.stages))),
        ("Batch", f"{plan.job.batch} x {plan.job.sequence} tokens"),
        ("Microbatches", str(plan.order.microbatches)),
        *([("Slices", str(len(plan.order.slices)))] if len(plan.order.slices) > 1 else []),
        ("Schedule", plan.order.name),
        ("Precision", plan.job.precision),
        ("Optimizer", plan.job.optimizer),
    ]
    listed = "".join(f"<span>{name} <b>{escape_text(value)}</b></span>" for name, value in facts)
    extra = []
    if prediction.lower_bound_s > 0:
        above = prediction.step_s / prediction.lower_bound_s - 1.0
        extra.append(
            ("Lower bound", format_seconds(prediction.lower_bound_s), f"the plan is <b>{100 * above:.1f} %</b> above")
        )
    crowding = crowding_words(subject.record)
    warning = f'<p class="warning">{escape_text(crowding)}</p>' if crowding else ""
    tiles = headline_tiles(figures_of(plan, subject.record), subject.record, extra)
    return f'<h1>{escape_text(_page_title(subject))}</h1><p class="sub">{listed}</p>{tiles}{warning}'


def _action_kinds(traces: list[StepTrace]) -> set[str]:
    kinds = {action.kind for trace in traces for row in trace.rows for action in set(row.actions)}
    return {kind if kind in "FIWB" else LEGEND_KEYS.get(kind, "O") for kind in kinds}


def _timeline_data(subject: ReportSubject, traces: list[StepTrace]) -> dict[str, Any]:
    data = encode_traces(traces, len(subject.plan.order.slices))
    data["slices"] = len(subject.plan.order.slices)
    path = [(span.lane, span.action) for span in subject.simulation.timeline.critical_path]
    data["critical"] = critical_flags(traces[0].rows, path)
    return data


def _memory_data(subject: ReportSubject, peaks: Any) -> dict[str, Any]:
    horizon_s = subject.simulation.timeline.makespan_s
    lanes = []
    for number, (devices, lane) in enumerate(
        zip(subject.simulation.device_peaks, subject.prediction.lanes, strict=True)
    ):
        curve = next((entry for entry in devices if entry.kind == lane.kind), devices[0]).curve
        device_peaks = [[device, peaks[device]] for device in subject.plan.lane_mesh(number).devices if device in peaks]
        lanes.append(
            {
                **encode_curve(curve, horizon_s),
                "peak": curve.peak_bytes,
                "limit": lane.limit_bytes,
                "measured": device_peaks,
            }
        )
    return {"horizon_s": horizon_s, "lanes": lanes}


def _links_data(subject: ReportSubject, traffic: StepTraffic) -> dict[str, Any]:
    network, cluster = subject.network, subject.cluster
    used = sorted({device for pair in traffic.bytes for device in pair} | set(subject.plan.used_devices))
    position = {device: index for index, device in enumerate(used)}
    hosts = sorted({network.host[device] for device in used})
    pairs = []
    for (source, target), parts in sorted(traffic.bytes.items()):
        link = network.find_link(source, target)
        sizes = [round(parts.get(reason, 0.0)) for reason in REASONS]
        pairs.append([position[source], position[target], sizes, link.bandwidth_bytes_per_s, link.latency_s])
    return {
        "devices": [str(device) for device in used],
        "hosts": [cluster.hosts[host].name for host in hosts],
        "host": [hosts.index(network.host[device]) for device in used],
        "reasons": list(REASONS),
        "pairs": pairs,
    }


def _training_data(record: RunRecord, predicted_s: float) -> dict[str, Any]:
    stride = max(1, math.ceil(len(record.steps) / MOST_STEPS))
    steps = record.steps[::stride]
    return {
        "step": [step.step for step in steps],
        "loss": [step.loss for step in steps],
        "step_s": [step.step_s for step in steps],
        "evaluations": [list(pair) for pair in record.evaluations],
        "predicted_s": predicted_s,
    }
