"""A cluster in a few lines, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.cluster.measured import RailCurve
from pipefit.cluster.topology import device_count
from pipefit.cluster.types import Cluster
from pipefit.units import format_bandwidth, format_bytes, format_flops, format_seconds


def summarize_cluster(cluster: Cluster) -> str:
    """Return hosts, kinds, links and, if measured, curves as text."""
    lines = [
        f"cluster {cluster.name}: {len(cluster.hosts)} host{_plural_suffix(cluster.hosts)}, "
        f"{device_count(cluster)} devices, "
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
        bandwidths = [rail.bandwidth_bytes_per_s[a][b] for a in range(count) for b in range(count) if a != b]
        lines.append(
            f"  {rail.name}: {format_bandwidth(min(bandwidths))} to {format_bandwidth(max(bandwidths))} "
            f"between {count} hosts"
        )
    if cluster.measured is not None:
        lines += _measured_lines(cluster)
    return "\n".join(lines)


def _measured_lines(cluster: Cluster) -> list[str]:
    assert cluster.measured is not None
    lines = [line for name, rail in cluster.measured.rails.items() for line in _rail_lines(name, rail)]
    for curve in cluster.measured.layers:
        lines.append(
            f"  layer {curve.name} on {curve.kind}, {curve.dtype}, {curve.setting}: {len(curve.points)} points, "
            f"curves within {curve.fit_error:.1%}"
        )
    for collective in cluster.measured.collectives:
        lines.append(
            f"  {collective.operation} on {len(collective.devices)} devices: "
            f"latency x {collective.latency_factor:.2f}, seconds per byte x {collective.bandwidth_factor:.2f} of a ring"
        )
    lines += [f"  note: {note}" for note in cluster.measured.notes]
    lines.append(f"  measured in {cluster.measured.seconds:.0f} s")
    return lines


def _rail_lines(name: str, rail: RailCurve) -> Iterator[str]:
    """Yield lines on the measurement of a rail's links and their shared limits."""
    if rail.method is not None:
        how, predicted = rail.method, sum(map(len, rail.predicted))
        yield (
            f"  {name}: {how.rounds} rounds of pairs ({how.full_rounds} are all pairs), {how.repeats} times; "
            f"noise {how.noise:.1%}; the order of measurement explains {how.order_share:.0%} of the variance"
        )
        if predicted:
            error = f", mean error {how.held_out_error:.1%}" if how.held_out_error is not None else ""
            yield f"  {name}: {predicted} links were predicted from others, not measured{error}"
        if how.crowded:
            yield f"  {name}: hosts slow each other down when they send at the same time"
    if rail.sharing is not None:
        shared = sum(rail.sharing.out_shared)
        count = len(rail.sharing.out_shared)
        yield f"  {name}: ports of {shared} of {count} hosts limit sending to two others at once"
        for uplink in rail.sharing.uplinks:
            rates = [
                f"{format_bandwidth(rate)} {direction}"
                for rate, direction in ((uplink.up_bytes_per_s, "out"), (uplink.down_bytes_per_s, "in"))
                if rate is not None
            ]
            yield f"  {name}: {', '.join(uplink.hosts)} share {' and '.join(rates)}"


def _plural_suffix(things: object) -> str:
    return "" if len(things) == 1 else "s"  # type: ignore[arg-type]
