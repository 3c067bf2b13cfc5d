"""The compute cost of one operator on the devices of a setting, full or split along a label."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, fsum

from pipefit.cluster.types import DeviceKind
from pipefit.cost.comm.lowerings import LoweredCollective
from pipefit.cost.compute.kernel_time import PassWork, kernel_time
from pipefit.cost.compute.operator_times import exchanges_s, operator_work
from pipefit.cost.compute.shard_exchanges import operator_exchanges
from pipefit.model.graph import (
    Graph,
    Operator,
    ParameterSpec,
    Shape,
    Size,
    TensorSpec,
    multiply_sizes,
    size_value,
)
from pipefit.model.ops import KINDS, OperatorKind
from pipefit.model.ops.attention import FIRST_QUERY
from pipefit.model.ops.kind import Said
from pipefit.shard.rules import OperatorLabels
from pipefit.shard.setting import ShardSetting
from pipefit.shard.template import WHOLE_CUT, ConversionCost, Line, Lines


class OperatorPricing:
    """Prices of the operators of one graph, by the roofline."""

    def __init__(
        self,
        setting: ShardSetting,
        shapes: Mapping[str, Shape],
        tensors: Mapping[str, TensorSpec],
        parameters: Mapping[str, ParameterSpec],
        narrow: Collection[str] = (),
    ) -> None:
        """`narrow` names the outputs of products that run in FP8 under such a precision."""
        self.setting, self.shapes, self.tensors, self.parameters = setting, shapes, tensors, parameters
        self.narrow = narrow

    def pass_lines(self, operator: Operator, labelled: OperatorLabels, label: str) -> tuple[tuple[Lines, ...], ...]:
        """Return the passes of an operator per device kind, as lines in the fraction of `label` ('': not split).

        The FLOPs of queries of causal attention depend on their position. The line of a device kind then assumes equal
        parts, and the last position of the kind.
        """
        kinds = self.setting.distinct_kinds
        once, twice = (self._isolated_work(operator, labelled, label, times) for times in (1, 2))
        works = [(once, twice)] * len(kinds)
        if label and _position_matters(operator, labelled, label):
            works = [
                (
                    self._positioned_work(operator, labelled, label, kind, 1),
                    self._positioned_work(operator, labelled, label, kind, 2),
                )
                for kind in kinds
            ]
        return tuple(
            tuple(
                self.kernel_lines(KINDS[operator.kind], single[index], double[index], kind)
                for kind, (single, double) in zip(kinds, works, strict=True)
            )
            for index in range(len(once))
        )

    def _positioned_work(
        self, operator: Operator, labelled: OperatorLabels, label: str, kind: DeviceKind, times: int
    ) -> Sequence[PassWork | None]:
        """Return `_isolated_work` with the FLOPs of the last device of a kind, if parts are equal, scaled to the full
        label."""
        parts, position = len(self.setting.kinds), max(i for i, other in enumerate(self.setting.kinds) if other == kind)
        first = position * self.setting.tokens // parts
        last = self._isolated_work(operator, labelled, label, Fraction(1, parts), first)
        return [
            work and part and work._replace(flops=times * parts * part.flops)
            for work, part in zip(self._isolated_work(operator, labelled, label, times), last, strict=True)
        ]

    def _isolated_work(
        self, operator: Operator, labelled: OperatorLabels, label: str, times: int | Fraction, first: int = 0
    ) -> Sequence[PassWork | None]:
        """Return the work of every pass of an operator, with the dimensions of a label multiplied by `times`. `first`:
        the position of its first query, if its queries are fewer than its keys."""
        graph = self.isolated_graph(operator, labelled, label, times)
        sizes = {**self.setting.symbol_sizes, FIRST_QUERY: first}
        narrow = operator.outputs[0] in self.narrow
        return operator_work(graph, graph.operators[0], sizes, self.setting.precision, narrow)

    def price_exchanges(
        self, operator: Operator, labelled: OperatorLabels, label: str, cut: int, earlier: int
    ) -> ConversionCost | None:
        """Return the cost of the collectives inside an operator split along `label` with `cut` units, or None without
        any.

        `earlier` is the second cut of a joint label.
        """
        if label not in labelled.kinds:
            return None
        graph, setting = self.isolated_graph(operator, labelled, label, 1), self.setting
        said = operator_exchanges(graph, graph.operators[0], setting.symbol_sizes, setting.precision)
        if setting.lowered is not None and earlier != WHOLE_CUT:
            ahead, back = (self._direct_exchanges(exchanges) for exchanges in (said.forward, said.input_gradient))
            return ConversionCost((0.0, 0.0), cut, ahead=ahead, back=back, earlier=earlier)
        return ConversionCost((fsum(exchanges_s(said, setting.collective)), 0.0), cut, earlier=earlier)

    def _direct_exchanges(self, said: Sequence[Said]) -> tuple[LoweredCollective, ...]:
        """Return the lowerings of equal exchanges with the runtime's lowering: directly from device to device."""
        assert self.setting.lowered is not None and len({*said}) == 1
        (kind, size, how, _), times = said[0], len(said)
        options = [option for option in self.setting.lowered(kind, size) if option.name == how]
        return tuple(
            replace(option, constant_s=times * option.constant_s, slope=times * option.slope) for option in options
        )

    def kernel_lines(
        self, operator: OperatorKind, once: PassWork | None, twice: PassWork | None, kind: DeviceKind
    ) -> Lines:
        """Return the time of a pass with work `once` for the full label and `twice` for twice its size."""
        if once is None or twice is None:
            return ()
        slow = self.setting.slowness.get(kind.name, 1.0)
        single, double = (kernel_time(work, operator, kind, self.setting.precision) for work in (once, twice))

        def line_through(first: float, second: float) -> Line:
            return (2 * first - second) * slow + kind.overhead_s, (second - first) * slow

        if single.adds_up or double.adds_up:
            return (line_through(single.seconds, double.seconds),)
        return _upper_envelope(
            (
                line_through(single.compute_s, double.compute_s),
                line_through(single.memory_s, double.memory_s),
            )
        )

    def isolated_graph(self, operator: Operator, labelled: OperatorLabels, label: str, times: int | Fraction) -> Graph:
        """Return a graph of the operator alone, with the dimensions of a label multiplied by `times` and rounded up."""
        shapes: dict[str, Shape] = {}
        names = (*operator.inputs, *operator.outputs)
        for name, labels in zip(names, (*labelled.inputs, *labelled.outputs), strict=True):
            if name:
                shapes[name] = tuple(
                    self._resize(size, times) if label and (labels or ())[dim] == label else size
                    for dim, size in enumerate(self.shapes[name])
                )
        tensor = {
            name: TensorSpec(
                name=name, shape=shapes[name], dtype=self.tensors[name].dtype, role=self.tensors[name].role
            )
            for name in shapes
            if name in self.tensors
        }
        return Graph(
            inputs=tuple(tensor[name] for name in tensor if name not in operator.outputs),
            outputs=operator.outputs,
            operators=(replace(operator, kind=labelled.kinds.get(label, operator.kind)),),
            parameters=tuple(
                ParameterSpec(name=name, shape=tuple(map(int, shapes[name])), trainable=self.parameters[name].trainable)
                for name in shapes
                if name in self.parameters
            ),
            tensors=tuple(tensor[name] for name in operator.outputs),
        )

    def _resize(self, size: Size, times: int | Fraction) -> Size:
        if isinstance(times, int):
            return multiply_sizes(times, size)
        return ceil(times * size_value(size, self.setting.symbol_sizes))


def _position_matters(operator: Operator, labelled: OperatorLabels, label: str) -> bool:
    """Return whether the executed FLOPs of a part depend on its position: of queries with all keys."""
    keys = labelled.inputs[1] if len(labelled.inputs) > 1 else None
    return KINDS[operator.kind].executed_flops is not None and label not in (keys or ())


def _upper_envelope(lines: tuple[Line, Line]) -> Lines:
    """Return the lines that are the maximum somewhere in [0, 1]."""
    (a, b), (c, d) = lines
    if a >= c and a + b >= c + d:
        return (lines[0],)
    if c >= a and c + d >= a + b:
        return (lines[1],)
    return lines
