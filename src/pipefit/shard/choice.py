"""The words in which programs are chosen: how a value is held, what converts it, how an operator is computed."""

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
"""Dimensions along which the residual stream is split by sequence parallelism: tokens, and those of packed rows."""

CONVERSIONS: Mapping[tuple[str, str], str] = {
    ("G", "I"): "all_gather",
    ("P", "I"): "all_reduce",
    ("P", "G"): "reduce_scatter",
    ("I", "G"): "shard_slice",
    ("G", "G"): "all_to_all",
}
"""The operator that brings a value from one kind of form to another. A parameter that is stored G is brought to I by
`unshard`."""


@dataclass(frozen=True, slots=True)
class HeldForm:
    """How a value lies over the shard axis: its form, and for G in how many units its dimension is cut."""

    form: TensorForm = IDENTITY
    units: int = 0
    "0 for tokens and rows, whose number is only known at run time."
    shares: tuple[int, ...] = ()
    "Of a hidden state that is cut by others than the program's, because a layer before or behind has its own."


WHOLE = HeldForm()


@dataclass(frozen=True, slots=True)
class FormConversion:
    """Bring a value from one form that it is held in to another."""

    name: str
    source: HeldForm
    target: HeldForm
    how: str = ""
    "How uneven parts are moved: lowerings (`cost/comm/lowerings.py`), forward and backward."


@dataclass(frozen=True, slots=True)
class OperatorChoice:
    """How one operator is computed: split along a label, passing partial sums on, or (neither) whole everywhere."""

    label: str | None = None
    units: int = 0
    "In so many units; 0: as many as the dimension has."
    linear: int = -1
    "Pass partial sums on: index into the operator's linear sets."
    settle: TensorForm | None = None
    "What a partial result is reduced to at once; P: it stays as it is; None: the form of the residual stream."
    how: str = ""
    "How that moves uneven parts."
    factors: bool = False
    "Of a linear layer that is split along rows or tokens: everyone computes all of the weight's gradient."
    before: tuple[FormConversion, ...] = ()
    "Conversions of inputs in front of the operator. What they do not give is converted the shortest way."


Chooser = Callable[[int, Operator, OperatorLabels, Mapping[str, HeldForm]], OperatorChoice | None]
"""(place, operator, its labels, how its inputs lie) -> the choice; None to compute it whole on every device."""
