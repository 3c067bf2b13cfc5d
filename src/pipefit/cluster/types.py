"""The machines of a run: hosts of devices, links within a host and matrices between hosts, with their provenance.

A cluster is measured, or taken from data sheets and marked so. Nothing is assumed silently: a missing link is an error
that names it. Host-to-host links are matrices per rail, links inside a host are classes. There is never an N x N matrix
of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipefit.cluster.measured import ClusterMeasurements
from pipefit.codec import added_later

Source = Literal["measured", "data-sheet", "assumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin of a figure."""

    source: Source
    when: str = ""
    "ISO 8601 time of measuring, or '' for a data sheet."
    where: str = ""
    "Machine, software versions or document, in words."
    environment: Mapping[str, str] = field(default_factory=dict)
    "Fingerprint of the software used for the measurement."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of accelerator (or CPU core set): its data-sheet figures."""

    name: str
    memory_bytes: int
    "Memory that a process may use."
    peak_flops_per_s: Mapping[str, float]
    "Dense peak by dtype: `float64`, `float32`, `bfloat16`."
    memory_bandwidth_bytes_per_s: float
    efficiency: float = 0.5
    "Share of the peak that large matrix products reach; a guess for data-sheet kinds until it is measured."
    overhead_s: float = 5e-6
    "Time to issue one operator."
    product_traffic: float | None = added_later(None)
    """How often a matrix product moves its activations; this time adds to the time of its FLOPs. None: its FLOPs or its
    bytes decide, moved once."""
    attention_efficiency: float | None = added_later(None)
    "Share of the peak that attention in one kernel reaches; None: `efficiency`."
    bandwidth_efficiency: float = added_later(1.0)
    "Share of the memory bandwidth that other operators reach, for the bytes of the operator graph."
    overlap: float = 0.0
    """Share of a gradient reduction that overlaps a backward without slowing it down. 0 if the computing cores also
    move the bytes (gloo)."""
    provenance: Provenance = Provenance(source="data-sheet")


def is_processor(kind: DeviceKind) -> bool:
    """Return whether devices of a kind are CPUs, by its name: `cpu`, `cpu-2.1GHz`."""
    return kind.name.split("-")[0] == "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Latency and bandwidth of one path between two devices."""

    latency_s: float
    bandwidth_bytes_per_s: float
    repeatability: float = 1.0
    "Correlation of this entry between repeated measurements; 1 for a data sheet."


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine."""

    name: str
    kind: str
    "Key into the cluster's device kinds."
    devices: int
    link: str
    "Key into the cluster's link classes, for links between its devices."


@dataclass(frozen=True, slots=True, kw_only=True)
class Rail:
    """One network that joins the hosts, as matrices [source host][target host]; the diagonal is not read."""

    name: str
    latency_s: tuple[tuple[float, ...], ...]
    bandwidth_bytes_per_s: tuple[tuple[float, ...], ...]
    repeatability: tuple[tuple[float, ...], ...] = ()
    "Empty if it was not measured."
    shared_ports: bool = True
    "Whether simultaneous sends of one host to several hosts share that host's port."


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of a run. Devices are numbered host by host."""

    name: str
    kinds: Mapping[str, DeviceKind]
    links: Mapping[str, Link]
    "Link classes within a host."
    hosts: tuple[Host, ...]
    rails: tuple[Rail, ...]
    provenance: Provenance
    version: int = 1
    measured: ClusterMeasurements | None = None
    "Curves from `pipefit profile`; None for a cluster from data sheets."
