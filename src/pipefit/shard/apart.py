"""Whether a model treats rows apart: what it makes of a row must not depend on which rows are with it.

Rows of a step are spread over microbatches and replicas, so no operator may bring them together but the sums that end
in the loss. The rules for splitting operators say which dimensions do not see each other; rows are followed through
them. Tokens that change between a sequence and a packed row belong to one row before and after: the step plan's places
say so. Of functions without a rule it is believed that a dimension of rows that stays where it is holds the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pipefit.errors import PlanError
from pipefit.model.analysis.aten_splits import split_labels
from pipefit.model.graph import Graph, Model, Operator, Shape, Size, size_factors, size_value
from pipefit.shard.program import labels_at
from pipefit.shard.rules import OperatorLabels

ROWS = "B"

COUNTED: Mapping[str, int] = {ROWS: 1, "T": 7919}
"""For distances between rows: a prime that is no size of a model stands for the tokens."""


PACKED = ("I", "L")
"""Tokens of a packed row that meet a sequence: images of all rows of the microbatch, one behind the other."""


@dataclass(frozen=True, slots=True)
class RowIndependence:
    """A value that has rows: along one dimension, `inner` of its places a row."""

    dim: int
    inner: int = 1


@dataclass(frozen=True, slots=True)
class SummedRows:
    """A value that is a sum over rows."""


State = RowIndependence | SummedRows | None
"""None: the same whatever the rows are."""


class _MixedRows(Exception):
    """What an operator does with rows, in words."""


def check_row_independence(model: Model) -> None:
    """Raises PlanError for the first layer that brings rows together, or does not sum them for the loss."""
    for error in row_problems(model):
        raise error


def row_problems(model: Model) -> Iterator[PlanError]:
    """One for every distinct layer that brings rows together."""
    seen = set()
    for module in model.modules:
        for layer in module.layers:
            if layer.graph not in seen:
                seen.add(layer.graph)
                yield from _layer_problems(model.layer_graph(layer), f"layer {layer.name}")


def _layer_problems(graph: Graph, where: str) -> Iterator[PlanError]:
    shapes = {tensor.name: tensor.shape for tensor in (*graph.inputs, *graph.tensors)}
    shapes |= {spec.name: spec.shape for spec in graph.parameters}
    states: dict[str, State] = dict.fromkeys(shapes)
    states |= {tensor.name: RowIndependence(0) for tensor in graph.inputs if tensor.shape[:1] == (ROWS,)}
    for operator in graph.operators:
        try:
            state = _output_state(operator, shapes, [states[name] if name else None for name in operator.inputs])
        except _MixedRows as mixed:
            yield _mixing_error(str(mixed), f"{where}, {operator.source}" if operator.source else where)
            return
        states |= dict.fromkeys(operator.outputs, state)
    for name in graph.outputs:
        if states[name] is None and shapes[name][1:2] in [(symbol,) for symbol in PACKED]:
            continue
        wanted: State = RowIndependence(0) if shapes[name] else SummedRows()
        if states[name] != wanted:
            what = "hands on what has no rows in front" if shapes[name] else "a loss that is no sum over rows"
            yield _mixing_error(f"{what}: {shapes[name]}" if shapes[name] else what, where)


def _output_state(operator: Operator, shapes: Mapping[str, Shape], states: Sequence[State]) -> State:
    """What an operator makes of values with these states. Raises _Mixed where rows come together."""
    name = operator.attributes.get("target", operator.kind)
    out = shapes[operator.outputs[0]]
    _refuse_counts(operator, name)
    rows = {index: state for index, state in enumerate(states) if isinstance(state, RowIndependence)}
    sums = {index for index, state in enumerate(states) if isinstance(state, SummedRows)}
    if not (rows or sums) or str(name).startswith("aten.new_"):  # of these only the type of the value is read
        return RowIndependence(out.index(ROWS)) if ROWS in out else None
    if operator.kind in ("put_tokens", "take_tokens"):
        return states[0] if operator.kind == "put_tokens" else None
    labelled = labels_at(shapes, operator)
    if sums:
        if operator.kind != "cast" and (rows or sums not in [{*linear_set} for linear_set in labelled.linear]):
            raise _MixedRows(f"{name} of a sum over rows, which is no sum of what it makes of each")
        return SummedRows()
    if operator.kind == "reshape":
        return _reshaped_state(shapes[operator.inputs[0]], rows[0], out)
    if _is_unknown(operator, shapes):
        if 0 in rows and rows[0].dim in _seen_along(operator, len(shapes[operator.inputs[0]])):
            raise _MixedRows(
                f"{name} that brings rows together: {', '.join(str(shapes[n]) for n in operator.inputs if n)}"
            )
        return _assumed_state(name, out, [*rows.values()])
    labels = {(labelled.inputs[index] or ())[state.dim] for index, state in rows.items()}
    mixing = {None, *labelled.kinds}  # along labels with a kind of their own parts must know of each other
    if len(labels) > 1 or labels & mixing or len({state.inner for state in rows.values()}) > 1:
        raise _MixedRows(f"{name} that brings rows together: {', '.join(str(shapes[n]) for n in operator.inputs if n)}")
    label, inner = labels.pop(), next(iter(rows.values())).inner
    return _rows_along(operator, labelled, label, inner, name)


def _rows_along(operator: Operator, labelled: OperatorLabels, label: str | None, inner: int, name: Any) -> State:
    """Rows lie along this label."""
    if label in labelled.outputs[0]:
        return RowIndependence(labelled.outputs[0].index(label), inner)
    if any(operator.inputs[index] for index in labelled.once):
        raise _MixedRows(f"{name} that adds a bias to a sum over rows")
    return SummedRows()


def _refuse_counts(operator: Operator, name: Any) -> None:
    """The number of rows is another one in every microbatch; sizes, in lists, may have it."""
    values = (*operator.attributes.get("arguments", ()), *operator.attributes.get("keywords", {}).values())
    for item in values:
        if isinstance(item, dict) and ROWS in size_factors(str(item.get("size", "")))[1]:
            raise _MixedRows(f"{name} with the number of rows")


ALONG: Mapping[str, int] = {
    **dict.fromkeys(("argsort", "cummax", "cummin", "diff", "gather", "index_add", "index_copy", "index_fill",
                     "index_select", "logcumsumexp", "median", "mode", "nanmedian", "scatter", "scatter_add",
                     "scatter_reduce", "unfold"), 1),
    "kthvalue": 2, "roll": 2,
}  # fmt: skip
"""Functions without a rule that work along dimensions of their first value -> the argument that says which."""


def _seen_along(operator: Operator, rank: int) -> frozenset[int]:
    """Dimensions of its first value along which a function without a rule is known to bring elements together."""
    arguments, keywords = operator.attributes.get("arguments", ()), operator.attributes.get("keywords", {})
    function = str(operator.attributes.get("target", "")).split(".")[1:2]
    if function in (["index"], ["index_put"]):
        return frozenset(index for index, item in enumerate(arguments[1]) if item is not None)
    if function in (["tril"], ["triu"]):
        return frozenset((rank - 2, rank - 1))
    if function in (["take"], ["put"]):
        return frozenset(range(rank))
    if not function or function[0] not in ALONG:
        return frozenset()
    index = ALONG[function[0]]
    dims = arguments[index] if len(arguments) > index else keywords.get("dim", keywords.get("dims"))
    if dims is None or dims == [] or isinstance(dims, dict):  # all of them, or the last
        return frozenset((rank - 1,) if function == ["argsort"] else range(rank))
    return frozenset(dim % rank for dim in ([dims] if isinstance(dims, int) else dims))


def _is_unknown(operator: Operator, shapes: Mapping[str, Shape]) -> bool:
    if operator.kind == "aten":
        return split_labels(operator.attributes, [shapes[name] for name in operator.inputs if name]) is None
    return operator.kind == "opaque"


def _assumed_state(name: Any, out: Shape, rows: Sequence[RowIndependence]) -> State:
    """Of a function that nothing is known of: rows stay where they are, or all of them are in a loss."""
    if not out and name == "opaque":
        return SummedRows()
    (first, *rest) = {*rows}
    if rest or first.inner != 1 or first.dim >= len(out) or out[first.dim] != ROWS:
        raise _MixedRows(f"{name}, of which nothing is known, and whose result {out} has no rows where they were")
    return first


def _reshaped_state(before: Shape, state: RowIndependence, after: Shape) -> State:
    """Rows stay equally far apart in memory; a dimension that goes with them in steps of that distance has them."""

    def counted_size(of: Size) -> int:
        return size_value(of, COUNTED)

    distance = state.inner * prod(map(counted_size, before[state.dim + 1 :]))
    for dim, extent in enumerate(after):
        behind = prod(map(counted_size, after[dim + 1 :]))
        if (
            ROWS in size_factors(str(extent))[1]
            and distance % behind == 0
            and counted_size(extent) % (distance // behind) == 0
        ):
            return RowIndependence(dim, distance // behind)
    raise _MixedRows(f"reshape of {before} to {after}, which takes rows apart")


def _mixing_error(seen: str, where: str) -> PlanError:
    return PlanError(
        "The model brings rows together: what it makes of a row would depend on the microbatch that the row is in.",
        where=where,
        seen=seen,
        allowed="rows that do not see each other, and a loss that is a sum over them",
        next_step="leave it out; the mean of a loss is written cross_entropy(...) or mse_loss(...) (docs/models.md)",
    )
