"""The linear layers of a graph that Megatron splits by columns."""

from __future__ import annotations

from collections.abc import Iterable

from pipefit.model.graph import Graph, Operator, shapes_of
from pipefit.model.ops import KINDS
from pipefit.shard.choice import TOKENS
from pipefit.shard.program import labels_at


def column_linears(graph: Graph, split_output: bool = False) -> dict[int, int]:
    """Return the column-parallel linear layers: index of the operator -> number of units of its columns.

    They are the layers whose result reaches only linear layers, attention and a cross-entropy, through operators that
    do not mix features. With `split_output` the result may also be the output of the graph (logits). The inner factor
    of a low-rank product is not among them: its few features are cheaper to sum or to gather than its input.
    """
    uses = _FeatureUses(graph, split_output)
    columns = {}
    for index, operator in enumerate(graph.operators):
        label = KINDS[operator.kind].column_label
        if label and not uses.is_inner_factor(operator):
            last = labels_at(uses.shapes, operator).outputs[0].index(label)
            units = uses.units_downstream(operator.outputs[0], last)
            if units:
                columns[index] = units
    return columns


def units_downstream(graph: Graph, name: str, dim: int) -> int:
    """Return the number of units into which all uses allow dimension `dim` of `name` to be cut, or 0 if none."""
    return _FeatureUses(graph, split_output=False).units_downstream(name, dim)


class _FeatureUses:
    """The operators that read each value of a graph."""

    def __init__(self, graph: Graph, split_output: bool) -> None:
        self.graph, self.split_output = graph, split_output
        self.shapes = shapes_of(graph)
        self.consumers: dict[str, list[int]] = {}
        for index, operator in enumerate(graph.operators):
            for name in operator.inputs:
                self.consumers.setdefault(name, []).append(index)

    def is_inner_factor(self, operator: Operator) -> bool:
        """Return whether a linear layer makes fewer features than it takes, for layers that make more of them."""
        narrow, name = self._feature_ratio(operator) < 1, operator.outputs[0]
        readers = [self.graph.operators[index] for index in self.consumers.get(name, [])]
        if len(readers) == 1 and KINDS[readers[0].kind].multiplies and not any(readers[0].inputs[1:]):
            readers = [self.graph.operators[index] for index in self.consumers.get(readers[0].outputs[0], [])]
        return narrow and bool(readers) and all(self._feature_ratio(reader) > 1 for reader in readers)

    def _feature_ratio(self, operator: Operator) -> float:
        """Return the features that a linear layer makes for one that it takes; 1 for other operators."""
        if not KINDS[operator.kind].is_linear:
            return 1.0
        rows, columns = self.shapes[operator.inputs[1]]
        return float(rows) / float(columns)

    def units_downstream(self, name: str, dim: int) -> int:
        size = self.shapes[name][dim]
        if size == TOKENS:
            return 0
        result = 0
        if name in self.graph.outputs:
            if not self.split_output or not isinstance(size, int):
                return 0
            result = size
        for index in self.consumers.get(name, []):
            units = self._units_in(index, name, dim)
            if units == 0 or (result and units != result):
                return 0
            result = units
        return result

    def _units_in(self, index: int, name: str, dim: int) -> int:
        """Return the units that one reader of `name` allows, with everything behind it."""
        operator = self.graph.operators[index]
        labelled = labels_at(self.shapes, operator)
        labels = labelled.inputs[operator.inputs.index(name)]
        label = None if labels is None else labels[dim]
        # a norm would need a collective
        if label is None or (label in labelled.kinds and label in labelled.outputs[0]):
            return 0
        partners = [
            o
            for o, operand_labels in zip(operator.inputs, labelled.inputs, strict=True)
            if operand_labels and label in operand_labels
        ]
        passes = label in labelled.outputs[0]
        if passes and self._come_from_whole(partner for partner in partners if partner != name):
            return 0
        if passes and not KINDS[operator.kind].is_attention:
            return self.units_downstream(operator.outputs[0], labelled.outputs[0].index(label))
        size = self.shapes[name][dim]
        return labelled.units.get(label, size if isinstance(size, int) else 0)

    def _come_from_whole(self, names: Iterable[str]) -> bool:
        """Return whether one of the values comes from a full one (hidden state, norm result) without a product or
        attention."""
        return any(map(self._made_from_whole, names))

    def _made_from_whole(self, name: str) -> bool:
        graph = self.graph
        maker = next((operator for operator in graph.operators if name in operator.outputs), None)
        if maker is None or KINDS[maker.kind].is_norm:
            return maker is not None or any(
                tensor.name == name and tensor.role == "activation" for tensor in graph.inputs
            )
        if KINDS[maker.kind].makes_features:
            return False
        return self._come_from_whole(input_name for input_name in maker.inputs if input_name)
