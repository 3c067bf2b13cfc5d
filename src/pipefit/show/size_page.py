"""The page of `pipefit size`: the answers, days against devices as a curve for each kind of device, and the table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipefit.plan.sizing.request import SizingRequest
from pipefit.plan.sizing.sizes import DAY_S, SizedTraining, answer_sizes
from pipefit.plan.sizing.text import format_days, size_cells, size_columns, size_headline, time_words
from pipefit.show.html import escape_text, html_table
from pipefit.show.page import fill_template
from pipefit.show.scales import LogScale
from pipefit.show.sections import plain_tile, section_card

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 380, 86, 46, 18, 96
"""Size and margins of the drawing, in its own units."""

CURVE_COLOURS = ("--f", "--b", "--w", "--t", "--i", "--r")
"""Colours of the kinds of devices, in their order; further kinds begin again."""


def render_sizes(request: SizingRequest, trainings: Sequence[SizedTraining]) -> str:
    """Return a complete page that opens without a network."""
    title = f"How many devices: {request.name}"
    sections = [
        f'<h1>{escape_text(title)}</h1><p class="lead">{escape_text(size_headline(request))}</p>',
        _answer_section(request, trainings),
        _curve_section(request, trainings),
        _table_section(request, trainings),
    ]
    entries = (("answers", "Answers"), ("curve", "Time"), ("clusters", "Clusters"))
    navigation = "".join(f'<a href="#{name}">{text}</a>' for name, text in entries)
    return fill_template("\n".join(filter(None, sections)), {}, title, navigation)


def _answer_section(request: SizingRequest, trainings: Sequence[SizedTraining]) -> str:
    tiles = []
    for answer in answer_sizes(trainings, request.deadline_s):
        training = answer.training
        value, small = "none", "no cluster that was planned"
        if training is not None and training.days is not None:
            value, small = training.size.cluster, time_words(training)
        tiles.append(plain_tile(answer.question, escape_text(value), escape_text(small)))
    note = (
        '<p class="note">Every cluster is planned by the layout search, from the data sheets of its devices. '
        "<code>pipefit plan</code> searches one cluster further.</p>"
    )
    return section_card("answers", "Answers", f'<dl class="tiles">{"".join(tiles)}</dl>{note}')


def _table_section(request: SizingRequest, trainings: Sequence[SizedTraining]) -> str:
    columns = size_columns(request)
    rows = [[escape_text(cell) for cell in size_cells(request, training)] for training in trainings]
    numeric = range(1, len(columns) - 1)
    return section_card("clusters", "Clusters", html_table("All clusters", columns, rows, numeric=numeric, stack=True))


def _curve_section(request: SizingRequest, trainings: Sequence[SizedTraining]) -> str:
    """Return the drawing, or '' if the training fits nowhere."""
    points = [(t.size.device, t.size.devices, t.days) for t in trainings if t.days is not None]
    if not points:
        return ""
    deadline = None if request.deadline_s is None else request.deadline_s / DAY_S
    lead = '<p class="lead">Both axes are logarithmic: a straight line down is perfect scaling.</p>'
    return section_card("curve", "Time over devices", lead + _draw_curves(points, deadline))


def _draw_curves(points: Sequence[tuple[str, int, float]], deadline: float | None) -> str:
    counts = sorted({count for _, count, _ in points})
    all_days = [days for *_, days in points] + ([] if deadline is None else [deadline])
    x = LogScale(counts[0], counts[-1], LEFT, WIDTH - RIGHT)
    y = LogScale(min(all_days) / 1.2, max(all_days) * 1.2, HEIGHT - BOTTOM, TOP)
    parts = [_draw_axes(x, y, counts)]
    if deadline is not None:
        level = y(deadline)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}" stroke="var(--bad)" '
            f'stroke-dasharray="5 4" stroke-width="1.5"/><text x="{LEFT + 6}" y="{level - 5:.1f}" '
            f'class="trade-limit">deadline</text>'
        )
    ends: list[float] = []
    for number, device in enumerate(dict.fromkeys(device for device, *_ in points)):
        line = [(x(count), y(days), count, days) for name, count, days in points if name == device]
        colour = CURVE_COLOURS[number % len(CURVE_COLOURS)]
        parts.append(_draw_curve(device, line, colour, ends))
    label = "Time of the training against the number of devices"
    return (
        f'<div class="scroll"><svg id="size-drawing" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{label}; the table holds the same figures">{"".join(parts)}</svg></div>'
    )


def _draw_curve(device: str, line: Sequence[tuple[float, float, int, float]], colour: str, ends: list[float]) -> str:
    """Return the curve of a kind of device, with a title on every point. `ends` are the heights of the names so far."""
    path = " ".join(f"{across:.1f},{down:.1f}" for across, down, *_ in line)
    marks = "".join(
        f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="var({colour})"><title>{escape_text(device)}, '
        f"{count} devices: {format_days(days)}</title></circle>"
        for across, down, count, days in line
    )
    height = line[-1][1] + 4
    while any(abs(height - end) < 14 for end in ends):
        height += 14
    ends.append(height)
    return (
        f'<polyline points="{path}" fill="none" stroke="var({colour})" stroke-width="2"/>{marks}'
        f'<text x="{line[-1][0] + 9:.1f}" y="{height:.1f}" class="trade-name">{escape_text(device)}</text>'
    )


def _draw_axes(x: LogScale, y: LogScale, counts: Sequence[int]) -> str:
    parts = []
    for days in _round_durations(y.low, y.high):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(days):.1f}" y2="{y(days):.1f}" stroke="var(--line)"/>'
            f'<text x="{LEFT - 8}" y="{y(days) + 4:.1f}" text-anchor="end">{format_days(days)}</text>'
        )
    last = -math.inf
    for count in counts:
        if x(count) - last >= 34:
            last = x(count)
            parts.append(f'<text x="{last:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{count}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">devices</text>')
    return "".join(parts)


def _round_durations(low: float, high: float) -> list[float]:
    """Return round numbers of minutes, hours and days between the limits, both in days; at most about ten."""
    minutes, hours = (1, 2, 5, 10, 20, 30), (1, 2, 4, 12)
    decades = range(max(0, math.floor(math.log10(low))), max(0, math.ceil(math.log10(high))) + 1)
    days = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    values = [*(count / 1440 for count in minutes), *(count / 24 for count in hours), *days]
    inside = [value for value in values if low <= value <= high]
    return inside[:: math.ceil(len(inside) / 10) or 1]
