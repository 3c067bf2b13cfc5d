"""The lab file: a cluster file plus device tables, seed, scale, ports and racks. Read strictly; each error names its
field.

A plain cluster file is accepted too: its links are shaped, its devices compute as fast as this machine does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipefit.cluster import files
from pipefit.cluster.topology import device_count
from pipefit.cluster.types import Cluster
from pipefit.codec import load_text
from pipefit.errors import FormatError, LabError
from pipefit.lab.tables import DeviceTable
from pipefit.units import format_bandwidth, format_bytes

MAX_LAB_DEVICES = 64
MOST_BYTES_PER_S = 1e9
"""Largest rate of a shaped port on this machine, with one veth and two cores."""

LEAST_BYTES_PER_S = 1e4
"""Smallest rate: below it one packet takes longer than an action of a device."""

RANK_BYTES = 300 << 20
"""Memory of one rank with torch loaded and a small model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPort:
    """Rates of one host's network card, in the file's (unscaled) bytes per second. None means the host's fastest
    link."""

    send_bytes_per_s: float | None = None
    receive_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RackUplink:
    """A rack: its hosts share one uplink and one downlink to the other hosts, in the file's bytes per second."""

    name: str
    hosts: tuple[str, ...]
    up_bytes_per_s: float
    down_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LabFile:
    """An emulated cluster."""

    cluster: Cluster
    devices: Mapping[str, DeviceTable] = field(default_factory=dict)
    "Timing table of each device kind. The planner never reads it. A kind without a table is not paced."
    seed: int = 0
    "Seed of the jitter."
    size_scale: float = 1.0
    "Number of real bytes that one byte in the lab represents; the file's bandwidths and memories are divided by it."
    ports: Mapping[str, HostPort] = field(default_factory=dict)
    "Ports by host name, for hosts whose port is not as fast as their fastest link."
    uplinks: tuple[RackUplink, ...] = ()
    packet_bytes: int = 0
    "Largest packet (MTU); 0 derives it from the total send rate of all hosts."
    format: Literal["pipefit-lab"] = "pipefit-lab"
    version: int = 1


def load_lab(path: str | Path) -> LabFile:
    """Read and check a lab file or a plain cluster file. Raises FormatError, ClusterError or LabError."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError("The file cannot be read.", where=str(path), seen=error) from None
    lab = load_text(LabFile, text, str(path)) if _is_lab(text) else LabFile(cluster=load_text(Cluster, text, str(path)))
    check_lab(lab, str(path))
    return lab


def check_lab(lab: LabFile, where: str = "lab") -> None:
    """Raise the first error of `lab_problems`."""
    for error in files.cluster_problems(lab.cluster, f"{where}: cluster"):
        raise error
    for problem in lab_problems(lab, where):
        raise problem


def lab_problems(lab: LabFile, where: str) -> Iterator[LabError]:
    """Yield the errors in the lab part of a file, in file order."""
    if lab.version != 1:
        yield LabError("This version of the lab format is unknown.", where=where, seen=lab.version, allowed="1")
    if not (math.isfinite(lab.size_scale) and lab.size_scale > 0):
        yield LabError("The scale must be a number above zero.", where=f"{where}: size_scale", seen=lab.size_scale)
        return
    if lab.packet_bytes and not 576 <= lab.packet_bytes <= 9000:
        yield LabError(
            "The packet size is impossible.",
            where=f"{where}: packet_bytes",
            seen=lab.packet_bytes,
            allowed="576 to 9000",
        )
    yield from _name_problems(lab.devices, lab.cluster.kinds, "kind of device", f"{where}: devices")
    for kind, table in lab.devices.items():
        yield from table.table_problems(f"{where}: devices.{kind}")
    hosts = [host.name for host in lab.cluster.hosts]
    yield from _name_problems(lab.ports, hosts, "host", f"{where}: ports")
    yield from _rack_problems(lab, hosts, where)
    yield from _rate_problems(lab, where)
    count = device_count(lab.cluster)
    if count > MAX_LAB_DEVICES or len(hosts) > MAX_LAB_DEVICES:
        yield LabError(
            "The lab cannot emulate this many devices on one machine.",
            where=f"{where}: hosts",
            seen=f"{count} devices on {len(hosts)} hosts",
            allowed=f"{MAX_LAB_DEVICES} devices",
            next_step="describe a smaller cluster",
        )
    if len(lab.cluster.rails) > 1:
        yield LabError(
            "The lab emulates only one network between the hosts.",
            where=f"{where}: rails",
            seen=", ".join(rail.name for rail in lab.cluster.rails),
            allowed="one rail",
        )


def require_memory(ranks: int, available_bytes: int, where: str) -> None:
    """Raise LabError if this number of ranks does not fit into the free memory of this machine."""
    if ranks * RANK_BYTES > available_bytes:
        raise LabError(
            f"{ranks} ranks do not fit into the memory of this machine.",
            where=where,
            seen=f"{format_bytes(available_bytes)} free, {format_bytes(RANK_BYTES)} for a rank with a small model",
            allowed=f"{available_bytes // RANK_BYTES} ranks",
            next_step="start fewer with --devices, describe a smaller cluster, or free memory",
        )


def _is_lab(text: str) -> bool:
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return False
    return isinstance(data, dict) and ("cluster" in data or data.get("format") == "pipefit-lab")


def _name_problems(
    given: Mapping[str, object], known: Sequence[str] | Mapping[str, object], what: str, where: str
) -> Iterator[LabError]:
    for name in given:
        if name not in known:
            yield LabError(f"The cluster has no such {what}.", where=where, seen=name, allowed=", ".join(known))


def _rack_problems(lab: LabFile, hosts: Sequence[str], where: str) -> Iterator[LabError]:
    seen: dict[str, str] = {}
    for index, rack in enumerate(lab.uplinks):
        rack_where = f"{where}: uplinks[{index}] ({rack.name})"
        yield from _name_problems(dict.fromkeys(rack.hosts), hosts, "host", f"{rack_where}.hosts")
        for host in rack.hosts:
            if host in seen:
                yield LabError(
                    "A host can be in only one rack.", where=f"{rack_where}.hosts", seen=f"{host}, also in {seen[host]}"
                )
            seen[host] = rack.name


def _rate_problems(lab: LabFile, where: str) -> Iterator[LabError]:
    for name, port in lab.ports.items():
        for field_name in ("send_bytes_per_s", "receive_bytes_per_s"):
            value = getattr(port, field_name)
            if value is not None:
                yield from _check_rate(value, lab.size_scale, f"{where}: ports.{name}.{field_name}")
    for index, rack in enumerate(lab.uplinks):
        for field_name in ("up_bytes_per_s", "down_bytes_per_s"):
            yield from _check_rate(getattr(rack, field_name), lab.size_scale, f"{where}: uplinks[{index}].{field_name}")
    names = [host.name for host in lab.cluster.hosts]
    for rail in lab.cluster.rails:
        for a, row in enumerate(rail.bandwidth_bytes_per_s):
            for b, value in enumerate(row):
                if a != b:
                    cell = f"{where}: cluster.rails ({rail.name}).bandwidth_bytes_per_s[{a}][{b}]"
                    yield from _check_rate(value, lab.size_scale, f"{cell}, {names[a]} -> {names[b]}")


def _check_rate(value: float, scale: float, where: str) -> Iterator[LabError]:
    if not (math.isfinite(value) and value > 0):
        yield LabError("A rate must be above zero.", where=where, seen=value, next_step="leave a dead link out")
    elif not LEAST_BYTES_PER_S <= value / scale <= MOST_BYTES_PER_S:
        higher = value / scale > MOST_BYTES_PER_S
        yield LabError(
            f"The rate is {'above' if higher else 'below'} the range that the lab can emulate on one machine.",
            where=where,
            seen=format_bandwidth(value)
            + (f" / size_scale {scale:g} = {format_bandwidth(value / scale)}" if scale != 1 else ""),
            allowed=f"{format_bandwidth(LEAST_BYTES_PER_S)} to {format_bandwidth(MOST_BYTES_PER_S)}",
            next_step=f"{'raise' if higher else 'lower'} size_scale (a smaller model's messages are smaller, too)",
        )
