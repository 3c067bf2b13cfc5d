"""How far the roofline is off for a layer that was not measured, by measured layers.

The part of a layer that one device of a group computes is seldom measured; the whole layer often is. Where a measured
layer has the same products (the same kinds of operators, as often), what it takes at the very sizes, over what the
roofline says of it there, corrects the part: attention and the knee of small sizes count there as much as in the whole.
Of several such layers that one counts of which it looks most like a part, by the rest of its operators and by the sizes
of its parameters. Elsewhere the mean over all measured layers of the kind of device has to do, each at its largest
microbatch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pipefit.cluster.measured import LayerCurve
from pipefit.cost.compute.roofline import LayerSeconds, MicrobatchShape
from pipefit.model.analysis.totals import operator_flops
from pipefit.model.graph import Graph, size_factors

WHOLE = {"linear_factors": "linear"}
"""Kinds that compute a share of another kind's product."""


class RooflineRatios(NamedTuple):
    """Measured over roofline."""

    forward: float
    input: float
    weight: float
    fused: float = 1.0
    "A fused backward over its two parts, both measured."


class LayerLookup:
    """The layers of a model, for finding which of them a part belongs to."""

    def __init__(self, graphs: Iterable[Graph]) -> None:
        self._by_products: dict[tuple[str, ...], list[Graph]] = {}
        self._alike: dict[int, tuple[Graph, list[Graph]]] = {}
        for graph in graphs:
            self._by_products.setdefault(product_kinds(graph), []).append(graph)

    def similar_layers(self, graph: Graph) -> Sequence[Graph]:
        """Layers with the products of this one, those first that it is most likely a part of (`part_likeness`); none
        for one without products."""
        if id(graph) not in self._alike:
            wanted = product_kinds(graph)
            found = self._by_products.get(wanted, []) if wanted else []
            self._alike[id(graph)] = graph, sorted(found, key=lambda whole: -part_likeness(graph, whole))
        return self._alike[id(graph)][1]


def part_likeness(part: Graph, whole: Graph) -> float:
    """How likely one is a part of the other, 0 to 2: the share of their operators that both have, and the share of the
    part's parameters of which the other has one that is as long, but along one dimension."""
    ours, theirs = (Counter(operator.kind for operator in graph.operators) for graph in (part, whole))
    shapes = [parameter.shape for parameter in whole.parameters]
    fitting = [any(_is_cut(own.shape, shape) for shape in shapes) for own in part.parameters]
    both, either = (ours & theirs).total(), (ours | theirs).total()
    return both / max(1, either) + sum(fitting) / max(1, len(fitting))


def _is_cut(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a tensor of one shape may be cut out of the other, along one dimension."""
    if len(part) != len(whole):
        return False
    others = [(own, size) for own, size in zip(part, whole, strict=True) if own != size]
    return len(others) <= 1 and all(own < size for own, size in others)


def product_kinds(graph: Graph) -> tuple[str, ...]:
    """The kinds of its operators that multiply matrices, sorted, each as often as it is there."""
    ones: defaultdict[str, int] = defaultdict(lambda: 1)
    found = (one.kind for one in graph.operators if operator_flops(graph, one, ones).forward)
    return tuple(sorted(WHOLE.get(kind, kind) for kind in found))


def unsharded_shape(graph: Graph, place: MicrobatchShape) -> MicrobatchShape:
    """Where the measured layer is looked at: with the rows that a device of the part has."""
    split = any("R" in _symbol_letters(size) for tensor in graph.tensors for size in tensor.shape)
    rows = place.own_rows if split else place.rows
    return place._replace(rows=rows, own_rows=rows, own_tokens=place.tokens)


def measured_ratios(measured: LayerSeconds, roofline: LayerSeconds) -> RooflineRatios:
    """Of one layer at one place: neither with collectives."""
    parts = measured.input_s + measured.weight_s
    return RooflineRatios(
        forward=_time_ratio(measured.forward_s, roofline.forward_s),
        input=_time_ratio(measured.input_s, roofline.input_s),
        weight=_time_ratio(measured.weight_s, roofline.weight_s),
        fused=1.0 if measured.fused_s is None else _time_ratio(measured.fused_s, parts),
    )


def mean_ratios(curves: Sequence[LayerCurve]) -> RooflineRatios:
    """Geometric means over measured layers with products (`LayerCurve.against_roofline`), or 1."""
    means = []
    for action in ("F", "I", "W"):
        known = [curve.against_roofline[action] for curve in curves if action in curve.against_roofline]
        means.append(float(np.exp(np.mean(np.log(known)))) if known else 1.0)
    return RooflineRatios(*means)


def apply_ratios(guess: LayerSeconds, silent: LayerSeconds, ratios: RooflineRatios) -> LayerSeconds:
    """The roofline's guess, its computing times multiplied by these. `silent` is the guess without collectives."""
    input_s, weight_s = silent.input_s * ratios.input, silent.weight_s * ratios.weight
    said_s = guess.input_s - silent.input_s + guess.weight_s - silent.weight_s
    return LayerSeconds(
        forward_s=guess.forward_s + silent.forward_s * (ratios.forward - 1),
        input_s=guess.input_s - silent.input_s + input_s,
        weight_s=guess.weight_s - silent.weight_s + weight_s,
        fused_s=None if ratios.fused == 1.0 else said_s + (input_s + weight_s) * ratios.fused,
    )


def _symbol_letters(size: int | str) -> tuple[str, ...]:
    return () if isinstance(size, int) else size_factors(size)[1]


def _time_ratio(measured_s: float, expected_s: float) -> float:
    return measured_s / expected_s if measured_s > 0 and expected_s > 0 else 1.0
