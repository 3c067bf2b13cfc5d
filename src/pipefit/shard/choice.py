"""The vocabulary of shard programs: the form of a value, conversions between forms, and the choice for an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipefit.layout import IDENTITY, TensorForm
from pipefit.model.graph import LOCAL as LOCAL
from pipefit.model.graph import Operator, Size
from pipefit.shard.rules import OperatorLabels

TOKENS: Size = "T"
ROWS: Size = "B"
SEQUENCES: tuple[Size, ...] = (TOKENS, "I", "L")
"""Dimensions along which sequence parallelism splits the residual stream: tokens, and those of packed rows."""

CONVERSIONS: Mapping[tuple[str, str], str] = {
    ("G", "I"): "all_gather",
    ("P", "I"): "all_reduce",
    ("P", "G"): "reduce_scatter",
    ("I", "G"): "shard_slice",
    ("G", "G"): "all_to_all",
}
"""(source form, target form) -> the operator that converts a value. A parameter stored as G becomes I by `unshard`."""


@dataclass(frozen=True, slots=True)
class HeldForm:
    """The layout of a value over the shard axis: its form, and for G the number of units of its dimension."""

    form: TensorForm = IDENTITY
    units: int = 0
    "0 for tokens and rows, whose number is known only at run time."
    shares: tuple[int, ...] = ()
    "Shares of a hidden state that differ from the program's, because a neighbouring layer has its own shares."


REPLICATED_HELD = HeldForm()


@dataclass(frozen=True, slots=True)
class FormConversion:
    """The conversion of a value from a form in which it is held to another form."""

    name: str
    source: HeldForm
    target: HeldForm
    how: str = ""
    "Lowerings of uneven parts (`cost/comm/lowerings.py`), forward and backward."


@dataclass(frozen=True, slots=True)
class OperatorChoice:
    """The computation of one operator: split along a label, passing partial sums on, or (neither) replicated."""

    label: str | None = None
    units: int = 0
    "Number of units of the split; 0: the size of the dimension."
    linear: int = -1
    "Index into the operator's linear sets, if partial sums pass through; else -1."
    settle: TensorForm | None = None
    "Form to which a partial result is reduced at once; P: not reduced; None: the form of the residual stream."
    how: str = ""
    "Lowerings of that reduction for uneven parts."
    factors: bool = False
    "For a linear layer split along rows or tokens: every device computes the full weight gradient."
    before: tuple[FormConversion, ...] = ()
    "Conversions of inputs before the operator. Other inputs are converted by the shortest path."


Chooser = Callable[[int, Operator, OperatorLabels, Mapping[str, HeldForm]], OperatorChoice | None]
"""(index, operator, its labels, forms of its inputs) -> the choice; None: the operator is replicated."""


def split_along(labelled: OperatorLabels, dim: int) -> OperatorChoice | None:
    """Return the choice that splits an operator along this dimension of its result, or None if it cannot be."""
    label = f"d{dim}"
    return OperatorChoice(label) if label in labelled.outputs[0] else None


def follow_split(operator: Operator, labelled: OperatorLabels, held: Mapping[str, HeldForm]) -> OperatorChoice | None:
    """Return the choice that keeps the split of the first split input, or None if the operator cannot be split there.

    A linear layer with its input split along features becomes row-parallel by this rule.
    """
    for name, labels in zip(operator.inputs, labelled.inputs, strict=True):
        if name and labels is not None and held[name].form.kind == "G":
            dim = held[name].form.dim
            assert dim is not None
            label = labels[dim]
            if label is not None:
                return OperatorChoice(label, held[name].units)
    return None
