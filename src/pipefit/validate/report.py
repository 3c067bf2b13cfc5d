"""Format results as text and as plain data: every row, then the split and the fitted constants, then the summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.validate.records import ErrorTarget, ValidationResult, ValidationRow

SHORT_ROWS = 60
"""A result with more rows prints only its worst ones by default."""

WORST = 10


def as_data(result: ValidationResult, rows: bool = True) -> dict[str, Any]:
    """Return a result as JSON data, with or without its rows."""
    data: dict[str, Any] = {
        "set": result.set,
        "quantity": result.quantity,
        "unit": result.unit,
        "source": result.source,
        "split": result.split,
        "fitted_constants": result.constants,
        "fitted": {key: [round_to(value) for value in values] for key, values in result.fitted.items()},
        "summary": {key: round_to(value) for key, value in result.summary.items()},
        "targets": [_target_data(target) for target in result.targets],
        "notes": list(result.notes),
        "row_count": len(result.rows),
    }
    if rows:
        data["rows"] = [_row_data(row) for row in result.rows]
    return data


def as_text(result: ValidationResult, show_all: bool = False) -> str:
    """Format a result for people."""
    lines = [f"{result.set}: {result.quantity} in {result.unit}", f"  source: {result.source}"]
    lines += [f"  split: {result.split}", f"  fitted constants: {result.constants}"]
    lines += [f"    {key}: {' '.join(f'{value:.4g}' for value in values)}" for key, values in result.fitted.items()]
    lines += [f"  {note}" for note in result.notes]
    rows = list(result.rows)
    if len(rows) > SHORT_ROWS and not show_all:
        rows = sorted(rows, key=lambda row: -abs(row.relative_delta))[:WORST]
        lines.append(f"  the {WORST} worst of {len(result.rows)} rows; --all prints all of them")
    width = max(len(row.name) for row in rows)
    lines.append(f"  {'row':{width}} {'published':>12} {'predicted':>12} {'delta':>8}")
    for row in rows:
        apart = "" if row.part == "predicted" else f"  ({row.part})"
        numbers = f"{row.published:12.5g} {row.predicted:12.5g} {row.relative_delta:+8.2%}"
        lines.append(f"  {row.name:{width}} {numbers}{apart}")
    lines += [f"  {key}: {_figure_text(key, value)}" for key, value in result.summary.items()]
    for target in result.targets:
        verdict = "met" if target.is_met else "MISSED"
        lines.append(f"  target {verdict}: {target.what} {target.reached:.2%}, at most {target.limit:.2%}")
    return "\n".join(lines)


def round_to(value: float, digits: int = 6) -> float:
    """Round to this number of significant digits, so that files do not change with the last bits."""
    return float(f"{value:.{digits}g}")


def _figure_text(key: str, value: float) -> str:
    counts = ("groups", "points", "distance")
    return f"{value:.3g}" if any(word in key for word in counts) else f"{value:.2%}"


def _row_data(row: ValidationRow) -> Mapping[str, object]:
    return {
        "name": row.name,
        "published": row.published,
        "predicted": round_to(row.predicted),
        "delta": round_to(row.relative_delta),
        "part": row.part,
    }


def _target_data(target: ErrorTarget) -> Mapping[str, object]:
    return {
        "what": target.what,
        "reached": round_to(target.reached),
        "limit": target.limit,
        "met": target.is_met,
    }
