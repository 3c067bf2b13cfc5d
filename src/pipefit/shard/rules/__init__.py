"""Splitting rules per operator kind: einsum-like labels, one file per kind or family of kinds.

A rule gives a label to every dimension of an operator's inputs and outputs that may be split, and None to the others.
Splitting a label l means: every operand with l is sharded there, G(dim of l), and all others are replicated, I. An
output with l is G, an output without it is a partial sum, P. One table thus gives a linear layer its three splits (rows
or tokens, columns, contraction), attention its heads, cross-entropy its tokens (reference: HAP's rules, and the label
generator that subsumes them).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pipefit.errors import PlanError
from pipefit.model.analysis.aten_splits import Labels as Labels
from pipefit.model.graph import Operator, Shape, Size
from pipefit.model.ops.table import PLUGINS


@dataclass(frozen=True, slots=True)
class DevicePart:
    """The part of a value on one device: the split dimension, its first index there, and its full size.

    `start` is -1 for tokens and rows, whose number is known only at run time.
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
    "Labels that can be cut only at multiples: label -> number of units (groups of an attention)."
    once: tuple[int, ...] = ()
    "Inputs added to the output (a bias); with a partial output they are added after its reduction."
    linear: tuple[tuple[int, ...], ...] = ()
    "Sets of inputs in which the output is jointly linear: if all of a set are P and the rest I, the output is P."
    kinds: Mapping[str, str] = field(default_factory=dict)
    "Labels with dependent parts -> the operator kind that computes a part with collectives inside."
    joint: Mapping[str, tuple[tuple[Labels | None, ...], tuple[Labels, ...]]] = field(default_factory=dict)
    """Labels with their own tables (inputs, outputs), where different dimensions are split together: tokens and
    experts. Each is cut in its own units; the units of the last input are the program's."""
    local: Callable[[Mapping[str, Any], Shape, DevicePart], Mapping[str, Any]] | None = None
    "(attributes, local shape of output 0, its cut) -> attributes on one device, if they contain sizes or positions."
    addend: Callable[[Mapping[str, Any], DevicePart], Mapping[str, Any]] | None = None
    "The same for an output that is a partial sum: (attributes, cut of the first split input)."

    def for_label(self, label: str | None) -> OperatorLabels:
        """Return the table that applies if this label is split."""
        if label is None or label not in self.joint:
            return self
        inputs, outputs = self.joint[label]
        return replace(self, inputs=inputs, outputs=outputs, local=None, addend=None)


Rule = Callable[[Operator, tuple[Shape | None, ...], tuple[Shape, ...]], OperatorLabels]
"""(operator, input shapes, output shapes) -> labels."""


@cache
def find_rules() -> Mapping[str, Rule]:
    """Return the rules of the built-in operator kinds, found by walking this package."""
    rules: dict[str, Rule] = {}
    for info in pkgutil.iter_modules(__path__):
        for kind, rule in importlib.import_module(f"{__name__}.{info.name}").RULES.items():
            assert kind not in rules, f"two rules for {kind!r}"
            rules[kind] = rule
    return rules


def labels_of(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    """Return the labels of one operator. Raises PlanError for a kind without a rule."""
    rule = find_rules().get(operator.kind)
    if rule is None and operator.kind in PLUGINS:
        rule = PLUGINS[operator.kind].rule
    if rule is None:
        raise PlanError(
            f"There is no rule for splitting the operator {operator.kind!r} over devices.",
            where=operator.source or "shard program",
            allowed=", ".join(sorted((*find_rules(), *PLUGINS))),
            next_step="plan without a shard axis: --fix shards=1",
        )
    return rule(operator, inputs, outputs)


def leading_labels(rank: int) -> Labels:
    """Return labels for all dimensions but the last: rows, tokens, and dimensions between."""
    return (*(f"d{i}" for i in range(rank - 1)), None)


def whole_labels(shape: Shape | None) -> Labels | None:
    """Return the labels of an input that is never split."""
    return None if shape is None else (None,) * len(shape)
