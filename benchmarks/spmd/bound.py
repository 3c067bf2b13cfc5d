"""What no program takes less than, at any shares: the search itself on prices that nothing can be below.

- Computing: devices wait for each other, so a step takes at least the mean over the devices of what each computes, with
  any weights. They are the devices' speeds: then the mean of what is split does not depend on the shares (of what is
  bound by memory, the best shares are taken for every operator by itself).
- Collectives of parts: the busiest port carries at least the mean of all, which in a cluster whose machines are wired
  alike is what it carries of even parts. Going from one split to another is free.
- Gradients: those of an operator and of all in front of it cannot be reduced before the backward is through with what
  is behind it. So a step takes at least all forward passes, the backward of what is behind an operator, and the
  reductions of what is not; the largest over all operators counts. Blocking collectives count throughout.
- Memory is free, and layers that are equal may have programs of their own on both sides of that operator.

Where every host has a program of its own, and gradients are summed between hosts, the same is asked of one host of the
slowest devices with an even part of the rows. In the mean over hosts, by their speeds, rows count least there: what
grows with them is taken times the speed of these devices against the mean. To every gradient comes its part of the sum
between hosts, whatever its form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipefit.cost.static_memory import GRADIENT_BYTES
from pipefit.model.graph import Layer, element_count
from pipefit.shard.chain import ChainSearch
from pipefit.shard.pricing import PricedLayer
from pipefit.shard.template import WHOLE_CUT, ConversionCost, Lines, OpenOption, held_fractions

EVERYTHING = 1 << 30
"""A place behind all operators."""


def no_program_below_s(model: Any, setting: Any, rows_weight: float = 1.0, between_s_per_byte: float = 0.0) -> float:
    """Seconds of a step that every program takes at least, whatever its shares. `rows_weight` multiplies what grows
    with rows, and every gradient's byte takes `between_s_per_byte` more, where hosts have programs of their own."""
    chains = Below(model, setting, rows_weight=rows_weight, between_s_per_byte=between_s_per_byte)
    even = (1,) * len(setting.kinds)
    least = 0.0
    for index, place in _turns(model):
        layers = [
            chains.named(layer, -1 if number > index else EVERYTHING if number < index else place)
            for number, layer in enumerate(model.layers)
        ]
        least = max(least, sum(link.cost_s for link in chains.search_programs(layers, even)))
    return least


def _turns(model: Any) -> Iterator[tuple[int, int]]:
    """(number of a layer, place of an operator in it): where the backward has got to when reductions are looked at.
    Ends of layers, and where layers are few, every operator that reads parameters."""
    yield 0, -1
    for index, layer in enumerate(model.layers):
        graph = model.layer_graph(layer)
        names = {spec.name for spec in graph.parameters}
        if len(model.layers) <= 4:
            yield from ((index, place) for place, operator in enumerate(graph.operators) if names & {*operator.inputs})
        elif names:
            yield index, EVERYTHING


@dataclass
class Below(ChainSearch):
    """A search on prices that nothing can be below. Operators up to a place cost their forward and their reductions,
    those behind it their forward and their backward."""

    rows_weight: float = 1.0
    between_s_per_byte: float = 0.0
    turn: dict[int, int] = field(default_factory=dict)
    "Identity of a copy of a graph -> the place."

    def named(self, layer: Layer, place: int) -> Layer:
        """A layer with a graph of its own for this place."""
        name = f"{layer.graph} to {place}"
        if name not in self.model.graphs:
            graph = replace(self.model.graphs[layer.graph])
            self.turn[id(graph)] = place
            self.model = replace(self.model, graphs={**self.model.graphs, name: graph})
        return replace(layer, graph=name)

    def layer_template(self, graph: Any, takes: Any, pinned: Any) -> PricedLayer:
        layer = super().layer_template(graph, takes, pinned)
        template, turn = layer.template, self.turn[id(graph)]
        fractions = held_fractions(template.cuts, (1,) * len(self.setting.kinds), self.setting.axis_members)
        elsewhere = {name for name, _, counted in pinned if not counted}
        summed_s = {
            spec.name: self.between_s_per_byte * element_count(spec.shape, {}) * GRADIENT_BYTES[self.setting.precision]
            for spec in graph.parameters
            if spec.trainable and spec.name not in elsewhere
        }

        def moved(conversion: ConversionCost | None) -> ConversionCost | None:
            if conversion is None:
                return None
            seconds = 0.0 if conversion.earlier != WHOLE_CUT else self.rows_weight * conversion.conversion_s(fractions)
            return replace(conversion, line=(seconds, 0.0), ahead=(), back=())

        def computed(way: OpenOption, early: bool, between_s: float) -> OpenOption:
            ahead, *back = (self._mean_s(lines, way.cut) for lines in way.passes or ((), (), ()))
            seconds = self.rows_weight * (ahead + (0.0 if early else sum(back)))
            once = (((seconds, 0.0),),) * self.setting.axis_members.kind_count
            nothing: tuple[Lines, ...] = ((),) * self.setting.axis_members.kind_count
            return replace(
                way,
                passes=(once, nothing, nothing),
                once_s=way.once_s + between_s if early else 0.0,
                reduction=moved(way.reduction),
                talk=moved(way.talk),
            )

        steps, early = [], False
        for step, place in zip(reversed(template.steps), reversed(layer.operators), strict=True):
            early = place <= turn if place >= 0 else early  # a parameter is with the first operator that reads it
            between_s = summed_s.get(layer.values[step.output], 0.0)
            steps.append(replace(step, ways=tuple(computed(way, early, between_s) for way in step.ways)))
        conversions = tuple(
            {move: moved(conversion) for move, conversion in each.items()} for each in template.conversion_costs
        )
        return replace(layer, template=replace(template, steps=tuple(reversed(steps)), conversion_costs=conversions))

    def _mean_s(self, lines: Sequence[Lines], cut: int) -> float:
        """The least mean over all devices of a pass, over all shares."""
        rates, members = self.setting.device_speeds[0], self.setting.axis_members
        if not any(lines):
            return 0.0
        weights = [0.0] * members.kind_count
        for rate, kind in zip(rates, members.kind, strict=True):
            weights[kind] += rate / sum(rates)
        if cut == WHOLE_CUT:
            return sum(w * max(a + b for a, b in each) for w, each in zip(weights, lines, strict=True))
        counts = members.device_counts
        if members.kind_count == 1:
            return max(a + b / counts[0] for a, b in lines[0])
        assert members.kind_count == 2, "shares of two kinds of devices are a number"

        def mean_s(part: float) -> float:
            """With this part of everything on the first kind."""
            parts = part / counts[0], (1 - part) / counts[1]
            return sum(w * max(a + b * f for a, b in each) for w, each, f in zip(weights, lines, parts, strict=True))

        return min(
            map(mean_s, {0.0, 1.0, *_corners(lines[0], counts[0]), *(1 - x for x in _corners(lines[1], counts[1]))})
        )


def _corners(lines: Lines, count: int) -> list[float]:
    """Where another of these lines becomes the highest, as the part of everything on so many devices."""
    found = []
    for a, b in lines:
        for c, d in lines:
            if b != d and 0 < (part := count * (c - a) / (b - d)) < 1:
                found.append(part)
    return found
