"""Plausibility check of units: if all links of a class have impossible values, the units are mistaken.

The ranges are wide: they include every network and inner link on sale, from ten years ago to the next generation. A
single odd link passes, because a broken link is a fact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipefit.cluster.catalogue import reported_device
from pipefit.cluster.types import Cluster
from pipefit.errors import ClusterError
from pipefit.units import format_bandwidth, format_seconds


@dataclass(frozen=True, slots=True)
class PlausibleRange:
    """A range of plausible values."""

    low: float
    high: float


INSIDE = PlausibleRange(1e9, 3e12)
"""Bytes/s between two GPUs of one host: PCIe 2 x4 to well beyond NVLink 5."""

INSIDE_OTHER = PlausibleRange(2e6, 5e11)
"""Bytes/s between processes of a host without known GPUs: down to an emulated link."""

BETWEEN = PlausibleRange(1e8, 1e13)
"""Bytes/s of a host with known GPUs on its network: gigabit Ethernet to a rack of 72 GPUs with 800 Gbit/s each."""

BETWEEN_OTHER = PlausibleRange(1e5, 5e11)

LATENCY = PlausibleRange(5e-8, 0.5)
"""Seconds: within a chip, to the other side of the earth. 0 means unknown."""


def check_plausible(cluster: Cluster, where: str) -> None:
    """Raise ClusterError if all links of a class are outside their plausible range; the message names a factor of
    1,000."""
    known = all(reported_device(host.kind) for host in cluster.hosts)
    used = [cluster.links[host.link] for host in cluster.hosts if host.devices > 1 and host.link in cluster.links]
    inside = [link.bandwidth_bytes_per_s for link in used]
    _check_bandwidths(inside, INSIDE if known else INSIDE_OTHER, "inside the hosts", f"{where}: links")
    _check_latencies([link.latency_s for link in used], "inside the hosts", f"{where}: links")
    for rail in cluster.rails:
        rail_where = f"{where}: rails ({rail.name})"
        _check_bandwidths(
            _off_diagonal(rail.bandwidth_bytes_per_s), BETWEEN if known else BETWEEN_OTHER, "between hosts", rail_where
        )
        _check_latencies(_off_diagonal(rail.latency_s), "between hosts", rail_where)


def _check_bandwidths(values: Sequence[float], allowed: PlausibleRange, what: str, where: str) -> None:
    _check_values(
        values,
        allowed,
        f"bandwidth {what}",
        where,
        format_bandwidth,
        "a bandwidth in bytes/s: was it written in kB/s or MB/s, or counted in bits?",
    )


def _check_latencies(values: Sequence[float], what: str, where: str) -> None:
    _check_values(
        [value for value in values if value > 0],
        LATENCY,
        f"latency {what}",
        where,
        format_seconds,
        "a latency in seconds: was it written in ms or us?",
    )


def _check_values(values: Sequence[float], allowed: PlausibleRange, what: str, where: str, show, hint: str) -> None:  # type: ignore[no-untyped-def]
    if not values:
        return
    above, below = min(values) > allowed.high, max(values) < allowed.low
    if not above and not below:
        return
    middle = sorted(values)[len(values) // 2]
    corrected = middle / 1000 if above else middle * 1000
    direction = "large" if above else "small"
    if allowed.low <= corrected <= allowed.high:
        message = f"Every {what} is about 1,000 times too {direction}: the unit is mistaken."
    else:
        message = f"Every {what} is impossibly {direction}."
    raise ClusterError(
        message,
        where=where,
        seen=f"{show(min(values))} to {show(max(values))} on {len(values)} links",
        allowed=f"{show(allowed.low)} to {show(allowed.high)}",
        next_step=f"the file needs {hint}",
    )


def _off_diagonal(matrix: Sequence[Sequence[float]]) -> list[float]:
    return [value for a, row in enumerate(matrix) for b, value in enumerate(row) if a != b]
