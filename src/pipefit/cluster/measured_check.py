"""Checks that measured curves are possible: equal lengths, ascending places, no negative or missing times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from pipefit.cluster.measured import ClusterMeasurements, LayerCurve, PortSharing, RailCurve
from pipefit.errors import ClusterError

MEASURED_ACTIONS = ("F", "I", "W", "B")


def measurement_problems(
    measured: ClusterMeasurements, kinds: Sequence[str], hosts: Sequence[str], where: str
) -> Iterator[ClusterError]:
    """Yield every contradiction, in the order of the file. `kinds` and `hosts` are the cluster's."""
    for index, layer in enumerate(measured.layers):
        yield from _layer_problems(layer, kinds, f"{where}.layers[{index}] ({layer.name}, {layer.setting})")
    for name, link in measured.links.items():
        yield from _curve_problems(link.sizes_bytes, link.time_s, f"{where}.links.{name}")
    for name, rail in measured.rails.items():
        yield from _rail_problems(rail, hosts, f"{where}.rails.{name}")
    for index, collective in enumerate(measured.collectives):
        curve_where = f"{where}.collectives[{index}] ({collective.operation})"
        yield from _curve_problems(collective.sizes_bytes, collective.time_s, curve_where)
        for factor in (collective.latency_factor, collective.bandwidth_factor):
            if not (math.isfinite(factor) and factor > 0):
                yield _range_error(curve_where, factor, "a factor above zero")
    for kind, overheads in measured.overhead_s.items():
        for action, time_s in overheads.items():
            if not (math.isfinite(time_s) and time_s >= 0):
                yield _range_error(f"{where}.overhead_s.{kind}.{action}", time_s, "seconds, zero or above")


def _layer_problems(layer: LayerCurve, kinds: Sequence[str], where: str) -> Iterator[ClusterError]:
    if layer.kind not in kinds:
        yield ClusterError(
            "The curve has a device kind that the file does not describe.",
            where=f"{where}.kind",
            seen=layer.kind,
            allowed=", ".join(kinds) or "(no kinds in the file)",
        )
    for action in MEASURED_ACTIONS:
        if action not in layer.actions:
            yield ClusterError(
                f"The curve of {action} is missing.",
                where=f"{where}.actions",
                seen=", ".join(layer.actions) or "nothing",
                allowed=", ".join(MEASURED_ACTIONS),
                next_step="measure the layer again with pipefit profile",
            )
            continue
        curve = layer.actions[action]
        yield from _curve_problems(curve.tokens, curve.time_s, f"{where}.actions.{action}", zero=True)
        for value in curve.attention_s:
            if not (math.isfinite(value) and value >= 0):
                yield _range_error(f"{where}.actions.{action}.attention_s", value, "seconds, zero or above")


def _curve_problems(
    places: Sequence[float], values: Sequence[float], where: str, zero: bool = False
) -> Iterator[ClusterError]:
    if len(places) != len(values) or not places:
        yield ClusterError(
            "The curve needs one time for each of its points.",
            where=where,
            seen=f"{len(places)} points, {len(values)} times",
            allowed="the same number of both, at least one",
        )
    elif any(b <= a for a, b in itertools.pairwise(places)):
        yield ClusterError("The points of the curve do not ascend.", where=where, seen=list(places))
    else:
        for value in values:
            if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
                yield _range_error(where, value, "seconds, zero or above" if zero else "seconds above zero")


def _rail_problems(rail: RailCurve, hosts: Sequence[str], where: str) -> Iterator[ClusterError]:
    count = len(hosts)
    shapes = [(len(matrix), *sorted({len(row) for row in matrix})) for matrix in rail.time_s]
    if len(rail.time_s) != len(rail.sizes_bytes) or any(shape != (count, count) for shape in shapes):
        yield ClusterError(
            "The matrices have a wrong shape.",
            where=f"{where}.time_s",
            seen=f"{len(shapes)} matrices for {len(rail.sizes_bytes)} sizes, rows and entries {sorted(set(shapes))}",
            allowed=f"one matrix for each size, {count} rows of {count} entries",
        )
        return
    for a, b in itertools.permutations(range(count), 2):
        times = [matrix[a][b] for matrix in rail.time_s]
        yield from _curve_problems(rail.sizes_bytes, times, f"{where}.time_s ({hosts[a]} -> {hosts[b]})")
    yield from _error_problems(rail.error, count, f"{where}.error")
    yield from _predicted_problems(rail, hosts, f"{where}.predicted")
    if rail.method is not None and len(rail.method.classes) not in (0, count):
        yield _length_error(f"{where}.method.classes", "classes", len(rail.method.classes), count)
    if rail.sharing is not None:
        yield from _sharing_problems(rail.sharing, hosts, f"{where}.sharing")


def _error_problems(errors: Sequence[Sequence[float]], count: int, where: str) -> Iterator[ClusterError]:
    if errors and [len(row) for row in errors] != [count] * count:
        yield ClusterError(
            "The matrix has a wrong shape.",
            where=where,
            seen=f"{len(errors)} rows of {sorted({len(row) for row in errors})} entries",
            allowed=f"{count} rows of {count} entries, or none",
        )
    for value in itertools.chain.from_iterable(errors):
        if not (math.isfinite(value) and value >= 0):
            yield _range_error(where, value, "a relative error, zero or above")


def _predicted_problems(rail: RailCurve, hosts: Sequence[str], where: str) -> Iterator[ClusterError]:
    for a, row in enumerate(rail.predicted):
        for b in row:
            if not 0 <= b < len(hosts) or a >= len(hosts):
                yield ClusterError(
                    "A link is marked as predicted whose host the file does not have.",
                    where=f"{where}[{a}]",
                    seen=b,
                    allowed=f"0 to {len(hosts) - 1}",
                )


def _sharing_problems(sharing: PortSharing, hosts: Sequence[str], where: str) -> Iterator[ClusterError]:
    for name, values, shared in (
        ("out", sharing.out_bytes_per_s, sharing.out_shared),
        ("in", sharing.in_bytes_per_s, sharing.in_shared),
    ):
        if len(values) != len(hosts):
            yield _length_error(f"{where}.{name}_bytes_per_s", "figures", len(values), len(hosts))
        if len(shared) != len(hosts):
            yield _length_error(f"{where}.{name}_shared", "entries", len(shared), len(hosts))
        for value in values:
            if not (math.isfinite(value) and value > 0):
                yield _range_error(f"{where}.{name}_bytes_per_s", value, "bytes per second above zero")
    for index, uplink in enumerate(sharing.uplinks):
        unknown = [host for host in uplink.hosts if host not in hosts]
        if unknown:
            yield ClusterError(
                "An uplink names hosts that the file does not have.",
                where=f"{where}.uplinks[{index}].hosts",
                seen=", ".join(unknown),
                allowed=", ".join(hosts),
            )
        for direction, rate in (("up", uplink.up_bytes_per_s), ("down", uplink.down_bytes_per_s)):
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                yield _range_error(
                    f"{where}.uplinks[{index}].{direction}_bytes_per_s", rate, "bytes per second above zero"
                )


def _length_error(where: str, what: str, seen: int, hosts: int) -> ClusterError:
    return ClusterError(
        "There is not one figure for each host.",
        where=where,
        seen=f"{seen} {what}",
        allowed=f"{hosts}, one for each host",
    )


def _range_error(where: str, seen: float, allowed: str) -> ClusterError:
    return ClusterError(
        "This measured figure is impossible.",
        where=where,
        seen=seen,
        allowed=allowed,
        next_step="measure again with pipefit profile",
    )
