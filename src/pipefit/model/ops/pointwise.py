"""Pointwise kinds of one or two inputs. Each saves the tensors that its derivative is written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pipefit.model.graph import Operator, Shape, broadcast_shapes
from pipefit.model.ops.kind import OperatorKind, same_shape, save_input, save_output


def _binary_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    a = inputs[0]
    assert a is not None
    b = inputs[1] if len(inputs) > 1 else None
    return (a if b is None else broadcast_shapes(a, b),)


def _save_for_mul(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    a, b = operator.inputs
    if not b:
        return ()
    return tuple(operand for operand, partner in ((a, b), (b, a)) if needs_gradient(partner))


def _save_for_div(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    a, b = operator.inputs
    if not b:
        return ()
    return (a, b) if needs_gradient(b) else (b,)


def _binary_kind(kind: str, summary: str, saves: Callable[..., tuple[str, ...]] | None = None) -> OperatorKind:
    attributes = {"scalar": "the second operand where input b is absent"}
    if saves is None:
        return OperatorKind(
            kind=kind, summary=summary, inputs=("a", "b?"), attributes=attributes, shapes=_binary_shapes
        )
    return OperatorKind(
        kind=kind, summary=summary, inputs=("a", "b?"), attributes=attributes, shapes=_binary_shapes, saves=saves
    )


def _added_scalar(attributes: Mapping[str, Any]) -> float | None:
    return attributes.get("scalar")


def _unary_kind(
    kind: str, summary: str, saves: Callable[..., tuple[str, ...]] | None, attributes: Mapping[str, str] | None = None
) -> OperatorKind:
    if saves is None:
        return OperatorKind(kind=kind, summary=summary, inputs=("x",), attributes=attributes or {}, shapes=same_shape)
    return OperatorKind(
        kind=kind, summary=summary, inputs=("x",), attributes=attributes or {}, shapes=same_shape, saves=saves
    )


OPERATORS = (
    replace(_binary_kind("add", "a + b, or a + scalar; broadcasts."), added_number=_added_scalar),
    _binary_kind("sub", "a - b, or a - scalar; broadcasts."),
    replace(_binary_kind("mul", "a * b, or a * scalar; broadcasts.", _save_for_mul), multiplies=True),
    _binary_kind("div", "a / b, or a / scalar; broadcasts.", _save_for_div),
    _unary_kind("silu", "x * sigmoid(x).", save_input),
    _unary_kind("gelu", "Gaussian error linear unit.", save_input, {"approximate": "`none` or `tanh`"}),
    _unary_kind("relu", "max(x, 0).", save_output),
    _unary_kind("sigmoid", "1 / (1 + exp(-x)).", save_output),
    _unary_kind("tanh", "Hyperbolic tangent.", save_output),
    _unary_kind("exp", "e to the x.", save_output),
    _unary_kind("rsqrt", "1 / sqrt(x).", save_output),
    _unary_kind("neg", "-x.", None),
)
