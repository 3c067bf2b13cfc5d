"""Fit constants of cost formulas to measurements: collectives relative to a ring over their links, and the share of
peak that layers reach. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipefit.cluster.measured import CollectiveCurve, LayerCurve, LayerPoint
from pipefit.cluster.types import Cluster, DeviceKind
from pipefit.cost.comm.collectives import ring_step
from pipefit.cost.comm.direct import MIN_FACTOR
from pipefit.cost.comm.lowerings import DIRECT, CollectiveLowerings, direct_curve
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import digest_graph, layer_times
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.roofline import RooflineCosts
from pipefit.model.graph import Graph
from pipefit.model.ops import KINDS
from pipefit.profile.points import sizes_at

RING_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Passes round the ring, of (devices - 1) steps each (Thakur, Rabenseifner and Gropp 2005)."""


def collective_curve(
    cluster: Cluster,
    operation: str,
    devices: Sequence[int],
    sizes_bytes: Sequence[int],
    time_s: Sequence[float],
    spread: Sequence[float],
) -> CollectiveCurve:
    """Return the curve of one collective with its factors relative to a ring over the links of `cluster` between
    `devices`.

    A direct collective is compared with the lowering that moves the same data (`cost.comm.lowerings.DIRECT`).

    Fits time = f latency + g bytes / bandwidth on relative errors, where latency and bandwidth are the formula's; f and
    g are the factors. For a direct collective g is the last slope of its curve: the curve is not a straight line, and
    costs use its times (`cost/comm/direct.py`).
    """
    from scipy.optimize import nnls

    network = Network(cluster)
    latency_s, s_per_byte = _ring_coefficients(network, operation, devices)
    times = np.asarray(time_s, dtype=np.float64)
    columns = np.stack(
        [np.full(len(times), latency_s), np.asarray(sizes_bytes, dtype=np.float64) * s_per_byte], axis=-1
    )
    latency, bandwidth = nnls(columns / times[:, None], np.ones(len(times)))[0]
    if operation in DIRECT:
        bandwidth = direct_curve(network, operation, devices, sizes_bytes, time_s, latency).last_factor
    return CollectiveCurve(
        operation=operation,
        devices=tuple(devices),
        sizes_bytes=tuple(sizes_bytes),
        time_s=tuple(time_s),
        spread=tuple(spread),
        latency_factor=max(MIN_FACTOR, float(latency)),
        bandwidth_factor=max(MIN_FACTOR, float(bandwidth)),
    )


def _ring_coefficients(network: Network, operation: str, devices: Sequence[int]) -> tuple[float, float]:
    """Return (seconds without bytes, seconds per byte) of a collective of even parts, from the links."""
    count = len(devices)
    if operation in DIRECT:
        latency_s, rounds = CollectiveLowerings(network, [devices]).plain_lowering(*DIRECT[operation])
        return latency_s, rounds.s_per_byte((1 / count,) * count)
    ring, steps = ring_step(network, operation, [devices]), RING_PASSES[operation] * (count - 1)
    return steps * ring.latency_s, steps / count * ring.s_per_byte


def fit_efficiency(kind: DeviceKind, graphs: Sequence[Graph], layers: Sequence[LayerCurve]) -> float:
    """Return the share of the measured peak at which the roofline best matches the measured layers of this kind.

    It is the median over layers, each at its largest whole microbatch and with all processes computing; 1 if no layer
    with matrix products was measured.
    """
    known: Mapping[str, Graph] = {digest_graph(graph): graph for graph in graphs if _has_products(graph)}
    curves = [curve for curve in layers if curve.kind == kind.name and curve.signature in known]
    setting = max((curve.processes for curve in curves), default=1)
    shares = [_best_share(kind, known[curve.signature], curve) for curve in curves if curve.processes == setting]
    return float(np.median(shares)) if shares else 1.0


def add_ratios(kind: DeviceKind, graphs: Sequence[Graph], layers: Sequence[LayerCurve]) -> list[LayerCurve]:
    """Return the curves; those of this kind get their times relative to the roofline (`LayerCurve.against_roofline`).

    The ratios correct the roofline times of unmeasured layers, such as the parts of a sharded layer.
    """
    known: Mapping[str, Graph] = {digest_graph(graph): graph for graph in graphs if _has_products(graph)}
    return [
        replace(curve, against_roofline=_roofline_ratios(kind, known[curve.signature], curve))
        if curve.kind == kind.name and curve.signature in known
        else curve
        for curve in layers
    ]


def _roofline_ratios(kind: DeviceKind, graph: Graph, curve: LayerCurve) -> dict[str, float]:
    point = _largest_point(curve)
    measured = layer_times(curve, point.rows, point.tokens)
    guess = RooflineCosts().layer_cost(_point_query(graph, point, kind, curve))
    pairs = {
        "F": (measured.forward_s, guess.forward_s),
        "I": (measured.input_s, guess.input_s),
        "W": (measured.weight_s, guess.weight_s),
    }
    return {action: seconds / expected for action, (seconds, expected) in pairs.items() if seconds > 0 and expected > 0}


def _largest_point(curve: LayerCurve) -> LayerPoint:
    return max((point for point in curve.points if not point.past), key=lambda point: point.rows * point.tokens)


def _best_share(kind: DeviceKind, graph: Graph, curve: LayerCurve) -> float:
    point = _largest_point(curve)
    measured = layer_times(curve, point.rows, point.tokens)
    whole_s = measured.forward_s + measured.fused_s
    shares = np.geomspace(0.02, 1.0, 60)

    def roofline_error(share: float) -> float:
        guess = RooflineCosts().layer_cost(_point_query(graph, point, replace(kind, efficiency=share), curve))
        return float(abs(np.log((guess.forward_s + guess.input_s + guess.weight_s) / whole_s)))

    return float(min(shares, key=roofline_error))


def _point_query(graph: Graph, point: LayerPoint, kind: DeviceKind, curve: LayerCurve) -> LayerQuery:
    """Return the query of a layer at the sizes of one of its measured points."""
    symbols = sizes_at(point.rows, point.tokens)
    shape = MicrobatchShape(symbols.pop("B"), symbols.pop("T"), 0, point.tokens, symbols=tuple(symbols.items()))
    return LayerQuery(graph, shape, kind, curve.dtype)  # type: ignore[arg-type]


def _has_products(graph: Graph) -> bool:
    return any(KINDS[operator.kind].is_product for operator in graph.operators)
