"""Does the lab do what its file says? Every pair's bandwidth against the requested one, every device's pace.

Streams that share a port or an uplink are measured one after the other: what is checked is what each could have alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipefit.errors import LabError
from pipefit.lab import launch, network
from pipefit.lab.lifecycle import Lab, scratch_folder
from pipefit.lab.pace import read_counts
from pipefit.lab.spec import LabFile
from pipefit.lab.streams import HostStreams, Pair, open_streams

LINKS_WITHIN = 0.10
PACE_WITHIN = 0.02
SECONDS = 0.8
"""Of one stream."""

INSIDE_BYTES_PER_S = 2.5e8
"""Of all streams inside hosts that are measured at the same time."""

AGAIN = 2
"""Rounds with a pair that missed are measured again so often, and the nearer result counts: other work on the machine
disturbs, and a link that is shaped wrongly stays wrong."""

ACTIONS = 40
"""That every device does for the check of its pace."""


@dataclass(frozen=True, slots=True)
class PairCheck:
    """One ordered pair of hosts, or the devices of one host (source and target are the same): bytes per second."""

    source: int
    target: int
    requested: float
    achieved: float

    @property
    def relative_error(self) -> float:
        """Relative."""
        return self.achieved / self.requested - 1


@dataclass(frozen=True, slots=True)
class PaceCheck:
    """One device: how long its actions should have taken in all, and took."""

    device: int
    emulated_s: float
    taken_s: float
    late: int

    @property
    def relative_error(self) -> float:
        """Relative."""
        return self.taken_s / self.emulated_s - 1


@dataclass(frozen=True, slots=True)
class LabCalibration:
    """All of a lab."""

    pairs: tuple[PairCheck, ...]
    devices: tuple[PaceCheck, ...]

    @property
    def is_good(self) -> bool:
        """Whether all links are within 10 % and all devices within 2 %."""
        return all(abs(pair.relative_error) <= LINKS_WITHIN for pair in self.pairs) and all(
            abs(each.relative_error) <= PACE_WITHIN for each in self.devices
        )


def requested_rates(lab: LabFile) -> dict[Pair, float]:
    """What each ordered pair of hosts should achieve alone: its own rate, or that of an uplink on its way; and with
    itself, where the links inside a host are shaped."""
    rates, racks = network.rates_of(lab), network.rack_of(lab)
    names = [host.name for host in lab.cluster.hosts]
    result = {(h, h): rate for h, rate in enumerate(rates.inside) if rate}
    for a, row in enumerate(rates.pair):
        for b, rate in enumerate(row):
            if a != b:
                way = [rate]
                if racks.get(names[a]) != racks.get(names[b]):
                    way += [rates.up[racks[names[a]]]] if names[a] in racks else []
                    way += [rates.down[racks[names[b]]]] if names[b] in racks else []
                result[a, b] = min(way)
    return result


def pair_rounds(lab: LabFile) -> list[list[Pair]]:
    """All ordered pairs, as few rounds as a greedy choice finds: in a round no two share a port or an uplink. Links
    inside hosts come last, as many at a time as this machine carries."""
    racks, names = network.rack_of(lab), [host.name for host in lab.cluster.hosts]
    count = len(names)
    result: list[tuple[list[Pair], set[tuple[str, int]]]] = []
    for step in range(1, count):
        for a in range(count):
            b = (a + step) % count
            used = {("out", a), ("in", b)}
            if racks.get(names[a]) != racks.get(names[b]):
                used |= {("up", racks[names[a]])} if names[a] in racks else set()
                used |= {("down", racks[names[b]])} if names[b] in racks else set()
            for pairs, taken in result:
                if not taken & used:
                    pairs.append((a, b))
                    taken |= used
                    break
            else:
                result.append(([(a, b)], used))
    inside: list[tuple[list[Pair], float]] = []
    for h, rate in enumerate(network.rates_of(lab).inside):
        if rate and inside and inside[-1][1] + rate <= INSIDE_BYTES_PER_S:
            inside[-1] = ([*inside[-1][0], (h, h)], inside[-1][1] + rate)
        elif rate:
            inside.append(([(h, h)], rate))
    return [pairs for pairs, _ in result] + [pairs for pairs, _ in inside]


def calibrate_lab(
    lab: Lab, *, seconds: float = SECONDS, show: Callable[[str], None] = lambda text: None
) -> LabCalibration:
    """Measure a lab that stands."""
    wanted, plan = requested_rates(lab.file), pair_rounds(lab.file)
    found: list[PairCheck] = []
    if plan:
        with open_streams(lab) as hosts:
            for done, pairs in enumerate(plan, 1):
                found += _measure_round(hosts, pairs, wanted, seconds)
                show(f"links: round {done} of {len(plan)}")
    show("pace of the devices")
    return LabCalibration(tuple(sorted(found, key=lambda pair: (pair.source, pair.target))), tuple(_check_paces(lab)))


def as_data(lab: Lab, result: LabCalibration) -> dict[str, Any]:
    """As JSON data."""
    errors = [abs(pair.relative_error) for pair in result.pairs]
    paces = [abs(each.relative_error) for each in result.devices]
    return {
        "lab": lab.file.cluster.name,
        "hosts": len(lab.file.cluster.hosts),
        "devices": sum(host.devices for host in lab.file.cluster.hosts),
        "good": result.is_good,
        "not_made": network.unmade_facts(lab.file.cluster, network.rates_of(lab.file)),
        "links": {"mean_error": _mean_of(errors), "max_error": max(errors, default=0.0), "allowed": LINKS_WITHIN},
        "pace": {
            "mean_error": _mean_of(paces),
            "max_error": max(paces, default=0.0),
            "allowed": PACE_WITHIN,
            "late": sum(each.late for each in result.devices),
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
    """A table of achieved over requested, [source][target], and what the paces were."""
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
    hosts: HostStreams, pairs: Sequence[Pair], wanted: Mapping[Pair, float], seconds: float
) -> list[PairCheck]:
    best: dict[Pair, PairCheck] = {}
    for _ in range(1 + AGAIN):
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
    """All paced devices at once, each with a little real work under every action."""
    paced = [rank.device for rank in launch.ranks_of(lab) if lab.file.cluster.hosts[rank.host].kind in lab.file.devices]
    if not paced:
        return []
    said: list[str] = []
    with scratch_folder(lab) as folder:
        command = ["python", "-m", "pipefit.lab.drill", str(ACTIONS)]
        code = launch.run_command(lab, command, devices=paced, counts=folder, say=said.append, preload=())
        if code:
            raise LabError("The check of the pace failed.", where=str(lab.path), seen="\n".join(said[-5:]))
        counts = read_counts(folder)
    return [PaceCheck(d, c["emulated_s"], c["taken_s"], c["late"]) for d, c in sorted(counts.items())]


def _mean_of(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
