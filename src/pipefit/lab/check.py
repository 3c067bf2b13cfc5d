"""Check a running lab against its file: the bandwidth of every pair of hosts and the pace of every device.

Streams that share a port or an uplink are measured in different rounds, because the check is of the bandwidth that each
pair gets alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipefit.cluster.topology import device_count
from pipefit.errors import LabError
from pipefit.lab import launch, network
from pipefit.lab.lifecycle import Lab, scratch_folder
from pipefit.lab.pace import read_counts
from pipefit.lab.spec import LabFile
from pipefit.lab.streams import HostStreams, StreamPair, open_streams

LINKS_WITHIN = 0.10
PACE_WITHIN = 0.02
STREAM_S = 0.8
"""Duration of one stream."""

INSIDE_BYTES_PER_S = 2.5e8
"""Largest total rate of the intra-host streams that are measured at the same time."""

MISSED_RATE_REPEATS = 2
"""Number of repetitions for a pair that missed its rate; the nearest result counts. Load on the machine disturbs single
measurements, but a wrongly shaped link misses every time."""

DRILL_ACTIONS = 40
"""Actions that every device runs for the check of its pace."""


@dataclass(frozen=True, slots=True)
class PairCheck:
    """Bandwidth in bytes per second of an ordered pair of hosts, or between the devices of one host (source equals
    target)."""

    source: int
    target: int
    requested: float
    achieved: float

    @property
    def relative_error(self) -> float:
        """(achieved - requested) / requested."""
        return self.achieved / self.requested - 1


@dataclass(frozen=True, slots=True)
class PaceCheck:
    """Emulated and measured total time of one device's actions."""

    device: int
    emulated_s: float
    taken_s: float
    late: int

    @property
    def relative_error(self) -> float:
        """(measured - emulated) / emulated."""
        return self.taken_s / self.emulated_s - 1


@dataclass(frozen=True, slots=True)
class LabCalibration:
    """The link and pace checks of one lab."""

    pairs: tuple[PairCheck, ...]
    devices: tuple[PaceCheck, ...]

    @property
    def is_good(self) -> bool:
        """True if all links are within 10 % and all devices within 2 %."""
        return all(abs(pair.relative_error) <= LINKS_WITHIN for pair in self.pairs) and all(
            abs(device.relative_error) <= PACE_WITHIN for device in self.devices
        )


def requested_rates(lab: LabFile) -> dict[StreamPair, float]:
    """Return the rate that each ordered pair of hosts should achieve alone: the smallest of its own rate and the
    uplinks on its path. A pair (h, h) is present if the links inside host h are shaped."""
    rates, racks = network.rates_of(lab), network.rack_of(lab)
    names = [host.name for host in lab.cluster.hosts]
    result = {(h, h): rate for h, rate in enumerate(rates.inside) if rate}
    for a, row in enumerate(rates.pair):
        for b, rate in enumerate(row):
            if a != b:
                path_rates = [rate]
                if racks.get(names[a]) != racks.get(names[b]):
                    path_rates += [rates.up[racks[names[a]]]] if names[a] in racks else []
                    path_rates += [rates.down[racks[names[b]]]] if names[b] in racks else []
                result[a, b] = min(path_rates)
    return result


def pair_rounds(lab: LabFile) -> list[list[StreamPair]]:
    """Divide all ordered pairs into rounds, greedily: no two pairs of a round share a port or an uplink. Intra-host
    links come last, in rounds of at most `INSIDE_BYTES_PER_S` in total."""
    racks, names = network.rack_of(lab), [host.name for host in lab.cluster.hosts]
    count = len(names)
    result: list[tuple[list[StreamPair], set[tuple[str, int]]]] = []
    for step in range(1, count):
        for a in range(count):
            b = (a + step) % count
            used = {("out", a), ("in", b)}
            if racks.get(names[a]) != racks.get(names[b]):
                used |= {("up", racks[names[a]])} if names[a] in racks else set()
                used |= {("down", racks[names[b]])} if names[b] in racks else set()
            for pairs, occupied in result:
                if not occupied & used:
                    pairs.append((a, b))
                    occupied |= used
                    break
            else:
                result.append(([(a, b)], used))
    inside: list[tuple[list[StreamPair], float]] = []
    for h, rate in enumerate(network.rates_of(lab).inside):
        if rate and inside and inside[-1][1] + rate <= INSIDE_BYTES_PER_S:
            inside[-1] = ([*inside[-1][0], (h, h)], inside[-1][1] + rate)
        elif rate:
            inside.append(([(h, h)], rate))
    return [pairs for pairs, _ in result] + [pairs for pairs, _ in inside]


def calibrate_lab(
    lab: Lab, *, seconds: float = STREAM_S, show: Callable[[str], None] = lambda text: None
) -> LabCalibration:
    """Measure the links and the pace of a running lab."""
    wanted, plan = requested_rates(lab.file), pair_rounds(lab.file)
    checks: list[PairCheck] = []
    if plan:
        with open_streams(lab) as hosts:
            for done, pairs in enumerate(plan, 1):
                checks += _measure_round(hosts, pairs, wanted, seconds)
                show(f"links: round {done} of {len(plan)}")
    show("pace of the devices")
    return LabCalibration(tuple(sorted(checks, key=lambda pair: (pair.source, pair.target))), tuple(_check_paces(lab)))


def as_data(lab: Lab, result: LabCalibration) -> dict[str, Any]:
    """Return a calibration as JSON data."""
    errors = [abs(pair.relative_error) for pair in result.pairs]
    paces = [abs(device.relative_error) for device in result.devices]
    return {
        "lab": lab.file.cluster.name,
        "hosts": len(lab.file.cluster.hosts),
        "devices": device_count(lab.file.cluster),
        "good": result.is_good,
        "not_made": network.unmade_facts(lab.file.cluster, network.rates_of(lab.file)),
        "links": {"mean_error": _mean_of(errors), "max_error": max(errors, default=0.0), "allowed": LINKS_WITHIN},
        "pace": {
            "mean_error": _mean_of(paces),
            "max_error": max(paces, default=0.0),
            "allowed": PACE_WITHIN,
            "late": sum(device.late for device in result.devices),
        },
        "pairs": [
            {
                "source": pair.source,
                "target": pair.target,
                "requested_bytes_per_s": pair.requested,
                "achieved_bytes_per_s": pair.achieved,
            }
            for pair in result.pairs
        ],
    }


def as_lines(lab: Lab, result: LabCalibration) -> list[str]:
    """Format a calibration: a table of achieved / requested bandwidth [source][target], and a summary of links and
    pace."""
    names = [host.name for host in lab.file.cluster.hosts]
    cells = {(pair.source, pair.target): pair for pair in result.pairs}
    lines = []
    if cells:
        width = max(6, *(len(name) for name in names))
        lines.append("achieved / requested bandwidth, from row to column (inside a host where they meet):")
        lines.append(" ".join([" " * width, *(f"{name:>{width}}" for name in names)]))
        for a, name in enumerate(names):
            row = [f"{cells[a, b].relative_error + 1:.3f}" if (a, b) in cells else "-" for b in range(len(names))]
            lines.append(" ".join([f"{name:>{width}}", *(f"{cell:>{width}}" for cell in row)]))
    data = as_data(lab, result)
    lines.append(f"links: {_format_deviation(data['links'])}")
    if result.devices:
        lines.append(f"pace: {_format_deviation(data['pace'])}, {data['pace']['late']} actions late")
    return lines


def _measure_round(
    hosts: HostStreams, pairs: Sequence[StreamPair], wanted: Mapping[StreamPair, float], seconds: float
) -> list[PairCheck]:
    best: dict[StreamPair, PairCheck] = {}
    for _ in range(1 + MISSED_RATE_REPEATS):
        missed = [pair for pair in pairs if pair not in best or abs(best[pair].relative_error) > LINKS_WITHIN]
        if not missed:
            break
        for pair, rate in hosts.measure_rates(missed, seconds).items():
            now = PairCheck(*pair, wanted[pair], rate)
            best[pair] = min(best.get(pair, now), now, key=lambda each: abs(each.relative_error))
    return list(best.values())


def _format_deviation(part: dict[str, Any]) -> str:
    good = "good" if part["max_error"] <= part["allowed"] else "NOT GOOD"
    return (
        f"{good}: mean error {part['mean_error']:.2%}, largest {part['max_error']:.2%} of {part['allowed']:.0%} allowed"
    )


def _check_paces(lab: Lab) -> list[PaceCheck]:
    """Run all paced devices at once, with a little real work in every action."""
    paced = [rank.device for rank in launch.ranks_of(lab) if lab.file.cluster.hosts[rank.host].kind in lab.file.devices]
    if not paced:
        return []
    output: list[str] = []
    with scratch_folder(lab) as folder:
        command = ["python", "-m", "pipefit.lab.drill", str(DRILL_ACTIONS)]
        code = launch.run_command(lab, command, devices=paced, counts=folder, say=output.append, preload=())
        if code:
            raise LabError("The check of the pace failed.", where=str(lab.path), seen="\n".join(output[-5:]))
        counts = read_counts(folder)
    return [PaceCheck(d, c["emulated_s"], c["taken_s"], c["late"]) for d, c in sorted(counts.items())]


def _mean_of(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
