"""A cluster in a few lines, for the terminal."""

from __future__ import annotations

from pipefit.cluster.topology import device_count
from pipefit.cluster.types import Cluster
from pipefit.units import format_bandwidth, format_bytes, format_flops, format_seconds


def summary(cluster: Cluster) -> str:
    """Hosts, kinds, links and, where there are some, curves."""
    lines = [
        f"cluster {cluster.name}: {len(cluster.hosts)} host{_s(cluster.hosts)}, {device_count(cluster)} devices, "
        f"{cluster.provenance.source}"
    ]
    for name, kind in cluster.kinds.items():
        rate = kind.peak_flops_per_s["float32"] * kind.efficiency
        lines.append(
            f"  {name}: {format_bytes(kind.memory_bytes)}, float32 {format_flops(rate)}/s "
            f"({kind.efficiency:.0%} of {format_flops(kind.peak_flops_per_s['float32'])}/s), "
            f"memory {format_bandwidth(kind.memory_bandwidth_bytes_per_s)}"
        )
    for name, link in cluster.links.items():
        lines.append(
            f"  {name}: {format_seconds(link.latency_s)}, {format_bandwidth(link.bandwidth_bytes_per_s)}, "
            f"repeatability {link.repeatability:.2f}"
        )
    for rail in cluster.rails:
        count = len(cluster.hosts)
        ways = [rail.bandwidth_bytes_per_s[a][b] for a in range(count) for b in range(count) if a != b]
        lines.append(
            f"  {rail.name}: {format_bandwidth(min(ways))} to {format_bandwidth(max(ways))} between {count} hosts"
        )
    if cluster.measured is not None:
        lines += _measured(cluster)
    return "\n".join(lines)


def _measured(cluster: Cluster) -> list[str]:
    assert cluster.measured is not None
    lines = []
    for curve in cluster.measured.layers:
        lines.append(
            f"  layer {curve.name} on {curve.kind}, {curve.dtype}, {curve.setting}: {len(curve.points)} points, "
            f"curves within {curve.fit_error:.1%}"
        )
    for each in cluster.measured.collectives:
        lines.append(
            f"  {each.operation} on {len(each.devices)} devices: latency x {each.latency_factor:.2f}, "
            f"seconds per byte x {each.bandwidth_factor:.2f} of a ring"
        )
    lines += [f"  note: {note}" for note in cluster.measured.notes]
    lines.append(f"  measured in {cluster.measured.seconds:.0f} s")
    return lines


def _s(things: object) -> str:
    return "" if len(things) == 1 else "s"  # type: ignore[arg-type]
