"""Cluster files: strict reading, checking and writing. Missing or wrong entries are reported by name, never filled
in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipefit.cluster import measured_check
from pipefit.cluster.types import Cluster, DeviceKind, Rail
from pipefit.codec import dump_text, load_file, write_file
from pipefit.errors import ClusterError
from pipefit.precision import PRODUCT_TYPE, Precision

_DTYPES = ("float32", "bfloat16")


def load_cluster(path: str | Path) -> Cluster:
    """Return the checked cluster of a JSON file. Raises FormatError (missing file or field) or ClusterError (wrong
    values)."""
    cluster = load_file(Cluster, Path(path))
    check_cluster(cluster, str(path))
    return cluster


def save_cluster_file(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster as JSON that a person can read and edit. Checks it first."""
    check_cluster(cluster, str(path))
    write_file(path, dump_text(cluster), "cluster file", ClusterError)


def check_cluster(cluster: Cluster, where: str = "cluster") -> None:
    """Raise ClusterError for the first contradiction, naming the entry."""
    for error in cluster_problems(cluster, where):
        raise error


def check_peaks(cluster: Cluster, precision: Precision, where: str) -> None:
    """Raise ClusterError for a kind of device without a peak for the matrix products of a precision."""
    product_type = PRODUCT_TYPE[precision]
    for kind in cluster.kinds.values():
        if product_type not in kind.peak_flops_per_s:
            raise ClusterError(
                f"The {kind.name} has no peak for {product_type}.",
                where=where,
                seen=precision,
                allowed=", ".join(name for name, product in PRODUCT_TYPE.items() if product in kind.peak_flops_per_s),
                next_step=f"choose another precision, or add the peak to kinds.{kind.name}.peak_flops_per_s of a "
                "cluster file",
            )


def cluster_problems(cluster: Cluster, where: str = "cluster") -> Iterator[ClusterError]:
    """Every contradiction of a cluster, in the order of the file."""
    if cluster.version != 1:
        yield ClusterError(
            "This version of the cluster format is unknown.", where=where, seen=cluster.version, allowed="1"
        )
    for key, kind in cluster.kinds.items():
        yield from _kind_problems(kind, f"{where}: kinds.{key}")
    for key, link in cluster.links.items():
        yield from _number_problems(link.latency_s, f"{where}: links.{key}.latency_s", zero=True)
        yield from _number_problems(link.bandwidth_bytes_per_s, f"{where}: links.{key}.bandwidth_bytes_per_s")
    yield from _host_problems(cluster, where)
    for index, rail in enumerate(cluster.rails):
        yield from _rail_problems(cluster, rail, f"{where}: rails[{index}] ({rail.name})")
    if cluster.measured is not None:
        names = [host.name for host in cluster.hosts]
        yield from measured_check.measurement_problems(
            cluster.measured, tuple(cluster.kinds), names, f"{where}: measured"
        )


def _kind_problems(kind: DeviceKind, where: str) -> Iterator[ClusterError]:
    yield from _number_problems(kind.memory_bytes, f"{where}.memory_bytes")
    yield from _number_problems(kind.memory_bandwidth_bytes_per_s, f"{where}.memory_bandwidth_bytes_per_s")
    yield from _number_problems(kind.overhead_s, f"{where}.overhead_s", zero=True)
    shares = {
        "efficiency": ("peak", kind.efficiency),
        "attention_efficiency": ("peak", kind.attention_efficiency),
        "bandwidth_efficiency": ("memory bandwidth", kind.bandwidth_efficiency),
    }
    for field, (limit, share) in shares.items():
        if share is not None and not 0 < share <= 1:
            yield ClusterError(
                f"The {field.replace('_', ' ')} is a share of the {limit}.",
                where=f"{where}.{field}",
                seen=share,
                allowed="0 to 1",
            )
    if kind.product_traffic is not None and not kind.product_traffic >= 1:
        yield ClusterError(
            "A matrix product moves its activations at least once.",
            where=f"{where}.product_traffic",
            seen=kind.product_traffic,
            allowed="1 or more",
        )
    for dtype in _DTYPES:
        if dtype not in kind.peak_flops_per_s:
            yield ClusterError(
                f"The peak for {dtype} is missing.",
                where=f"{where}.peak_flops_per_s",
                seen=", ".join(kind.peak_flops_per_s) or "nothing",
                allowed="one figure for each of " + ", ".join(_DTYPES),
            )
    for dtype, peak in kind.peak_flops_per_s.items():
        yield from _number_problems(peak, f"{where}.peak_flops_per_s.{dtype}")


def _host_problems(cluster: Cluster, where: str) -> Iterator[ClusterError]:
    if not cluster.hosts:
        yield ClusterError("A cluster needs at least one host.", where=f"{where}: hosts")
    names: set[str] = set()
    for index, host in enumerate(cluster.hosts):
        host_where = f"{where}: hosts[{index}] ({host.name})"
        if host.name in names:
            yield ClusterError("Two hosts have the same name.", where=host_where, seen=host.name)
        names.add(host.name)
        if host.kind not in cluster.kinds:
            yield ClusterError(
                "The host has a device kind that the file does not describe.",
                where=f"{host_where}.kind",
                seen=host.kind,
                allowed=", ".join(cluster.kinds) or "(no kinds in the file)",
            )
        if isinstance(host.devices, bool) or not isinstance(host.devices, int) or host.devices < 1:
            yield ClusterError(
                "A host has at least one device.",
                where=f"{host_where}.devices",
                seen=repr(host.devices),
                allowed="a positive integer",
            )
        if host.devices > 1 and host.link not in cluster.links:
            yield ClusterError(
                "The link between the devices of this host is missing.",
                where=f"{host_where}.link",
                seen=repr(host.link),
                allowed=", ".join(cluster.links) or "(no links in the file)",
            )
    if len(cluster.hosts) > 1 and not cluster.rails:
        yield ClusterError(
            "The links between the hosts are missing: there is no rail.",
            where=f"{where}: rails",
            seen="no rail for " + ", ".join(host.name for host in cluster.hosts[:4]),
            next_step="add a rail: matrices latency_s and bandwidth_bytes_per_s, [source host][target host]",
        )


def _rail_problems(cluster: Cluster, rail: Rail, where: str) -> Iterator[ClusterError]:
    count = len(cluster.hosts)
    for name, matrix in (
        ("latency_s", rail.latency_s),
        ("bandwidth_bytes_per_s", rail.bandwidth_bytes_per_s),
        ("repeatability", rail.repeatability),
    ):
        if name == "repeatability" and not matrix:
            continue
        if len(matrix) != count or any(len(row) != count for row in matrix):
            yield ClusterError(
                "The matrix has a wrong shape.",
                where=f"{where}.{name}",
                seen=f"{len(matrix)} rows of {sorted({len(row) for row in matrix})} entries",
                allowed=f"{count} rows of {count} entries, one for each host",
            )
            continue
        yield from _matrix_problems(cluster, matrix, f"{where}.{name}", zero=name != "bandwidth_bytes_per_s")


def _matrix_problems(
    cluster: Cluster, matrix: Sequence[Sequence[float]], where: str, zero: bool
) -> Iterator[ClusterError]:
    bad = [
        (a, b)
        for a, row in enumerate(matrix)
        for b, value in enumerate(row)
        if a != b and not (math.isfinite(value) and (value >= 0 if zero else value > 0))
    ]
    if bad:
        named = ", ".join(f"{cluster.hosts[a].name} -> {cluster.hosts[b].name}" for a, b in bad[:4])
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        a, b = bad[0]
        yield ClusterError(
            f"These links are missing or impossible: {named}{more}.",
            where=f"{where}[{a}][{b}]",
            seen=matrix[a][b],
            allowed="a number that is not negative" if zero else "a number above zero",
            next_step="measure the links again, or write the figure of the data sheet",
        )


def _number_problems(value: float, where: str, zero: bool = False) -> Iterator[ClusterError]:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        yield ClusterError(
            "This figure is impossible.",
            where=where,
            seen=value,
            allowed="a finite number, zero or above" if zero else "a finite number above zero",
        )
