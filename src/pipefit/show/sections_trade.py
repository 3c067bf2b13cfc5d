"""The report's section on memory against time: a point per schedule family and recomputation mode, and a curve of
fitted orders.

The drawing is static, with a table of the same figures below it; `assets/trade.js` describes the point that the user
picks.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.plan.types import PlanPrediction, TradePoint
from pipefit.schedule.fit.family import FIT
from pipefit.show.html import escape_text, html_table
from pipefit.show.labels import CHARACTER, PlacedLabel, place_labels
from pipefit.show.scales import LinearScale
from pipefit.show.sections import section_card
from pipefit.units import format_bytes, format_seconds

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 380, 86, 46, 18, 16
"""Size and margins of the drawing, in its own units."""

SLOWEST = 1.7
"""Points slower than this multiple of the fastest appear in the table only."""

AXIS_TICKS = 5
RECOMPUTE_COLOURS = {"none": "--f", "selective": "--w", "full": "--b"}
"""Colours by recomputation mode. Points whose stages differ have the colour of the fitted curve."""

CURVE = "--t"
LIMIT_NAME = "a device"


def trade_section(prediction: PlanPrediction) -> str:
    """Return memory against time on the plan's layout, or '' if the plan has no such points."""
    points = prediction.trade
    if not points:
        return ""
    limit = min(lane.least_limit_bytes for lane in prediction.lanes)
    divided = _limit_divides(points, limit)
    chosen = next((point for point in points if point.chosen), None)
    words = (
        '<p class="lead">The same layout with other orders and other recomputation: the memory of a device, and how '
        "long a step would take. The line joins orders made for a memory limit (<b>fit</b>); the points are schedule "
        f"families; {'points right of the dashed line do' if divided else 'pale points do'} not fit.</p>"
    )
    picked = _point_words(chosen) if chosen is not None else ""
    rows = [
        [
            f'<span data-trade-row="{index}">{format_bytes(point.memory_bytes)}</span>',
            format_seconds(point.step_s),
            escape_text(point.schedule),
            escape_text(recompute_words(point)),
            _point_note(point),
        ]
        for index, point in enumerate(points)
    ]
    figures = html_table(
        "Memory and time of every point",
        ["Memory", "Step time", "Schedule", "Recomputed", ""],
        rows,
        numeric=(0, 1),
        stack=True,
    )
    return section_card(
        "trade",
        "Memory against time",
        f'{words}<div class="scroll" tabindex="0" role="region" aria-label="Memory against time">'
        f"{_trade_drawing(points, limit if divided else None)}</div>"
        f'<p class="note">{_draw_legend()}</p><p id="trade-picked" aria-live="polite">{picked}</p>'
        f"<details><summary>All points as a table</summary>{figures}</details>",
    )


def recompute_words(point: TradePoint) -> str:
    """Format the recomputation of a point: `none`, or `3 none, 5 selective` if stages differ."""
    modes = point.recompute.split(",")
    kinds = sorted({*modes}, key=["none", "selective", "full"].index)
    return kinds[0] if len(kinds) == 1 else ", ".join(f"{modes.count(kind)} {kind}" for kind in kinds)


def _point_note(point: TradePoint) -> str:
    if point.chosen:
        return "<b>this plan</b>"
    return "" if point.fits else "does not fit"


def _limit_divides(points: Sequence[TradePoint], limit: float) -> bool:
    """Return True if one memory limit separates the points that fit from those that do not."""
    return all(point.fits == (point.memory_bytes <= limit) for point in points)


def _point_words(point: TradePoint) -> str:
    return (
        f"{escape_text(point.schedule)}, recompute {escape_text(recompute_words(point))}: "
        f"<b>{format_bytes(point.memory_bytes)}</b>, <b>{format_seconds(point.step_s)}</b>"
        + (" (this plan)" if point.chosen else "")
    )


def _trade_drawing(points: Sequence[TradePoint], limit: float | None) -> str:
    """Return the drawing, with a line at the limit if all points share one."""
    fastest = min(point.step_s for point in points)
    shown = [(index, point) for index, point in enumerate(points) if point.step_s <= SLOWEST * fastest or point.chosen]
    low = min(point.memory_bytes for _, point in shown)
    high = max(limit or 0.0, *(point.memory_bytes for _, point in shown))
    slow = max(point.step_s for _, point in shown)
    x = LinearScale(low - 0.04 * (high - low), high + 0.04 * (high - low), LEFT, WIDTH - RIGHT)
    y = LinearScale(fastest - 0.08 * (slow - fastest), slow + 0.05 * (slow - fastest), HEIGHT - BOTTOM, TOP)
    fitted = " ".join(
        f"{x(point.memory_bytes):.1f},{y(point.step_s):.1f}" for _, point in shown if point.schedule == FIT
    )
    parts = [
        _draw_axes(x, y, low, high, fastest, slow),
        f'<polyline points="{fitted}" fill="none" stroke="var({CURVE})" stroke-width="2"/>',
    ]
    line = None if limit is None else x(limit)
    if line is not None:
        parts += [
            f'<line x1="{line:.1f}" x2="{line:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--bad)" '
            'stroke-dasharray="5 4" stroke-width="1.5"/>',
            f'<text x="{line - 5:.1f}" y="{TOP + 11}" text-anchor="end" class="trade-limit">{LIMIT_NAME}</text>',
        ]
    named: set[str] = set()
    names, best = [], float("inf")
    for _, point in shown:
        leads = point.step_s < best and point.schedule != FIT and point.schedule not in named
        best = min(best, point.step_s)
        named |= {point.schedule} if leads else set()
        names.append("this plan" if point.chosen else point.schedule if leads else "")
    positions = [(x(point.memory_bytes), y(point.step_s)) for _, point in shown]
    for (index, point), position, label in zip(shown, positions, _point_labels(positions, names, line), strict=True):
        parts.append(_point_mark(index, point, *position, label))
    return (
        f'<svg id="trade-drawing" viewBox="0 0 {WIDTH} {HEIGHT}" role="group" '
        f'aria-label="Memory of a device against step time">{"".join(parts)}</svg>'
    )


def _point_labels(
    places: Sequence[tuple[float, float]], names: Sequence[str], line: float | None
) -> list[PlacedLabel | None]:
    """Place the labels, the plan's first. The label of the limit line, if there is one, covers its own box."""
    order = sorted(range(len(names)), key=lambda index: names[index] != "this plan")
    covered = [] if line is None else [(line - 5 - CHARACTER * len(LIMIT_NAME), float(TOP), line + 2, TOP + 14.0)]
    frame = (float(LEFT), float(TOP), float(WIDTH - RIGHT), float(HEIGHT - BOTTOM))
    labels = place_labels([places[index] for index in order], [names[index] for index in order], frame, covered)
    by_index = dict(zip(order, labels, strict=True))
    return [by_index[index] for index in range(len(names))]


def _point_mark(index: int, point: TradePoint, x: float, y: float, label: PlacedLabel | None) -> str:
    """Return the mark of a point. A fitted order is a square, the chosen point has a ring, a point that does not fit is
    pale."""
    colour = f"var({RECOMPUTE_COLOURS.get(point.recompute, CURVE)})"
    pale = "" if point.fits else ' fill-opacity="0.4"'
    if point.schedule == FIT:
        shape = f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}"{pale}/>'
    else:
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"{pale}/>'
    if point.chosen:
        shape += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="var(--ink)" stroke-width="2"/>'
    if label is not None:
        left, top, right, bottom = label.covered_box
        if label.apart:
            end = (left if left > x else right, bottom if bottom < y else top)
            shape += f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke="var(--line)"/>'
        shape += f'<text x="{label.x:.1f}" y="{label.y:.1f}" class="trade-name">{escape_text(label.text)}</text>'
    words = _point_words(point).replace("<b>", "").replace("</b>", "")
    return (
        f'<g class="trade-point" tabindex="0" role="button" data-trade="{index}" '
        f'data-words="{escape_text(_point_words(point))}" '
        f'aria-label="{words}"><title>{words}</title>{shape}</g>'
    )


def _draw_axes(x: LinearScale, y: LinearScale, low: float, high: float, fast: float, slow: float) -> str:
    parts = []
    for index in range(AXIS_TICKS):
        part = index / (AXIS_TICKS - 1)
        memory, time_s = low + part * (high - low), fast + part * (slow - fast)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(time_s):.1f}" y2="{y(time_s):.1f}" stroke="var(--line)"/>'
            f'<text x="{LEFT - 8}" y="{y(time_s) + 4:.1f}" text-anchor="end">{format_seconds(time_s)}</text>'
            f'<text x="{x(memory):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{format_bytes(memory)}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">memory of the fullest device</text>'
    )
    return f'<g class="trade-axes">{"".join(parts)}</g>'


def _draw_legend() -> str:
    swatches = [(f"var({colour})", f"recompute {name}") for name, colour in RECOMPUTE_COLOURS.items()]
    swatches.append((f"var({CURVE})", "fit, stages differ"))
    return " ".join(
        f'<span><i class="trade-swatch" style="background:{c}"></i>{escape_text(n)}</span>' for c, n in swatches
    )
