"""A check that a model treats rows independently: the result of a row must not depend on the other rows.

The rows of a step are distributed over microbatches and replicas, so no operator may mix them, except the sums that end
in the loss. The rules for splitting operators say which dimensions are independent; rows are followed through them.
Tokens that move between a sequence and a packed row stay in one row: the step plan guarantees it. For a function
without a rule, a dimension of rows that stays in place is assumed to hold the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

from pipefit.errors import PlanError
from pipefit.model.analysis.aten_splits import split_labels
from pipefit.model.graph import Graph, Model, Operator, Shape, Size, shapes_of, size_factors, size_value
from pipefit.model.ops import KINDS
from pipefit.shard.program import labels_at
from pipefit.shard.rules import OperatorLabels

ROWS = "B"

COUNTED: Mapping[str, int] = {ROWS: 1, "T": 7919}
"""Sizes to measure distances between rows; the tokens get a prime that is no size of a model."""


PACKED = ("I", "L")
"""Dimensions of packed-row tokens that meet a sequence: consecutive images of all rows of the microbatch."""


@dataclass(frozen=True, slots=True)
class RowIndependence:
    """A value with rows along one dimension; each row occupies `inner` consecutive indices."""

    dim: int
    inner: int = 1


@dataclass(frozen=True, slots=True)
class SummedRows:
    """A value that is a sum over rows."""


State = RowIndependence | SummedRows | None
"""None: the value is the same for all rows."""


class _MixedRows(Exception):
    """Description of how an operator mixes rows."""


def check_row_independence(model: Model) -> None:
    """Raise PlanError for the first layer that mixes rows or does not sum them for the loss."""
    for error in row_problems(model):
        raise error


def row_problems(model: Model) -> Iterator[PlanError]:
    """Yield one error for every distinct layer that mixes rows."""
    seen = set()
    for module in model.modules:
        for layer in module.layers:
            if layer.graph not in seen:
                seen.add(layer.graph)
                yield from _layer_problems(model.layer_graph(layer), f"layer {layer.name}")


def _layer_problems(graph: Graph, where: str) -> Iterator[PlanError]:
    shapes = shapes_of(graph)
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
            what = "an output without leading rows" if shapes[name] else "a loss that is not a sum over rows"
            yield _mixing_error(f"{what}: {shapes[name]}" if shapes[name] else what, where)


def _output_state(operator: Operator, shapes: Mapping[str, Shape], states: Sequence[State]) -> State:
    """Return the state of an operator's output for these input states. Raises _MixedRows if rows are mixed."""
    name = operator.attributes.get("target", operator.kind)
    out = shapes[operator.outputs[0]]
    _refuse_counts(operator, name)
    rows = {index: state for index, state in enumerate(states) if isinstance(state, RowIndependence)}
    sums = {index for index, state in enumerate(states) if isinstance(state, SummedRows)}
    if not (rows or sums) or str(name).startswith("aten.new_"):  # these read only the type of the value
        return RowIndependence(out.index(ROWS)) if ROWS in out else None
    if KINDS[operator.kind].moves_tokens:
        return states[0] if ROWS in out else None
    labelled = labels_at(shapes, operator)
    if sums:
        if operator.kind != "cast" and (rows or sums not in [{*linear_set} for linear_set in labelled.linear]):
            raise _MixedRows(f"{name} of a sum over rows, which is not a sum of its results for each row")
        return SummedRows()
    if operator.kind == "reshape":
        return _reshaped_state(shapes[operator.inputs[0]], rows[0], out)
    if _is_unknown(operator, shapes):
        if 0 in rows and rows[0].dim in _seen_along(operator, len(shapes[operator.inputs[0]])):
            raise _MixedRows(f"{name} that mixes rows: {', '.join(str(shapes[n]) for n in operator.inputs if n)}")
        return _assumed_state(name, out, {(state, shapes[operator.inputs[i]][state.dim]) for i, state in rows.items()})
    labels = {(labelled.inputs[index] or ())[state.dim] for index, state in rows.items()}
    mixing = {None, *labelled.kinds}  # labels with their own kind need collectives
    if len(labels) > 1 or labels & mixing or len({state.inner for state in rows.values()}) > 1:
        raise _MixedRows(f"{name} that mixes rows: {', '.join(str(shapes[n]) for n in operator.inputs if n)}")
    label, inner = labels.pop(), next(iter(rows.values())).inner
    return _rows_along(operator, labelled, label, inner, name)


def _rows_along(operator: Operator, labelled: OperatorLabels, label: str | None, inner: int, name: Any) -> State:
    """Return the state of the output if rows lie along this label."""
    if label in labelled.outputs[0]:
        return RowIndependence(labelled.outputs[0].index(label), inner)
    if any(operator.inputs[index] for index in labelled.once):
        raise _MixedRows(f"{name} that adds a bias to a sum over rows")
    return SummedRows()


def _refuse_counts(operator: Operator, name: Any) -> None:
    """Raise _MixedRows if an argument is the number of rows, which differs per microbatch; sizes in lists may contain
    it.
    """
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
"""Functions without a rule that work along dimensions of their first input -> index of the dimension argument."""


def _seen_along(operator: Operator, rank: int) -> frozenset[int]:
    """Return the dimensions of the first input along which a function without a rule is known to mix elements."""
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
    if dims is None or dims == [] or isinstance(dims, dict):  # all dimensions, or the last one
        return frozenset((rank - 1,) if function == ["argsort"] else range(rank))
    return frozenset(dim % rank for dim in ([dims] if isinstance(dims, int) else dims))


def _is_unknown(operator: Operator, shapes: Mapping[str, Shape]) -> bool:
    if operator.kind == "aten":
        return split_labels(operator.attributes, [shapes[name] for name in operator.inputs if name]) is None
    return KINDS[operator.kind].is_module


def _assumed_state(name: Any, out: Shape, rows: Set[tuple[RowIndependence, Size]]) -> State:
    """Return the assumed state for an unknown function: rows stay in place, or all are summed in a loss. `rows` holds
    the states of its inputs, with the sizes of their dimensions of rows."""
    if not out and name == "opaque":
        return SummedRows()
    ((first, size), *rest) = rows
    if rest or first.dim >= len(out) or out[first.dim] != size:
        raise _MixedRows(f"{name}, an unknown function, whose result {out} does not have the rows in the same place")
    return first


def _reshaped_state(before: Shape, state: RowIndependence, after: Shape) -> State:
    """Return the state after a reshape.

    Rows keep their distance in memory; the new row dimension contains the rows in steps of that distance.
    """

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
    raise _MixedRows(f"reshape of {before} to {after}, which splits rows")


def _mixing_error(seen: str, where: str) -> PlanError:
    return PlanError(
        "The model mixes rows: the result for a row would depend on the other rows of its microbatch.",
        where=where,
        seen=seen,
        allowed="independent rows, and a loss that is a sum over rows",
        next_step="remove it; write the mean of a loss as cross_entropy(...) or mse_loss(...) "
        "(docs/reference/models.md)",
    )
