"""The tables of docs/reference/schedules.md, from the result of benchmarks/schedules/fit.py (`benchmarks.tables`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import markdown_table

TITLES = {
    "textbook": "Memory F +1, I 0, W -1: bubble of the busiest device",
    "runtime": "Memory as our runtime has it, in what F keeps",
    "microbatches": "64 microbatches, equal stages",
    "devices": "16 devices, 48 microbatches",
}
"""Parts of the result that are tables, and what they are called."""


def tables(result: dict[str, Any]) -> str:
    """All tables as Markdown."""
    parts = [table(TITLES[part], result[part]) for part in TITLES if result.get(part)]
    if "random" in result:
        parts.append(in_words(result["random"]))
    return "\n\n".join(parts)


def table(title: str, records: Sequence[dict[str, Any]]) -> str:
    """One row a case, one column a way of making the schedule; `nothing` where none was found."""
    ways = [row["method"] for row in records[0]["methods"] if row["method"].startswith("fit ")]
    known = any(record["best_known_bubble"] is not None for record in records)
    head = ["case", *(["best known"] if known else []), *ways, "adaptive search", "best family", "gap"]
    rows = []
    for record in records:
        by_name = {row["method"]: row for row in record["methods"]}
        cells = [record["name"]]
        if known:
            cells.append(percent(record["best_known_bubble"]))
        cells += [percent(by_name.get(way, {}).get("bubble")) for way in (*ways, "adaptive search")]
        family = next(
            (row for row in record["methods"] if "time" in row and "wall_s" not in row),
            {"method": "none fits"},
        )
        cells.append(f"{percent(family.get('bubble'), '')} {family['method']}".strip())
        ours = [by_name[way]["gap"] for way in ways if "gap" in by_name.get(way, {})]
        cells.append(percent(min(ours, default=None)))
        rows.append(cells)
    return f"**{title}.**\n\n{markdown_table(head, rows, '---:')}"


def in_words(random: dict[str, Any]) -> str:
    """What the random instances say."""
    summary = random["summary"]
    count = len(random["instances"])
    return (
        f"**{count} random instances** (seeds in the file; {random['moves']:,} moves of `fit`, without the solver): "
        f"where both find a schedule ({summary['compared']}), `fit` has {summary['mean_points']:.2f} points of bubble "
        f"less than the adaptive search on average, {summary['worst_points']:+.2f} on the worst instance and "
        f"{summary['best_points']:+.2f} on the best; it is worse on {summary['worse']}. The adaptive search finds "
        f"nothing on {summary['adaptive_finds_nothing']} instances, `fit` on {summary['fit_finds_nothing']}."
    )


def percent(share: float | None, nothing: str = "nothing") -> str:
    return nothing if share is None else f"{share:.1%}"
