"""Strict readers of the published files in this package. A damaged file raises one FormatError."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence

from pipefit.errors import FormatError
from pipefit.validate.collectives import MeasuredAllReduces

ALL_REDUCE_COLUMNS = ("gpus", "bytes", "time_us", "bus_bandwidth_gb_per_s")


def shipped_text(name: str) -> str:
    """Return the text of a file in the package."""
    from importlib import resources  # takes 20 ms, needed only for predictions

    return resources.files("pipefit.validate").joinpath("data", name).read_text(encoding="utf-8")


def read_table(text: str, columns: Sequence[str], where: str) -> list[Mapping[str, float]]:
    """Return the rows of a CSV text with exactly these columns, all of positive numbers. Lines that start with # are
    notes.

    Raises FormatError with the line number.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line and not line.startswith("#")]
    if not lines or tuple(lines[0][1].split(",")) != tuple(columns):
        raise FormatError(
            "The table does not have the columns that it should have.",
            where=f"{where}, line {lines[0][0] if lines else 1}",
            seen=lines[0][1] if lines else "nothing",
            allowed=",".join(columns),
            next_step="restore the file from the package",
        )
    rows: list[Mapping[str, float]] = []
    for (number, _), cells in zip(lines[1:], csv.reader(line for _, line in lines[1:]), strict=True):
        if len(cells) != len(columns):
            raise FormatError(
                "The row has a wrong number of cells; the file may have been cut short.",
                where=f"{where}, line {number}",
                seen=f"{len(cells)} cells",
                allowed=f"{len(columns)} cells",
            )
        rows.append(
            {
                name: _positive_number(cell, f"{where}, line {number}: {name}")
                for name, cell in zip(columns, cells, strict=True)
            }
        )
    if not rows:
        raise FormatError("The table has no rows.", where=where, next_step="restore the file from the package")
    return rows


def read_collectives(text: str, where: str) -> MeasuredAllReduces:
    """Read the published all-reduces. Raises FormatError for a damaged table."""
    points: dict[int, list[tuple[float, float]]] = {}
    for row in read_table(text, ALL_REDUCE_COLUMNS, where):
        points.setdefault(int(row["gpus"]), []).append((row["bytes"], row["time_us"] * 1e-6))
    return MeasuredAllReduces({devices: tuple(sorted(samples)) for devices, samples in points.items()})


def shipped_collectives() -> MeasuredAllReduces:
    """Read the all-reduces on A100 in this package."""
    return read_collectives(shipped_text("a100_nvlink_all_reduce.csv"), "a100_nvlink_all_reduce.csv")


def check_positive(values: Mapping[str, float], where: str) -> None:
    """Raise FormatError for the first value that is not a positive number."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise FormatError(
                "A published number must be positive.", where=f"{where}: {name}", seen=value, allowed="more than 0"
            )


def _positive_number(cell: str, where: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        raise FormatError("This is not a number.", where=where, seen=repr(cell)) from None
    check_positive({"value": value}, where)
    return value
