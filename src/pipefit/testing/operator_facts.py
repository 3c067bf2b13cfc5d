"""The facts that an operator states, against its execution: types, shapes, attributes, saved bytes, and its module.

The planner and the runtime trust these facts. Autograd's saved tensors are counted in float64, without
recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.model.capture.operator_modules import check_operator_module_fields
from pipefit.model.graph import Operator
from pipefit.model.ops import KINDS
from pipefit.model.ops.kind import Flops, OperatorCall
from pipefit.shard.rules import OperatorLabels
from pipefit.testing.labelled import call_labelled, require
from pipefit.testing.operator_example import SYMBOLS, OperatorExample, as_leaves, draw_output_gradient, numeric_sizes
from pipefit.testing.operator_splits import execute_unsplit

CONSTANT_BYTES = 64
"""Saved bytes that need no statement: a few constants."""

ITEM_BYTES = 8
"""Bytes of a float64 or int64 element."""


class _RecordedAttributes(dict[str, Any]):
    """Attributes that record the names that must be there. A read with a default is a fact of the runtime's own."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        super().__init__(attributes)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


def check_operator_types(example: OperatorExample) -> None:
    """Raise AssertionError unless the functions of the kind and its rule take and return values of the right types."""
    kind, inputs = example.find_kind(), tuple(example.inputs.values())
    shapes = call_labelled(f"{example.id}: shapes", kind.shapes, inputs, example.attributes)
    sizes = isinstance(shapes, tuple) and all(
        isinstance(shape, tuple) and all(isinstance(size, (int, str)) for size in shape) for shape in shapes
    )
    require(sizes, f"{example.id}: shapes returns {shapes!r}, not a tuple of shapes")
    operator = example.make_graph().operators[0]
    names = call_labelled(f"{example.id}: saves", kind.saves, operator, lambda name: True)
    known = {*operator.inputs, *operator.outputs}
    require(isinstance(names, tuple), f"{example.id}: saves returns {names!r}, not a tuple of names")
    require({*names} <= known, f"{example.id}: saves returns {names!r}, not names of {', '.join(sorted(known))}")
    call = _numeric_call(example)
    flops = call_labelled(f"{example.id}: flops", kind.flops, call)
    require(isinstance(flops, Flops), f"{example.id}: flops returns {flops!r}, not Flops")
    for field in ("own_bytes", "pending_bytes", "forward_extra", "backward_extra", "widened_bytes", "deferred_extra"):
        value = call_labelled(f"{example.id}: {field}", getattr(kind, field), call)
        require(isinstance(value, (int, float)), f"{example.id}: {field} returns {value!r}, not a number of bytes")
    labelled = call_labelled(f"{example.id}: rule", example.find_labels)[1]
    require(isinstance(labelled, OperatorLabels), f"{example.id}: the rule returns {labelled!r}, not OperatorLabels")
    for subject, labels, dims in (("input", labelled.inputs, inputs), ("output", labelled.outputs, shapes)):
        require(len(labels) == len(dims), f"{example.id}: the rule has labels of {len(labels)} {subject}s")
        for index, (row, shape) in enumerate(zip(labels, dims, strict=True)):
            fits = row is None or shape is None or len(row) == len(shape)
            require(fits, f"{example.id}: the rule has labels {row!r} for {subject} {index} of shape {shape!r}")


def check_operator_facts(example: OperatorExample) -> None:
    """Raise AssertionError if the attributes, the result or the saved bytes contradict the kind."""
    kind = KINDS[example.kind]
    attributes = _RecordedAttributes(example.attributes)
    saved, result = call_labelled(f"{example.id}: the operator", _saved_bytes, example, attributes)
    undeclared = sorted((attributes.names | {*example.attributes}) - {*kind.attributes})
    require(not undeclared, f"{example.id}: OperatorKind.attributes does not declare {', '.join(undeclared)}")
    (shape, *_) = kind.shapes(tuple(example.inputs.values()), example.attributes)
    stated = numeric_sizes(shape)
    require([*result.shape] == stated, f"{example.id}: shapes states {stated}, and the result has {[*result.shape]}")
    dtype = _stated_dtype(example)
    require(result.dtype == dtype, f"{example.id}: output_dtype states {dtype}, and the result has {result.dtype}")
    if result.requires_grad:
        known = _stated_bytes(example)
        fits = saved <= known + CONSTANT_BYTES
        require(fits, f"{example.id}: autograd saves {saved} bytes, and `saves` and `own_bytes` state {known}")


def check_operator_module(example: OperatorExample) -> None:
    """Raise AssertionError unless the module of the example states and computes the operator. Without a module, nothing
    is checked."""
    if example.module is None:
        return
    module = example.module
    kind, attributes, names = check_operator_module_fields(module, f"{example.id}: module")
    require(kind.kind == example.kind, f"{example.id}: the module has the kind {kind.kind!r}")
    require(attributes == dict(example.attributes), f"{example.id}: the module has the attributes {attributes}")
    inputs = [name for name, shape in example.inputs.items() if shape is not None]
    parameters = [name for name in inputs if name in example.parameters]
    require(len(names) == len(parameters), f"{example.id}: the module has the parameters {names}, not {parameters}")
    values, expected_values = as_leaves(example.draw_values()), as_leaves(example.draw_values())
    for local, name in zip(names, parameters, strict=True):
        owner, _, leaf = local.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(values[name]))  # type: ignore[arg-type]
        values[name] = module.get_parameter(local)
    arguments = [values[name] for name in inputs if name not in parameters]
    result = call_labelled(f"{example.id}: forward of the module", module, *arguments)
    expected = example.reference(*expected_values.values())
    _check_near(f"{example.id}: the module's result", result, expected)
    gradient = draw_output_gradient(expected.shape)
    result.backward(gradient)
    expected.backward(gradient)
    for name, value in expected_values.items():
        leaf_value = values[name]
        if value is not None and value.grad is not None and leaf_value is not None:
            _check_near(f"{example.id}: the module's gradient of {name}", leaf_value.grad, value.grad)


def _check_near(subject: str, value: Tensor | None, expected: Tensor) -> None:
    require(isinstance(value, Tensor), f"{subject} is {type(value).__name__}, not a tensor")
    assert value is not None
    require(value.shape == expected.shape, f"{subject} has shape {[*value.shape]}, not {[*expected.shape]}")
    error = float((value.detach() - expected.detach()).abs().max())
    require(error <= 1e-12 * float(expected.detach().abs().max()), f"{subject} is off by {error:.2g}")


def _numeric_call(example: OperatorExample) -> OperatorCall:
    inputs = tuple(None if shape is None else tuple(numeric_sizes(shape)) for shape in example.inputs.values())
    outputs = KINDS[example.kind].shapes(tuple(example.inputs.values()), example.attributes)
    return OperatorCall(
        inputs=inputs,
        outputs=tuple(tuple(numeric_sizes(shape)) for shape in outputs),
        attributes=example.attributes,
        symbols=SYMBOLS,
        compute_bytes=ITEM_BYTES,
    )


def _saved_bytes(example: OperatorExample, attributes: Mapping[str, Any]) -> tuple[int, Tensor]:
    """Return the bytes that autograd saves, without parameters and integer inputs, and the result."""
    saved: dict[int, Tensor] = {}

    def record(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        leaves, result = execute_unsplit(example, attributes)
    free = {
        leaf.untyped_storage().data_ptr()
        for name, leaf in leaves.items()
        if leaf is not None and (name in example.parameters or name in example.integers)
    }
    require(isinstance(result, Tensor), f"{example.id}: the step returns {type(result).__name__}, not a tensor")
    return sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in free), result


def _stated_bytes(example: OperatorExample) -> int:
    """Return the bytes of the values that the kind saves, with its own bytes."""
    operator: Operator = example.make_graph().operators[0]
    kind, call = KINDS[example.kind], _numeric_call(example)
    values, shapes = (*operator.inputs, *operator.outputs), (*call.inputs, *call.outputs)
    sizes = dict(zip(values, shapes, strict=True))
    names = {*kind.saves(operator, lambda name: name not in example.integers)} - {*example.parameters}
    return sum(ITEM_BYTES * math.prod(sizes[name] or ()) for name in names) + int(kind.own_bytes(call))


def _stated_dtype(example: OperatorExample) -> torch.dtype:
    """Return the dtype that the kind states for output 0 of a float64 run."""
    name = KINDS[example.kind].output_dtype
    if name == "attribute":
        name = str(example.attributes["dtype"])
    if name is None:
        return torch.int64 if next(iter(example.inputs)) in example.integers else torch.float64
    return torch.float64 if name in ("compute", "float32", "float64") else getattr(torch, name)  # type: ignore[no-any-return]
