"""How each operator kind may be split: einsum-like labels, one file a kind (or a family of kinds).

A rule names every dimension of an operator's inputs and outputs that may be split with a label; dimensions that may
not carry None. Splitting one label l means: every operand that carries l is split there, G(dim of l), all others are
whole, I; an output that carries l is G, one that does not is a partial sum, P. So one table gives a linear layer its
three ways (rows or tokens, columns, contraction), attention its heads, cross-entropy its tokens (reference: HAP's
rules, and the label generator that subsumes them).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pipefit.errors import PlanError
from pipefit.model.graph import Operator, Shape, Size

Labels = tuple[str | None, ...]
"""One label per dimension; None where the dimension must stay whole."""


@dataclass(frozen=True, slots=True)
class DevicePart:
    """Where one device's part of a value lies: along which dimension, from which index, of how many.

    `start` is -1 for tokens and rows, whose number is only known at run time.
    """

    dim: int
    start: int
    total: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLabels:
    """The labels of one operator, in the order of its inputs and outputs; None for an absent optional input."""

    inputs: tuple[Labels | None, ...]
    outputs: tuple[Labels, ...]
    units: Mapping[str, int]
    "Labels that can only be cut at multiples: label -> how many units there are (groups of an attention)."
    once: tuple[int, ...] = ()
    "Inputs that are added to the output (a bias): with a partial output they are added after its reduction."
    linear: tuple[tuple[int, ...], ...] = ()
    "Sets of inputs in which the output is linear together: partial sums in all of a set, the rest whole, give a P."
    kinds: Mapping[str, str] = field(default_factory=dict)
    "Labels along which parts must know of each other -> the kind of operator that computes a part and talks inside."
    joint: Mapping[str, tuple[tuple[Labels | None, ...], tuple[Labels, ...]]] = field(default_factory=dict)
    "Labels with tables of their own (inputs, outputs), where dimensions are split together that are not one: tokens"
    " and experts. Each is cut in its own units; the last input's are the program's."
    local: Callable[[Mapping[str, Any], Shape, DevicePart], Mapping[str, Any]] | None = None
    "(attributes, local shape of output 0, its cut) -> attributes on one device, where they name sizes or places."
    addend: Callable[[Mapping[str, Any], DevicePart], Mapping[str, Any]] | None = None
    "The same where the output is a partial sum: (attributes, cut of the first input that is split)."

    def for_label(self, label: str | None) -> OperatorLabels:
        """The table that counts where this label is split."""
        if label is None or label not in self.joint:
            return self
        inputs, outputs = self.joint[label]
        return replace(self, inputs=inputs, outputs=outputs, local=None, addend=None)


Rule = Callable[[Operator, tuple[Shape | None, ...], tuple[Shape, ...]], OperatorLabels]
"""(operator, input shapes, output shapes) -> labels."""


@cache
def find_rules() -> Mapping[str, Rule]:
    """All kinds that have a rule, found by walking this package."""
    rules: dict[str, Rule] = {}
    for info in pkgutil.iter_modules(__path__):
        for kind, rule in importlib.import_module(f"{__name__}.{info.name}").RULES.items():
            assert kind not in rules, f"two rules for {kind!r}"
            rules[kind] = rule
    return rules


def labels_of(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    """The labels of one operator. Raises PlanError for a kind without a rule."""
    known = find_rules()
    if operator.kind not in known:
        raise PlanError(
            f"There is no rule for splitting the operator {operator.kind!r} over devices.",
            where=operator.source or "shard program",
            allowed=", ".join(sorted(known)),
            next_step="plan without a shard axis: --fix shards=1",
        )
    return known[operator.kind](operator, inputs, outputs)


def leading_labels(rank: int) -> Labels:
    """Labels of all dimensions but the last: rows, tokens, and what comes between."""
    return (*(f"d{i}" for i in range(rank - 1)), None)


def whole_labels(shape: Shape | None) -> Labels | None:
    """An input that is never split."""
    return None if shape is None else (None,) * len(shape)
