"""Clusters from a short text: `8xH100`, `2x8xA100-80:200Gbit/s`, or this machine's CPU (`local_cluster`).

The figures come from data sheets and are marked so; a measured cluster file replaces them.
"""

from __future__ import annotations

import math
import re

from pipefit.cluster.catalogue import NAME, find_sheet, network_bandwidth
from pipefit.cluster.kinds import data_sheet_kind
from pipefit.cluster.machine import LocalMachine, detect_machine
from pipefit.cluster.types import Cluster, DeviceKind, Host, Link, Provenance, Rail
from pipefit.errors import ClusterError
from pipefit.units import format_bandwidth, format_bytes

_SPEC = re.compile(rf"^(?:(?P<hosts>\d+)x)?(?P<devices>\d+)x(?P<kind>{NAME})(?::(?P<rail>.*))?$")
_RAIL_LATENCY_S = 10e-6
_SLOWEST_RAIL, _FASTEST_RAIL = 1e6, 5e11
"""Plausible bytes/s of a host: 8 Mbit/s to ten cards of 400 Gbit/s."""
_LARGE_HOST = 16
"""Devices of the largest hosts that are sold for most kinds of devices."""
_FASTEST_CARD = 2e11
"""Plausible bytes/s of each device of a host with many devices."""
_LOCAL_LATENCY_S = 50e-6
_LOCAL_BANDWIDTH = 1e9
_FLOPS_PER_CYCLE = {"float64": 16.0, "float32": 32.0, "tf32": 32.0, "float16": 32.0, "bfloat16": 32.0}
"""Per core: two 256-bit multiply-adds a cycle. Narrow floats count as float32: few CPUs compute them faster."""

PROCESS_BYTES = 384 * 2**20
"""Assumed memory of the interpreter and its libraries in each CPU process before the first tensor."""


def looks_like_spec(text: str) -> bool:
    """Return whether `text` has the form of a short cluster text instead of a file name."""
    return _SPEC.match(text) is not None


def parse_spec(text: str) -> Cluster:
    """Return the cluster for `8xH100`, `2x8xA100-80:200Gbit/s` or `2x8xH100:8x400Gbit/s` (eight network cards).

    Raises ClusterError if the text has another form, the kind is unknown, several hosts lack a bandwidth, or a figure
    is impossible.
    """
    match = _SPEC.match(text)
    if match is None:
        raise ClusterError(
            "This is neither a cluster file nor a short cluster text.",
            where="--cluster",
            seen=repr(text),
            allowed="FILE.json, 8xH100, or 2x8xA100-80:200Gbit/s (hosts x devices x kind : bandwidth between hosts)",
        )
    hosts, devices = int(match["hosts"] or 1), int(match["devices"])
    if hosts < 1 or devices < 1:
        raise ClusterError("A cluster needs at least one host and one device.", where="--cluster", seen=repr(text))
    kind, link = data_sheet_kind(match["kind"], "--cluster")
    if match["hosts"] is None:
        _check_single_host(match, text)
    if hosts > 1 and match["rail"] is None:
        raise ClusterError(
            "Several hosts need the bandwidth between them; none is assumed.",
            where="--cluster",
            seen=repr(text),
            next_step=f"append it after a colon, for example {text}:{find_sheet(kind.name).usual_host.network}",
        )
    rails: tuple[Rail, ...] = ()
    where = f"data sheet of {kind.name}"
    bandwidth = 0.0 if match["rail"] is None else _rail_bandwidth(match["rail"], devices, text)
    if hosts > 1:
        rails = (uniform_rail("network", hosts, _RAIL_LATENCY_S, bandwidth),)
        where += f"; {format_bandwidth(bandwidth)} per host as given, latency of 10 us assumed"
    return Cluster(
        name=text,
        kinds={kind.name: kind},
        links={"inside": link},
        hosts=tuple(Host(name=f"host{i}", kind=kind.name, devices=devices, link="inside") for i in range(hosts)),
        rails=rails,
        provenance=Provenance(source="data-sheet", where=where),
    )


def _check_single_host(match: re.Match[str], text: str) -> None:
    """Raise ClusterError for `8xH100:400Gbit/s`, which names no second host, and for `64xH100`, a host that nobody
    sells."""
    devices, name = int(match["devices"]), match["kind"]
    usual = find_sheet(name).usual_host
    if match["rail"] is not None:
        _rail_bandwidth(match["rail"], devices, text)
        raise ClusterError(
            "One host has no bandwidth to other hosts.",
            where="--cluster",
            seen=repr(text),
            next_step=f"write {devices}x{name} for one host of {devices}, 2x{text} for two hosts, or "
            f"{devices}x1x{name}:{match['rail']} for hosts of one device",
        )
    if devices > max(usual.devices, _LARGE_HOST):
        hosts = math.ceil(devices / usual.devices)
        raise ClusterError(
            f"One host of {devices} {name} is larger than usual hosts, of {usual.devices}.",
            where="--cluster",
            seen=repr(text),
            next_step=f"write {hosts}x{usual.devices}x{name}:{usual.network} (hosts x devices x kind : bandwidth "
            f"between hosts), or 1x{text} if one host does hold them",
        )


def _rail_bandwidth(rail: str, devices: int, text: str) -> float:
    """Return the bytes/s of a host. Raises PipefitError for a text without a unit or an impossible bandwidth."""
    bandwidth = network_bandwidth(rail, "--cluster")
    fastest = max(_FASTEST_RAIL, devices * _FASTEST_CARD)
    if not _SLOWEST_RAIL <= bandwidth <= fastest:
        raise ClusterError(
            "No network between hosts has this bandwidth.",
            where="--cluster",
            seen=f"{text!r}: {format_bandwidth(bandwidth)} per host",
            allowed=f"{format_bandwidth(_SLOWEST_RAIL)} to {format_bandwidth(fastest)}",
            next_step="bit/s or B/s? One network card has 10 to 800 Gbit/s",
        )
    return bandwidth


def uniform_rail(name: str, hosts: int, latency_s: float, bandwidth_bytes_per_s: float) -> Rail:
    """A rail on which all pairs of hosts have the same latency and bandwidth."""
    return Rail(
        name=name,
        latency_s=tuple(tuple(0.0 if a == b else latency_s for b in range(hosts)) for a in range(hosts)),
        bandwidth_bytes_per_s=tuple(tuple(bandwidth_bytes_per_s for _ in range(hosts)) for _ in range(hosts)),
    )


def local_cluster(devices: int, machine: LocalMachine | None = None) -> Cluster:
    """Return `devices` processes on a machine's CPU: memory from the machine, the rest a rough guess marked `assumed`.

    The cluster, and so the plans made on it, depend on `machine` alone; None stands for this machine.

    Each process gets an equal part of the memory and of the cores. The peak is cores x frequency x the rate of two
    256-bit multiply-adds a cycle. The guess is good enough to rank plans; do not rely on its times without a
    measurement.
    """
    if devices < 1:
        raise ClusterError("At least one device is needed.", where="--local", seen=devices, allowed="1 or more")
    machine = detect_machine() if machine is None else machine
    cores, hertz, memory = machine.cores, machine.frequency_hz, machine.memory_bytes
    share = cores / devices
    device_bytes = memory // devices - PROCESS_BYTES
    if device_bytes <= 0:
        raise ClusterError(
            "This machine has too little memory for this number of processes.",
            where="--local",
            seen=f"{devices} processes, {format_bytes(memory)}",
            allowed=f"at most {memory // (PROCESS_BYTES + 1)}: each needs {format_bytes(PROCESS_BYTES)} for itself",
        )
    kind = DeviceKind(
        name="cpu",
        memory_bytes=device_bytes,
        peak_flops_per_s={dtype: per_cycle * hertz * share for dtype, per_cycle in _FLOPS_PER_CYCLE.items()},
        memory_bandwidth_bytes_per_s=20e9 / devices,
        efficiency=0.5,
        overhead_s=20e-6,
        provenance=Provenance(
            source="assumed",
            where=f"{cores} cores at {hertz / 1e9:.2f} GHz shared by {devices} processes; peak from two 256-bit "
            f"multiply-adds a cycle; assumed: 20 GB/s of memory bandwidth, {format_bytes(PROCESS_BYTES)} a process",
        ),
    )
    return Cluster(
        name=f"local-{devices}",
        kinds={"cpu": kind},
        links={"loopback": Link(latency_s=_LOCAL_LATENCY_S, bandwidth_bytes_per_s=_LOCAL_BANDWIDTH)},
        hosts=(Host(name="localhost", kind="cpu", devices=devices, link="loopback"),),
        rails=(),
        provenance=Provenance(source="assumed", where="this machine, not measured: 50 us and 1 GB/s over loopback"),
    )
