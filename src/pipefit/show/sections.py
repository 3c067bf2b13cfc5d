"""The sections of the report with drawings: figures, timeline, breakdown, memory, links, training.

Every drawing has a table with the same figures beside it. The scripts in `assets/` draw from the data that `page.py`
embeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipefit.layout import Mesh
from pipefit.plan.explain.text import risk_line
from pipefit.plan.types import LanePrediction
from pipefit.show.breakdown import TIME_PARTS, StepBreakdown
from pipefit.show.figures import COLUMNS, FigurePair, ReportColumn, format_difference, format_percent
from pipefit.show.html import escape_text, html_table
from pipefit.show.record import RecordedStep, RunRecord
from pipefit.show.subject import ReportSubject
from pipefit.show.trace import TraceRow
from pipefit.show.traffic import REASONS, StepTraffic
from pipefit.units import format_bandwidth, format_bytes, format_seconds

KIND_STYLES = (
    ("F", "--f", "", "Forward F"),
    ("B", "--b", "back", "Backward B"),
    ("I", "--i", "dotted", "Input gradient I"),
    ("W", "--w", "striped", "Weight gradient W"),
    ("T", "--t", "thin", "Transfers"),
    ("R", "--r", "dotted", "Reductions"),
    ("O", "--o", "crossed", "Norm and optimizer"),
)
"""Key, colour, pattern and name of the legend's entries; the keys match `assets/timeline.js`."""

PART_STYLES = {
    "compute": ("--f", ""),
    "communication": ("--t", "striped"),
    "idle": ("", "idle"),
    "optimizer": ("--o", "crossed"),
    "data": ("--w", "dotted"),
}


BUSIEST = 8
"""Links in the table beside the heat-map."""


SHOWN_DEVICES = 128
"""Largest number of bars in the breakdown."""


def section_card(identifier: str, title: str, body: str) -> str:
    """Return a section of the page."""
    return (
        f'<section class="card" id="{identifier}" aria-labelledby="{identifier}-title">'
        f'<h2 id="{identifier}-title">{escape_text(title)}</h2>{body}</section>'
    )


def headline_tiles(
    figures: Mapping[str, FigurePair], record: RunRecord | None, extra: Sequence[tuple[str, str, str]] = ()
) -> str:
    """Return the headline figures, measured and predicted; without a run, the prediction alone."""
    titled = (column for column in COLUMNS.values() if column.title and column.name in figures)
    shown = sorted(titled, key=lambda column: column.is_share)
    entries = [
        *(_figure_tile(column, figures[column.name]) for column in shown),
        *(plain_tile(*entry) for entry in extra),
    ]
    if record is not None and record.steps:
        first, last = record.steps[0], record.steps[-1]
        steps = f"from <b>{first.loss:.3f}</b> over {len(record.steps)} steps"
        entries.append(plain_tile("Loss", f"{last.loss:.3f}", steps))
    return f'<dl class="tiles">{"".join(entries)}</dl>'


CROWDED = 0.9
"""Share of the time with a core below which a run was slowed by a busy machine."""


def crowding_words(record: RunRecord | None) -> str:
    """Return a sentence for a run whose processes lacked cores of their machine, '' for any other."""
    share = None if record is None else record.core_share
    if share is None or share >= CROWDED:
        return ""
    return (
        f"A process of this run had a core for only {share:.0%} of the time that it could compute: other work, or more "
        "processes than cores, slowed the run."
    )


def _figure_tile(column: ReportColumn, pair: FigurePair) -> str:
    def show_value(value: float) -> str:
        return escape_text(column.format_value(value))

    if pair.measured is None:
        value = show_value(pair.predicted) if pair.predicted is not None else "not known"
        return plain_tile(column.title, value, "predicted")
    if pair.predicted is None:
        return plain_tile(column.title, show_value(pair.measured), "measured")
    off = format_difference(pair, column.is_share).replace("-", "−")
    return plain_tile(column.title, show_value(pair.measured), f"predicted <b>{show_value(pair.predicted)}</b> ({off})")


def plain_tile(name: str, value: str, small: str) -> str:
    """Return a tile: a name, a value and a smaller line below; these two are HTML already."""
    return (
        f'<div class="tile"><dt>{escape_text(name)}</dt><dd class="big">{value}</dd><dd '
        f'class="small">{small}</dd></div>'
    )


def timeline_section(subject: ReportSubject, kinds: Iterable[str], left_out: int) -> str:
    """Return the timeline with its controls. `kinds` are the keys of KIND_STYLES that occur."""
    record = subject.record
    traced = record is not None and record.trace is not None
    occurring = set(kinds)
    legend = "".join(
        f'<button type="button" data-kind="{key}" aria-pressed="true">'
        f'<span class="swatch {pattern}" style="--c:var({colour})"></span>{name}</button>'
        for key, colour, pattern, name in KIND_STYLES
        if key in occurring
    )
    sets = [("critical", "Critical path")]
    if traced:
        sets = [("predicted", "Predicted"), ("measured", "Measured"), *sets]
        if any(group.size > 1 for group in _lane_groups(subject)):
            sets.insert(2, ("all", "Every device"))
    switches = "".join(
        f'<button type="button" data-set="{key}" aria-pressed="true">{name}</button>' for key, name in sets
    )
    moves = "".join(
        f'<button type="button" class="square" data-view="{key}" aria-label="{name}">{sign}</button>'
        for key, name, sign in (
            ("left", "Earlier", "←"),
            ("right", "Later", "→"),
            ("out", "Zoom out", "−"),
            ("in", "Zoom in", "+"),
        )
    )
    return section_card(
        "timeline-section",
        "Timeline of one step",
        f'<p class="lead">{_timeline_lead(subject, traced)}{_shade_note(subject)}</p>{_omitted_rows_note(left_out)}'
        f'<div class="controls"><div class="group" role="group" aria-label="Kinds of action">{legend}</div></div>'
        f'<div class="controls"><div class="group" role="group" aria-label="What is shown">{switches}</div>'
        f'<span class="spring"></span><div class="group" role="group" aria-label="View">{moves}'
        '<button type="button" data-view="fit">Whole step</button></div></div>'
        '<div class="timeline"><div class="timeline-scroll" id="timeline-scroll"><div id="timeline-spacer">'
        '<canvas id="timeline" tabindex="0" role="application" aria-roledescription="timeline" '
        'aria-label="Timeline. Arrow keys go from action to action and from row to row; plus and minus zoom; 0 shows '
        'the whole step." aria-describedby="timeline-status"></canvas></div></div>'
        '<div class="overview" id="timeline-overview" aria-hidden="true"><div class="thumb" id="timeline-thumb"></div>'
        '</div><div class="tip" id="timeline-tip" hidden></div></div>'
        '<p class="status" id="timeline-status" role="status" aria-live="polite"></p>'
        '<details><summary>How to move and zoom</summary><p class="note">'
        "Drag to move; zoom with Ctrl and the wheel, two fingers, a double click or the buttons. "
        "With the keyboard: arrows choose an action, + and − zoom, 0 shows all. Thin strips are links: a transfer from "
        "its start to the arrival of its data, and reductions.</p></details>",
    )


def _timeline_lead(subject: ReportSubject, traced: bool) -> str:
    record = subject.record
    if traced and record is not None and record.trace is not None:
        return f"Each lane's prediction stands above its devices' trace of step {record.trace.step}, on one time axis."
    if record is not None:
        return "The run left no trace, so only the prediction is drawn."
    return "The plan has not run: this is the simulator's prediction, one row a lane."


def _shade_note(subject: ReportSubject) -> str:
    schedule = subject.simulation.timeline.schedule
    return " A lane's later stages are lighter." if schedule.num_stages > len(schedule.lanes) else ""


def _omitted_rows_note(count: int) -> str:
    if not count:
        return ""
    return (
        f'<p class="note warning">{count} measured rows are not drawn, to keep the file small: of each lane the first '
        "and the slowest device are. The breakdown below has every device.</p>"
    )


def breakdown_section(
    subject: ReportSubject, predicted: Sequence[StepBreakdown], measured: Sequence[StepBreakdown]
) -> str:
    """Return bars and a table with the parts of every device's step."""
    measured, left_out = _extreme_devices(measured)
    lanes = {part.lane: part for part in predicted}
    longest = max((part.total_s for part in (*predicted, *measured)), default=0.0) or 1.0
    rows: list[tuple[str, str, StepBreakdown, StepBreakdown | None]] = []
    if measured:
        for part in measured:
            rows.append((f"Device {part.device}", f"lane {part.lane}", lanes[part.lane], part))
    else:
        for part in predicted:
            rows.append((f"Lane {part.lane}", _lane_device_words(subject, part.lane), part, None))
    bars = "".join(
        f'<div class="device"><div class="who">{escape_text(name)}<small>{escape_text(note)}</small></div>'
        + _breakdown_bar("predicted", before, longest)
        + (_breakdown_bar("measured", after, longest) if after else "")
        + "</div>"
        for name, note, before, after in rows
    )
    used = [name for name in TIME_PARTS if any(part.seconds[name] for part in (*predicted, *measured))]
    legend = "".join(f"<li>{_part_swatch(name)}{_part_name(name)}</li>" for name in used)
    modifier = " many" if len(rows) > 8 else ""
    lead = "The number at the right is the share of the step in which the device computes."
    if measured and not any(row.wait_s is not None for row in _trace_rows(subject)):
        lead += (
            " The trace does not record how long each action waited for its data: waiting until the sender began is "
            "counted as idle, the transfer itself as compute."
        )
    if left_out:
        lead += f" {left_out} devices are left out; of each lane the devices that compute least and most are shown."
    return section_card(
        "breakdown",
        "Where the step goes",
        f'<p class="lead">{lead}</p><ul class="legend">{legend}</ul>'
        f'<div class="bars{modifier}" tabindex="0" role="region" aria-label="Bars of every device">{bars}</div>'
        f"<details><summary>The same as a table</summary>{_breakdown_table(predicted, measured)}</details>",
    )


def _extreme_devices(measured: Sequence[StepBreakdown]) -> tuple[Sequence[StepBreakdown], int]:
    """If there are too many devices, keep those of each lane that compute least and most. Returns them and the number
    left out."""
    if len(measured) <= SHOWN_DEVICES:
        return measured, 0
    extremes = []
    for lane in sorted({part.lane for part in measured}):
        by_compute = sorted((part for part in measured if part.lane == lane), key=lambda part: part.seconds["compute"])
        extremes += by_compute if len(by_compute) < 3 else [by_compute[0], by_compute[-1]]
    return extremes, len(measured) - len(extremes)


def _breakdown_bar(tag: str, part: StepBreakdown, longest: float) -> str:
    pieces = "".join(
        f'<span class="part {PART_STYLES[name][1]}" style="--c:var({PART_STYLES[name][0] or "--idle"});'
        f'width:{100 * part.seconds[name] / longest:.3f}%" title="{_part_name(name)}: '
        f'{format_seconds(part.seconds[name])}"></span>'
        for name in TIME_PARTS
        if part.seconds[name] > 0
    )
    share = format_percent(part.seconds["compute"] / part.total_s) if part.total_s else ""
    return (
        f'<div class="track"><span class="tag">{tag}</span><span class="whole">{pieces}</span>'
        f'<span class="share">{share}</span></div>'
    )


def _breakdown_table(predicted: Sequence[StepBreakdown], measured: Sequence[StepBreakdown]) -> str:
    rows = [
        [
            f"Lane {part.lane}" if part.device is None else f"Device {part.device}",
            "predicted" if part.device is None else "measured",
            *(format_seconds(part.seconds[name]) for name in TIME_PARTS),
            format_seconds(part.total_s),
        ]
        for part in (*predicted, *measured)
    ]
    heads = ["Of", "How", *map(_part_name, TIME_PARTS), "Step"]
    return html_table("Parts of the time of one step", heads, rows, numeric=range(2, 8))


def _part_name(name: str) -> str:
    return {"communication": "Exposed communication"}.get(name, name.capitalize())


def _part_swatch(name: str) -> str:
    colour, pattern = PART_STYLES[name]
    return f'<span class="swatch {pattern}" style="--c:var({colour or "--idle"})"></span>'


def memory_section(subject: ReportSubject, peaks: Mapping[int, float]) -> str:
    """Return a curve for each lane, and a table of peaks against limits."""
    prediction = subject.prediction
    figures, rows = [], []
    for number, lane in enumerate(prediction.lanes):
        group = subject.plan.lane_mesh(number)
        measured = [peaks[device] for device in group.devices if device in peaks]
        over = ' <span class="over">over the limit</span>' if lane.peak_bytes > lane.limit_bytes else ""
        measured_text = f", measured {format_bytes(max(measured))}" if measured else ""
        figures.append(
            f'<figure data-memory="{number}"><figcaption><b>Lane {number}</b> peak {format_bytes(lane.peak_bytes)}'
            f'{measured_text}{over}</figcaption><div class="holder"></div></figure>'
        )
        rows.append(_memory_row(f"Lane {number}", _lane_device_words(subject, number), lane, measured))
    small = " small" if len(prediction.lanes) > 12 else ""
    parts = list(prediction.lanes[0].parts) if prediction.lanes else []
    heads = [
        "Lane",
        "Devices",
        *(name.capitalize() for name in parts),
        "Predicted peak",
        "Limit",
        "Used",
        "Measured peak",
    ]
    choice = _choice_buttons("memory-scale", "Scale", (("peak", "To the peak"), ("limit", "To the limit")))
    held = "; the solid line is the measured peak" if peaks else ""
    if peaks and "cpu" in subject.cluster.kinds:
        held += " (on CPUs the resident memory of the process, Python and its libraries included)"
    return section_card(
        "memory",
        "Memory",
        '<p class="lead">Predicted use over one step. The grey base is static for the full run: parameters, gradients, '
        f"optimizer state, workspace. The dashed line is the limit{held}.</p>"
        + (f'<p class="risk">{escape_text(risk_line(prediction))}.</p>' if prediction.risk is not None else "")
        + f'<div class="controls">{choice}</div><div class="charts{small}">{"".join(figures)}</div>'
        "<details><summary>Peaks and parts as a table</summary>"
        + html_table("Memory of a device of each lane", heads, rows, numeric=range(2, len(heads)))
        + "</details>",
    )


def _memory_row(name: str, devices: str, lane: LanePrediction, own: Sequence[float]) -> list[str]:
    return [
        name,
        escape_text(devices),
        *(format_bytes(value) for value in lane.parts.values()),
        format_bytes(lane.peak_bytes),
        format_bytes(lane.limit_bytes),
        format_percent(lane.peak_bytes / lane.limit_bytes) if lane.limit_bytes else "",
        format_bytes(max(own)) if own else "not recorded",
    ]


def links_section(subject: ReportSubject, traffic: StepTraffic) -> str:
    """Return the heat-map and a table of its busiest links."""
    if not traffic.bytes:
        return section_card(
            "links", "Links", '<p class="lead">One device, or devices that share nothing: no link carries anything.</p>'
        )
    choices = _choice_buttons(
        "links-metric", "Colour by", (("bytes", "Bytes"), ("time", "Time"), ("bandwidth", "Bandwidth"))
    )
    if len(subject.cluster.hosts) > 1:
        choices += _choice_buttons("links-level", "Between", (("devices", "Devices"), ("hosts", "Hosts")))
    rows = []
    for (source, target), total in sorted(traffic.pair_totals().items(), key=lambda item: -item[1])[:BUSIEST]:
        link = subject.network.find_link(source, target)
        why = ", ".join(f"{reason} {format_bytes(traffic.bytes[source, target][reason])}" for reason in REASONS
                        if traffic.bytes[source, target].get(reason))  # fmt: skip
        rows.append(
            [
                f"{source} to {target}",
                format_bytes(total),
                format_bandwidth(link.bandwidth_bytes_per_s),
                format_seconds(total / link.bandwidth_bytes_per_s),
                escape_text(why),
            ]
        )
    heads = ["Devices", "Bytes a step", "Bandwidth", "Busy for", "What for"]
    return section_card(
        "links",
        "Links",
        '<p class="lead">Bytes that the plan sends from each row to each column in one step. Point at a square for its '
        "figures.</p>"
        f'<div class="controls">{choices}</div>'
        '<div class="columns"><div><div class="heat"><div id="links-map"></div></div>'
        '<p class="scale"><span id="links-low"></span><span class="ramp" aria-hidden="true"></span>'
        '<span id="links-high"></span></p>'
        '<p class="status" id="links-status" role="status" aria-live="polite"></p></div>'
        + html_table("The busiest links, by bytes of one step", heads, rows, numeric=(1, 2, 3), stack=True)
        + "</div>",
    )


def training_section(record: RunRecord, predicted_s: float) -> str:
    """Return loss and step time over the run."""
    last = record.steps[-1]
    held = f"; held-out {record.evaluations[-1][1]:.3f}" if record.evaluations else ""
    rows = [
        [str(step.step), f"{step.loss:.4f}", format_seconds(step.step_s), f"{step.grad_norm:.3f}"]
        for step in _sample_steps(record.steps, 12)
    ]
    points = ", circles: over held-out text" if record.evaluations else ""
    return section_card(
        "training",
        "Training",
        '<div class="columns">'
        f'<figure id="loss-chart"><figcaption><b>Loss</b>{points} <output>{last.loss:.3f} at step {last.step}{held}'
        '</output></figcaption><div class="holder"></div></figure>'
        '<figure id="time-chart"><figcaption><b>Step time</b>, dashed: predicted '
        f"<output>median {format_seconds(record.step_s)}, predicted {format_seconds(predicted_s)}</output></figcaption>"
        '<div class="holder"></div></figure></div>'
        "<details><summary>Some steps as a table</summary>"
        + html_table("Steps of the run", ["Step", "Loss", "Step time", "Gradient norm"], rows, numeric=(1, 2, 3))
        + "</details>",
    )


def _sample_steps(items: Sequence[RecordedStep], most: int) -> list[RecordedStep]:
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def _choice_buttons(name: str, legend: str, choices: Sequence[tuple[str, str]]) -> str:
    inner = "".join(
        f'<label><input type="radio" name="{name}" value="{value}">{label}</label>' for value, label in choices
    )
    return f'<fieldset class="segments"><legend>{legend}</legend>{inner}</fieldset>'


def _lane_groups(subject: ReportSubject) -> list[Mesh]:
    return [subject.plan.lane_mesh(lane) for lane in range(len(subject.prediction.lanes))]


def _lane_device_words(subject: ReportSubject, lane: int) -> str:
    devices = subject.plan.lane_mesh(lane).devices
    if len(devices) == 1:
        return f"device {devices[0]}"
    if devices == tuple(range(devices[0], devices[0] + len(devices))):
        return f"devices {devices[0]} to {devices[-1]}"
    return "devices " + ", ".join(map(str, devices[:6])) + (" ..." if len(devices) > 6 else "")


def _trace_rows(subject: ReportSubject) -> tuple[TraceRow, ...]:
    record = subject.record
    return record.trace.rows if record is not None and record.trace is not None else ()
