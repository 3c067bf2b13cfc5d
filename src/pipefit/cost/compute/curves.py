"""Times from the measurements of `pipefit profile`: layers, links, collectives, overhead of an action. Pure functions.

A layer's time is a piecewise linear function of its tokens (with the knee of small sizes) plus attention, whose feature
is length x (context + length / 2): a causal square costs half of a rectangle. A context of several slices is attended
to slice by slice, with a cost per slice and per query of each slice. `MeasuredCosts` returns measured times where they
exist and the roofline elsewhere, behind the same interface; its notes name the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from pipefit.cluster.measured import (
    ActionCurve,
    ClusterMeasurements,
    CollectiveCurve,
    LayerCurve,
    LinkCurve,
    RailCurve,
    Setting,
)
from pipefit.cluster.types import Cluster
from pipefit.codec import content_digest
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.packed_rows import equivalent_rows
from pipefit.cost.compute.roofline import LayerCost, LayerCosts, LayerSeconds, RooflineCosts
from pipefit.cost.compute.roofline_correction import (
    LayerLookup,
    RooflineRatios,
    apply_ratios,
    mean_ratios,
    measured_ratios,
    unsharded_shape,
)
from pipefit.cost.portable import geometric_mean
from pipefit.cost.types import Array
from pipefit.model.graph import Graph
from pipefit.precision import PRODUCT_TYPE

FEATURES = (
    "rows x length^2 / 2, without context",
    "1, with context",
    "rows x length, with context",
    "rows x context",
    "rows x length x context",
    "rows x length^2 / 2, with context",
    "length x (context + length), with context",
    "earlier slices beyond the first",
    "rows x length x earlier slices beyond the first",
)
"""Costs of attention beyond the tokens. Without context: the causal square of the sequence. With context: a constant,
and costs per query, per earlier key, per score on earlier keys and on own keys, and for masks shared by all rows. Each
further earlier slice has a constant and a cost per query. Curves measured before the last two features existed have
no weights for them.
"""


FloatSequence = Sequence[float] | Array


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of each action on one layer."""

    forward_s: float
    input_s: float
    weight_s: float
    fused_s: float
    "B, measured separately: not always the sum of I and W."


def attention_features(
    rows: FloatSequence, tokens: FloatSequence, past: FloatSequence, earlier: FloatSequence | None = None
) -> Array:
    """Return the features as an array [point, feature] in the order of `FEATURES`.

    `earlier` is the number of slices that form `past`; None: past / tokens, rounded.
    """
    b, t, p = (np.asarray(column, dtype=np.float64) for column in (rows, tokens, past))
    sliced = (p > 0).astype(np.float64)
    count = np.round(p / np.maximum(t, 1)) if earlier is None else np.asarray(earlier, dtype=np.float64)
    more = sliced * np.maximum(count - 1, 0)
    square = b * t * t / 2
    columns = (
        square * (1 - sliced),
        sliced,
        b * t * sliced,
        b * p,
        b * t * p,
        square * sliced,
        sliced * t * (p + t),
        more,
        b * t * more,
    )
    return np.stack(columns, axis=-1)


def action_times_s(
    curve: ActionCurve,
    rows: FloatSequence,
    tokens: FloatSequence,
    past: FloatSequence,
    earlier: FloatSequence | None = None,
) -> Array:
    """Return the seconds of one action for `rows` rows of `tokens` tokens with `past` earlier tokens.

    The arguments are arrays of one shape; 0 rows cost nothing. `earlier`: see `attention_features`.
    """
    b, t, p = (np.asarray(column, dtype=np.float64) for column in (rows, tokens, past))
    time_s = interpolate_many(curve.tokens, curve.time_s, b * t)
    if curve.attention_s:
        known = len(curve.attention_s)
        features = attention_features(b, t, p, earlier)[..., :known]
        time_s = time_s + (features * np.asarray(curve.attention_s)).sum(axis=-1)
    return np.where(b * t > 0, time_s, 0.0)


def action_time_s(curve: ActionCurve, rows: float, tokens: float, past: int = 0, earlier: int | None = None) -> float:
    """Return `action_times_s` of one size."""
    return float(action_times_s(curve, [rows], [tokens], [past], None if earlier is None else [earlier])[0])


def interpolate_many(places: Sequence[float], values: Sequence[float], wanted: Array) -> Array:
    """Interpolate linearly. Beyond the last knot the last slope continues; below the first knot its value holds."""
    inside = np.interp(wanted, places, values)
    if len(places) == 1:
        return np.where(wanted > places[-1], values[-1] * wanted / places[-1], inside)
    slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
    return np.asarray(inside + slope * np.maximum(wanted - places[-1], 0.0))


def interpolate_one(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """Return `interpolate_many` of one place."""
    return float(interpolate_many(places, values, np.asarray([place], dtype=np.float64))[0])


def layer_times(curve: LayerCurve, rows: float, tokens: float, past: int = 0, earlier: int | None = None) -> LayerTimes:
    """Return the seconds of all actions of one measured layer. `earlier`: see `attention_features`."""
    return LayerTimes(
        *(action_time_s(curve.actions[action], rows, tokens, past, earlier) for action in ("F", "I", "W", "B"))
    )


def find_layer(
    measured: ClusterMeasurements, graph_signature: str, kind: str, dtype: str, setting: Setting = "together"
) -> LayerCurve | None:
    """Return the curve of a layer on a device kind, or None; another setting's curve if `setting` was not measured."""
    by_setting = {
        curve.setting: curve
        for curve in measured.layers
        if curve.signature == graph_signature and curve.kind == kind and curve.dtype == dtype
    }
    return by_setting.get(setting) or next(iter(by_setting.values()), None)


def digest_graph(graph: Graph) -> str:
    """Return a digest of a graph's computation: kinds, shapes, attributes and connections, not names or lines."""
    places = {tensor.name: f"in{i}" for i, tensor in enumerate(graph.inputs)}
    places |= {parameter.name: f"p{i}" for i, parameter in enumerate(graph.parameters)}
    for i, operator in enumerate(graph.operators):
        places |= {name: f"{i}.{j}" for j, name in enumerate(operator.outputs)}
    operators: list[Any] = []
    for operator in graph.operators:
        results = [graph.find_tensor(name) for name in operator.outputs]
        operators.append(
            [
                operator.kind,
                [places.get(name, "") for name in operator.inputs],
                operator.attributes,
                [[list(tensor.shape), tensor.dtype] for tensor in results],
            ]
        )
    inputs = [[list(tensor.shape), tensor.dtype, tensor.role] for tensor in graph.inputs]
    parameters = [[list(parameter.shape), parameter.trainable] for parameter in graph.parameters]
    return content_digest([inputs, parameters, operators, [places[name] for name in graph.outputs]])


def message_time_s(curve: LinkCurve, size_bytes: float) -> float:
    """Return the seconds of one message of `size_bytes` inside a host."""
    return interpolate_one(curve.sizes_bytes, curve.time_s, size_bytes)


def rail_message_time_s(curve: RailCurve, source: int, target: int, size_bytes: float) -> float:
    """Return the seconds of one message of `size_bytes` from host `source` to host `target`."""
    return interpolate_one(curve.sizes_bytes, [matrix[source][target] for matrix in curve.time_s], size_bytes)


def collective_factors(
    measured: ClusterMeasurements, operation: str, host: Sequence[int], size: int, inside: bool
) -> tuple[float, float]:
    """Return (latency factor, bandwidth factor) of a collective on groups of `size` devices, relative to a ring.

    It is the geometric mean over `collective_curves`, or (1, 1) if the collective was not measured.
    """
    curves = collective_curves(measured, operation, host, size, inside)
    if not curves:
        return 1.0, 1.0
    latency = geometric_mean([curve.latency_factor for curve in curves])
    return latency, geometric_mean([curve.bandwidth_factor for curve in curves])


def collective_curves(
    measured: ClusterMeasurements, operation: str, host: Sequence[int], size: int, inside: bool
) -> tuple[CollectiveCurve, ...]:
    """Return the measured groups most similar to groups of `size` devices inside one host or on several hosts.

    Groups of the same reach are preferred, then the nearest sizes, as a ratio. `host` is the host of every device.
    """
    curves = [curve for curve in measured.collectives if curve.operation == operation]
    alike = [curve for curve in curves if (len({host[device] for device in curve.devices}) == 1) == inside] or curves

    def size_distance(curve: CollectiveCurve) -> Fraction:
        return max(Fraction(size, len(curve.devices)), Fraction(len(curve.devices), size))

    nearest = min(map(size_distance, alike), default=None)
    return tuple(curve for curve in alike if size_distance(curve) == nearest)


def times_at(curve: LayerCurve, shape: MicrobatchShape) -> LayerTimes:
    """Return `layer_times` of a shape; a packed row counts by its images."""
    rows, tokens = equivalent_rows(shape)
    return layer_times(curve, rows, tokens, shape.past, shape.earlier)


def stage_overhead_s(cluster: Cluster) -> float:
    """Return the seconds per stage action beside its layers: the mean over F, I, W and B of the slowest device kind.

    It is 0 if it was not measured; roofline layer times include it.
    """
    known = cluster.measured.overhead_s if cluster.measured is not None else {}
    return max((float(np.mean(list(by_action.values()))) for by_action in known.values() if by_action), default=0.0)


def best_costs(cluster: Cluster, setting: Setting = "together", graphs: Iterable[Graph] = ()) -> LayerCosts:
    """Return measured costs if the cluster has measurements, else the roofline.

    `graphs`: the full layers of the model, which correct the times of their shards.
    """
    if cluster.measured is not None and cluster.measured.layers:
        return MeasuredCosts(cluster, setting, graphs)
    return RooflineCosts()


class MeasuredCosts:
    """Layer costs from a cluster's measured curves. Layers without measurements use the corrected roofline
    (`cost/compute/roofline_correction.py`).

    Memory, collectives inside a sharded layer and the time added by recomputation keep the roofline's formulas;
    recomputation is scaled by measured forward / roofline forward. `notes` lists the measured layers.
    """

    notes: tuple[str, ...]

    def __init__(self, cluster: Cluster, setting: Setting = "together", graphs: Iterable[Graph] = ()) -> None:
        self.measured = cluster.measured or ClusterMeasurements()
        self._whole = LayerLookup(graphs)
        self.setting: Setting = setting
        self.roofline = RooflineCosts()
        self.notes = ()
        self._signatures: dict[int, tuple[Graph, str]] = {}
        self._origins: dict[str, None] = {}
        self._known: dict[object, LayerCost] = {}
        self._seconds: dict[object, LayerSeconds] = {}
        overhead_s = stage_overhead_s(cluster)
        if overhead_s:
            self._add_note(f"overhead of a stage beside its layers: {overhead_s * 1e6:.0f} us, measured")

    def measured_times(self, query: LayerQuery) -> LayerTimes | None:
        """Return measured times of one layer, or None if it was not measured."""
        curve = self._find_curve(query.graph, query)
        if curve is None:
            return None
        self._add_note(
            f"layer {curve.name} on {query.kind.name} in {query.precision}: measured, {len(curve.points)} points, "
            f"{curve.setting} ({curve.processes} processes), curves within {curve.fit_error:.1%} of them"
        )
        return times_at(curve, query.shape)

    def layer_cost(self, query: LayerQuery) -> LayerCost:
        """Return the cost of the layer."""
        key = self._cache_key(query)
        if key not in self._known:
            self._known[key] = replace(self.roofline.layer_cost(query), **self.layer_durations(query)._asdict())
        return self._known[key]

    def layer_durations(self, query: LayerQuery) -> LayerSeconds:
        """Return the times of `layer_cost`."""
        key = self._cache_key(query)
        if key not in self._seconds:
            self._seconds[key] = self._lookup_times(query)
        return self._seconds[key]

    def _cache_key(self, query: LayerQuery) -> object:
        graph, shape, kind, precision, recompute, _, collective_key = query
        return self._digest_of(graph), shape, kind.name, precision, recompute, collective_key

    def _lookup_times(self, query: LayerQuery) -> LayerSeconds:
        guess = self.roofline.layer_durations(query)
        times = self.measured_times(query)
        if query.shape.rows == 0:
            return guess
        silent_query = query.without_collectives()
        silent = self.roofline.layer_durations(silent_query)
        if times is None:
            return apply_ratios(guess, silent, self._correction_ratios(query))
        plain = self.roofline.layer_durations(silent_query._replace(recompute="none"))
        ratio = times.forward_s / plain.forward_s if plain.forward_s else 0.0
        more_s = guess.input_s - silent.input_s + (silent.input_s - plain.input_s) * ratio
        return LayerSeconds(
            forward_s=times.forward_s + guess.forward_s - silent.forward_s,
            input_s=times.input_s + more_s,
            weight_s=times.weight_s + guess.weight_s - silent.weight_s,
            fused_s=times.fused_s + more_s + guess.weight_s - silent.weight_s,
        )

    def _correction_ratios(self, query: LayerQuery) -> RooflineRatios:
        """Return the roofline correction for a layer that was not measured."""
        graph, kind, precision = query.graph, query.kind, query.precision
        what = f"a layer of {len(graph.operators)} operators on {kind.name} in {precision}: not measured"
        for layer in self._whole.similar_layers(graph):
            curve = self._find_curve(layer, query)
            if curve is not None:
                full_shape = unsharded_shape(graph, query.shape)
                times = LayerSeconds(*astuple(times_at(curve, full_shape)))
                self._add_note(f"{what}; roofline, corrected by the measurement of {curve.name} at the same sizes")
                return measured_ratios(
                    times, self.roofline.layer_durations(LayerQuery(layer, full_shape, kind, precision))
                )
        curves = [
            curve
            for curve in self.measured.layers
            if curve.kind == kind.name and curve.dtype == PRODUCT_TYPE[precision]
        ]
        ratios = mean_ratios([curve for curve in curves if curve.setting == self.setting] or curves)
        if ratios != (1.0, 1.0, 1.0, 1.0):
            forward, back, weight, _ = ratios
            what += f"; roofline x {forward:.2f} (F), {back:.2f} (I), {weight:.2f} (W), the mean of measured layers"
        self._add_note(what)
        return ratios

    def _find_curve(self, graph: Graph, query: LayerQuery) -> LayerCurve | None:
        """Return the curve of `graph` on the device kind and in the precision of the query."""
        product_type = PRODUCT_TYPE[query.precision]
        return find_layer(self.measured, self._digest_of(graph), query.kind.name, product_type, self.setting)

    def _digest_of(self, graph: Graph) -> str:
        if id(graph) not in self._signatures:
            self._signatures[id(graph)] = (graph, digest_graph(graph))
        return self._signatures[id(graph)][1]

    def _add_note(self, text: str) -> None:
        if text not in self._origins:
            self._origins[text] = None
            unmeasured = any(": not measured" in note for note in self._origins)
            self.notes = (*self._origins, *(self.roofline.notes if unmeasured else self.roofline.notes[1:]))
