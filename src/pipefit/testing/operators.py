"""The conformance suite of an operator; `check_operator` runs all of it.

The checks execute an `OperatorExample` as the runtime does, alone and split over three devices, and compare results and
gradients with plain PyTorch in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from pipefit.model.ops import OperatorKind, register_operator
from pipefit.model.ops.table import remove_operator
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.run.stage_inputs import StageInputs
from pipefit.testing.labelled import call_labelled, require
from pipefit.testing.operator_example import (
    INTEGER_ROLES,
    ROWS,
    TOKENS,
    OperatorExample,
    as_leaves,
    draw_output_gradient,
)
from pipefit.testing.operator_facts import check_operator_facts, check_operator_module, check_operator_types
from pipefit.testing.operator_splits import check_operator_split, check_operator_sums

__all__ = [
    "OperatorExample",
    "check_operator",
    "check_operator_facts",
    "check_operator_gradients",
    "check_operator_module",
    "check_operator_split",
    "check_operator_sums",
    "check_operator_types",
    "temporary_operator",
]

Mode = Literal["B", "IW"]
"""One backward action, or the gradients of inputs and of weights apart."""

CheckedRecompute = Literal["none", "selective"]


@contextmanager
def temporary_operator(kind: OperatorKind, *, rule: Callable[..., Any], builder: str) -> Iterator[OperatorKind]:
    """Register an operator within a `with` block. Raises ModelError for a name that another kind has."""
    register_operator(kind, rule=rule, builder=builder)
    try:
        yield kind
    finally:
        remove_operator(kind.kind)


def check_operator(example: OperatorExample) -> None:
    """Raise AssertionError if an operator violates a check of this module. The operator must be registered."""
    check_operator_types(example)
    check_operator_facts(example)
    check_operator_module(example)
    for mode in ("B", "IW"):
        for recompute in ("none", "selective"):
            check_operator_gradients(example, mode, recompute)
    for label in example.split_labels():
        check_operator_split(example, label)
    for number in range(len(example.find_labels()[1].linear)):
        check_operator_sums(example, number)


def check_operator_gradients(
    example: OperatorExample, mode: Mode = "B", recompute: CheckedRecompute = "none", tolerance: float = 1e-12
) -> None:
    """Raise AssertionError unless the result and all gradients are those of the reference, up to `tolerance` of the
    largest element."""
    result, gradients = _run_stage(example, mode, recompute)
    expected, expected_gradients = _run_reference(example)
    assert result.shape == expected.shape, f"{example.id}: result {result.shape}, reference {expected.shape}"
    _check_near(result, expected, tolerance, f"{example.id}: result")
    assert set(gradients) == set(expected_gradients), f"{example.id}: gradients of {sorted(gradients)}"
    for name, value in expected_gradients.items():
        _check_near(gradients[name], value, tolerance, f"{example.id}: gradient of {name}")


def _check_near(value: Tensor, expected: Tensor, tolerance: float, subject: str) -> None:
    error = (value - expected).abs().max()
    assert error <= tolerance * expected.abs().max(), f"{subject} is off by {float(error):.2g}"


def _run_stage(example: OperatorExample, mode: Mode, recompute: CheckedRecompute) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result and the gradients by input name of a stage of one layer."""
    graph, values = example.make_graph(), example.draw_values()
    layer = StageLayer("layer", graph, {name: name for name in example.parameters})
    program = StageProgram([layer], StageSetup(recompute=recompute, dtype=torch.float64))
    buffers = {name: torch.zeros_like(parameter.data) for name, parameter in program.parameters.items()}
    for name, parameter in program.parameters.items():
        value = values[name]
        assert value is not None
        parameter.data.copy_(value)
    program.bind_gradients(buffers)
    program.begin_step(0, 1)
    fed = {tensor.name: values[tensor.name] for tensor in graph.inputs if tensor.role in INTEGER_ROLES}
    data = {tensor.name: values[tensor.name] for tensor in graph.inputs if tensor.role == "data"}
    feed = StageInputs(**fed, data=data, rows=torch.arange(ROWS))
    if feed.positions is None:
        feed.positions = torch.arange(TOKENS).expand(ROWS, TOKENS).contiguous()
    activations = [tensor.name for tensor in graph.inputs if tensor.role == "activation"]
    inputs = {"" if index == 0 else name: values[name] for index, name in enumerate(activations)}
    outputs = program.forward(0, 0, inputs, feed)
    result = outputs["" if "" in outputs else "loss"]
    backward = program.backward if mode == "B" else program.backward_input
    gradients = backward(0, 0, {"": draw_output_gradient(result.shape)})
    if mode == "IW":
        program.backward_weight(0, 0)
    return result, {**{name or activations[0]: value for name, value in gradients.items()}, **buffers}


def _run_reference(example: OperatorExample) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = as_leaves(example.draw_values())
    result = call_labelled(f"{example.id}: reference", example.reference, *leaves.values())
    require(isinstance(result, Tensor), f"{example.id}: the reference returns {type(result).__name__}, not a tensor")
    result.backward(draw_output_gradient(result.shape))
    gradients = {}
    for name, leaf in leaves.items():
        if leaf is not None and leaf.requires_grad:
            assert leaf.grad is not None, f"{example.id}: the reference has no gradient of {name}"
            gradients[name] = leaf.grad
    return result.detach(), gradients
