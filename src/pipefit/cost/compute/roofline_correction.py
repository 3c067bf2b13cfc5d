"""Correction of the roofline for layers that were not measured, by the measurements of similar layers.

A shard of a layer is seldom measured; the full layer often is. If a measured layer has the same products (the same
kinds of operators, equally often), the ratio of its measured time to its roofline at the same sizes corrects the shard.
Attention and the overhead of small sizes thus count as in the full layer. Among several such layers, the most similar
one is used, by the remaining operators and by the sizes of the parameters. Without such a layer, the mean ratio of all
measured layers of the device kind applies, each at its largest microbatch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipefit.cluster.measured import LayerCurve
from pipefit.cost.compute.layer_query import MicrobatchShape
from pipefit.cost.compute.roofline import LayerSeconds
from pipefit.cost.portable import geometric_mean
from pipefit.model.analysis.totals import operator_flops
from pipefit.model.graph import Graph, size_factors
from pipefit.model.ops import KINDS


class RooflineRatios(NamedTuple):
    """Measured time / roofline time, per pass."""

    forward: float
    input: float
    weight: float
    fused: float = 1.0
    "Time of a fused backward / time of its two parts, both measured."


class LayerLookup:
    """The layers of a model, to find the full layer of a shard."""

    def __init__(self, graphs: Iterable[Graph]) -> None:
        self._by_products: dict[tuple[str, ...], list[Graph]] = {}
        self._alike: dict[int, tuple[Graph, list[Graph]]] = {}
        for graph in graphs:
            self._by_products.setdefault(product_kinds(graph), []).append(graph)

    def similar_layers(self, graph: Graph) -> Sequence[Graph]:
        """Return the layers with the same products as `graph`, by descending `part_likeness`; none without products."""
        if id(graph) not in self._alike:
            wanted = product_kinds(graph)
            candidates = self._by_products.get(wanted, []) if wanted else []
            self._alike[id(graph)] = graph, sorted(candidates, key=lambda whole: -part_likeness(graph, whole))
        return self._alike[id(graph)][1]


def part_likeness(part: Graph, whole: Graph) -> float:
    """Return how similar a shard is to a full layer, 0 to 2, as the sum of two shares.

    The first is the share of operators that both have. The second is the share of the shard's parameters whose shape is
    that of a parameter of the full layer, cut along at most one dimension.
    """
    ours, theirs = (Counter(operator.kind for operator in graph.operators) for graph in (part, whole))
    shapes = [parameter.shape for parameter in whole.parameters]
    fitting = [any(_is_cut(spec.shape, shape) for shape in shapes) for spec in part.parameters]
    both, either = (ours & theirs).total(), (ours | theirs).total()
    return both / max(1, either) + sum(fitting) / max(1, len(fitting))


def _is_cut(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether a tensor of shape `part` can be cut out of one of shape `whole` along at most one dimension."""
    if len(part) != len(whole):
        return False
    differing = [(part_size, size) for part_size, size in zip(part, whole, strict=True) if part_size != size]
    return len(differing) <= 1 and all(part_size < size for part_size, size in differing)


def product_kinds(graph: Graph) -> tuple[str, ...]:
    """Return the sorted kinds of all operators that multiply matrices."""
    unit_sizes: defaultdict[str, int] = defaultdict(lambda: 1)
    kinds = (operator.kind for operator in graph.operators if operator_flops(graph, operator, unit_sizes).forward)
    return tuple(sorted(KINDS[kind].measured_as or kind for kind in kinds))


def unsharded_shape(graph: Graph, shape: MicrobatchShape) -> MicrobatchShape:
    """Return the shape for the lookup of the full layer: full tokens, and the rows of one device of the shard."""
    split = any("R" in _symbol_letters(size) for tensor in graph.tensors for size in tensor.shape)
    rows = shape.own_rows if split else shape.rows
    return shape._replace(rows=rows, own_rows=rows, own_tokens=shape.tokens, own_first=None)


def measured_ratios(measured: LayerSeconds, roofline: LayerSeconds) -> RooflineRatios:
    """Return the ratios for one layer and shape; both times are without collectives."""
    parts = measured.input_s + measured.weight_s
    return RooflineRatios(
        forward=_time_ratio(measured.forward_s, roofline.forward_s),
        input=_time_ratio(measured.input_s, roofline.input_s),
        weight=_time_ratio(measured.weight_s, roofline.weight_s),
        fused=1.0 if measured.fused_s is None else _time_ratio(measured.fused_s, parts),
    )


def mean_ratios(curves: Sequence[LayerCurve]) -> RooflineRatios:
    """Return geometric means over measured layers with products (`LayerCurve.against_roofline`), or 1."""
    means = []
    for action in ("F", "I", "W"):
        known = [curve.against_roofline[action] for curve in curves if action in curve.against_roofline]
        means.append(geometric_mean(known) if known else 1.0)
    return RooflineRatios(*means)


def apply_ratios(guess: LayerSeconds, silent: LayerSeconds, ratios: RooflineRatios) -> LayerSeconds:
    """Return `guess` with its compute times multiplied by `ratios`. `silent` is the guess without collectives."""
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
