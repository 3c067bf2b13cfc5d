"""The question of `pipefit size`: a training of a number of tokens, and the devices that may run it.

Numbers of tokens are often round figures. `step_rows` turns the tokens of a step into sequences that divide over many
devices.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipefit.cluster.catalogue import find_sheet
from pipefit.errors import FormatError, PlanError
from pipefit.model.graph import Model
from pipefit.plan.types import Job

MAX_TOKEN_CHANGE = 0.05
"""Largest share by which the tokens of a step may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRequest:
    """A training, and the clusters that may run it."""

    name: str
    "The model, as the user named it."
    model: Model
    job: Job
    "One step, the same on every cluster."
    tokens: float
    "Tokens of the whole training."
    devices: tuple[str, ...]
    "Names of the catalogue."
    max_devices: int
    network: str = ""
    "Network cards of every host, such as `8x400Gbit/s`; '': those of the usual host of the device."
    deadline_s: float | None = None
    prices: Mapping[str, float] | None = None
    "Price of one device for an hour, by name; None: no costs."

    @property
    def steps(self) -> float:
        return self.tokens / (self.job.batch * self.job.sequence)


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """A cluster of one kind of device."""

    device: str
    devices: int
    cluster: str
    "Its short text."


def step_rows(tokens: float, sequence: int) -> int:
    """Return the sequences of a step of `tokens` tokens.

    An exact number of sequences stays. Otherwise it is the nearest multiple of the largest power of two that changes
    the tokens by at most `MAX_TOKEN_CHANGE`. Raises PlanError for less than a sequence.
    """
    rows = tokens / sequence
    if rows < 1:
        raise PlanError(
            "A step has fewer tokens than one sequence.",
            where="--batch",
            seen=f"{tokens:,.0f} tokens, sequences of {sequence:,}",
            next_step="use a larger --batch or a smaller --seq",
        )
    if rows == int(rows):
        return int(rows)
    for exponent in range(int(math.log2(rows)) + 1, -1, -1):
        rounded: int = max(1, round(rows / 2**exponent)) * 2**exponent
        if abs(rounded - rows) <= MAX_TOKEN_CHANGE * rows:
            return rounded
    return round(rows)


def cluster_sizes(device: str, max_devices: int, network: str = "") -> Iterator[ClusterSize]:
    """Yield clusters of 1, 2, 4 ... devices up to one usual host, then of 2, 4, 8 ... such hosts, up to `max_devices`.

    `network` replaces the usual network cards of a host. Raises ClusterError for an unknown device.
    """
    sheet = find_sheet(device)
    inside = sheet.usual_host.devices
    powers = [2**exponent for exponent in range(inside.bit_length()) if 2**exponent < inside]
    for count in (*powers, inside):
        if count <= max_devices:
            yield ClusterSize(sheet.name, count, f"{count}x{sheet.name}")
    hosts = 2
    while hosts * inside <= max_devices:
        text = f"{hosts}x{inside}x{sheet.name}:{network or sheet.usual_host.network}"
        yield ClusterSize(sheet.name, hosts * inside, text)
        hosts *= 2


def read_prices(path: Path) -> dict[str, float]:
    """Return the price of an hour by device name from a CSV with the columns `device` and `price`.

    Raises FormatError for a file of another form, and ClusterError for an unknown device.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [{str(name).strip().lower(): value for name, value in row.items()} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FormatError("The prices cannot be read.", where=str(path), seen=error) from None
    if not rows or not {"device", "price"} <= rows[0].keys():
        raise FormatError(
            "Prices are a CSV file with a column for the device and one for its price per hour.",
            where=str(path),
            seen=", ".join(rows[0]) if rows else "no rows",
            allowed="device,price in the first line, then for example H100,2.49",
        )
    return dict(_read_price(row, f"{path}, line {line}") for line, row in enumerate(rows, 2))


def _read_price(row: Mapping[str, str], where: str) -> tuple[str, float]:
    try:
        price = float(row["price"])
    except (TypeError, ValueError):
        price = -1.0
    if not 0 <= price < math.inf:
        raise FormatError(
            "The price of a device is a number.", where=where, seen=repr(row["price"]), allowed="for example 2.49"
        )
    return find_sheet((row["device"] or "").strip(), where).name, price


def check_prices(devices: Sequence[str], prices: Mapping[str, float], where: str) -> None:
    """Raise PlanError for a device without a price."""
    missing = [name for name in devices if name not in prices]
    if missing:
        raise PlanError(
            f"The price of {missing[0]} is missing.",
            where=where,
            seen=", ".join(prices),
            next_step=f"add a line {missing[0]},PRICE",
        )
