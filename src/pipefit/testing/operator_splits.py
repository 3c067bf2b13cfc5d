"""The parts of an operator on several devices, executed in one process and joined.

An operator with collectives inside runs as one thread a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.layout import split_by_shares
from pipefit.model.graph import Operator, Shape
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, build_step
from pipefit.run.sharded.collectives import ShardContext
from pipefit.run.stage_inputs import StageInputs
from pipefit.run.transfers import comms
from pipefit.shard.rules import DevicePart, Labels, OperatorLabels
from pipefit.testing.operator_example import (
    ROWS,
    TOKENS,
    OperatorExample,
    Values,
    as_leaves,
    draw_output_gradient,
    numeric_sizes,
)
from pipefit.testing.thread_group import ThreadGroup

SHARES = (2, 1, 1)
"""Shares of the devices over which an operator is split."""

DeviceRun = tuple[int, int] | int
"""A device's run of the units of a label; its position, if every operand is cut in units of its own."""


@dataclass(frozen=True, kw_only=True)
class _DeviceCall:
    """One device's part of an operator."""

    operator: Operator
    labelled: OperatorLabels
    values: Values
    shape: Sequence[int | str]
    "The shape of the result on the device."
    result_part: DevicePart | None = None
    "The part of the result that the device has, if it is split."
    addend_part: DevicePart | None = None
    "The part of the first split operand, if the result is a partial sum."
    position: int = 0
    all_values: Values | None = None
    "The operands of all devices: positions and data come from the step plan, which has all of them."


def _execute_part(
    example: OperatorExample, call: _DeviceCall, meeting: ThreadGroup | None = None
) -> tuple[dict[str, Tensor | None], Tensor]:
    """Return the leaves and the result of one device's part."""
    graph = example.make_graph()
    context = OperatorContext(
        graph=replace(graph, tensors=(replace(graph.tensors[0], shape=tuple(call.shape)),)),
        layer=0,
        model_layer=0,
        operator=0,
        dtype=torch.float64,
        device=torch.device("cpu"),
        seed=0,
        slices=1,
        shard=ShardContext(group=(meeting, call.position), shares=SHARES, position=call.position),
    )
    step = build_step(replace(call.operator, attributes=_local_attributes(call)), context)
    leaves = as_leaves(call.values)
    for name in example.parameters:
        leaf = leaves[name]
        if leaf is not None:
            leaf.main_grad = torch.zeros_like(leaf)  # type: ignore[attr-defined]
    record = _make_record(call.all_values or leaves, example.integers)
    arguments = [*([record] if step.wants_record else []), *leaves.values()]
    if step.prepare is not None:
        arguments += step.prepare(record)
    return leaves, step.call(*arguments)


def _local_attributes(call: _DeviceCall) -> Mapping[str, Any]:
    attributes = call.operator.attributes
    if call.labelled.local is not None and call.result_part is not None:
        attributes = call.labelled.local(attributes, tuple(call.shape), call.result_part)
    if call.labelled.addend is not None and call.addend_part is not None:
        attributes = call.labelled.addend(attributes, call.addend_part)
    return attributes


def _make_record(values: Values, integers: Collection[str]) -> SavedForward:
    positions, data = values.get("positions"), {name: value for name in integers if (value := values[name]) is not None}
    record = SavedForward(0, 0, StageInputs(data=data), train=True)
    record.rows, record.tokens = ROWS, TOKENS
    record.feed.positions = torch.arange(TOKENS).expand(ROWS, TOKENS) if positions is None else positions
    record.feed.rows = torch.arange(ROWS)
    return record


def execute_unsplit(example: OperatorExample, attributes: Mapping[str, Any]) -> tuple[dict[str, Tensor | None], Tensor]:
    """Return the leaves and the result of the operator with these attributes, on one device."""
    operator, labelled, outputs = example.find_labels()
    return _execute_part(
        example,
        _DeviceCall(
            operator=replace(operator, attributes=attributes),
            labelled=labelled,
            values=example.draw_values(),
            shape=outputs[0],
        ),
    )


class _UnsplitRun:
    """The operator on one device: the values that the parts must make."""

    def __init__(self, example: OperatorExample) -> None:
        operator, self.labelled, outputs = example.find_labels()
        self.values = example.draw_values()
        self.call = _DeviceCall(operator=operator, labelled=self.labelled, values=self.values, shape=outputs[0])
        leaves, result = _execute_part(example, self.call)
        self.output_gradient = draw_output_gradient(result.shape)
        result.backward(self.output_gradient)
        self.result = result.detach()
        self.gradients = _gradients_of(leaves)

    def check_result(self, subject: str, result: Tensor, tolerance: float) -> None:
        """Raise AssertionError unless the joined result is this one, up to `tolerance` and a tenth of it near 0."""
        near = torch.allclose(result, self.result, rtol=tolerance, atol=tolerance / 10)
        assert near, f"{subject}: another result"

    def check_gradients(self, subject: str, gradients: Mapping[str, Tensor]) -> None:
        """Raise AssertionError unless the joined gradients are these."""
        for name, gradient in gradients.items():
            near = torch.allclose(gradient, self.gradients[name], rtol=1e-11, atol=1e-12)
            assert near, f"{subject}: another gradient of {name}"


def _gradients_of(leaves: Values) -> dict[str, Tensor]:
    return {name: _gradient_of(leaf) for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}


def _gradient_of(leaf: Tensor) -> Tensor:
    total: Tensor = getattr(leaf, "main_grad", torch.zeros_like(leaf))
    return total if leaf.grad is None else total + leaf.grad


def _all_reduce(x: Tensor, op: Any, group: tuple[ThreadGroup, int]) -> None:
    meeting, position = group
    total = torch.stack(meeting.exchange_values(position, x.clone()))
    x.copy_(total.amax(0) if op == dist.ReduceOp.MAX else total.sum(0))


def _all_to_all(out: Tensor, x: Tensor, received: list[int], sent: list[int], group: tuple[ThreadGroup, int]) -> None:
    meeting, position = group
    out.copy_(torch.cat([parts[position] for parts in meeting.exchange_values(position, x.clone().split(sent))]))
    assert len(out) == sum(received)


def _run_together(calls: Sequence[Callable[[ThreadGroup | None], Any]], meets: bool) -> list[Any]:
    """Return the results of the calls, which run at the same time if they meet in collectives."""
    if not meets:
        return [call(None) for call in calls]
    meeting = ThreadGroup(len(calls))
    with patch.object(dist, "all_reduce", _all_reduce), patch.object(comms, "exchange", _all_to_all):
        return meeting.run_threads(lambda position: calls[position](meeting))


class _LabelCut:
    """The cut of an operator's operands along one label."""

    def __init__(self, example: OperatorExample, label: str) -> None:
        self.example, self.label = example, label
        self.operator, labelled, self.outputs = example.find_labels()
        self.labelled = labelled.for_label(label)
        self.units = None if label in labelled.joint else self._count_units(labelled)
        "None if every operand is cut in units of its own."
        self.result_labels = self.labelled.outputs[0]
        self.is_partial = label not in self.result_labels

    def _count_units(self, labelled: OperatorLabels) -> int:
        if self.label in labelled.units:
            return labelled.units[self.label]
        shape, dim = self._first_operand(labelled)
        return numeric_sizes(shape)[dim]

    def _first_operand(self, labelled: OperatorLabels) -> tuple[Shape, int]:
        """Return the shape of the first split operand, and the split dimension."""
        for shape, labels in zip(self.example.inputs.values(), labelled.inputs, strict=True):
            if shape is not None and labels and self.label in labels:
                return shape, labels.index(self.label)
        raise AssertionError(f"{self.example.id}: no input has the label {self.label}")

    def device_runs(self) -> list[DeviceRun]:
        """Return every device's run of units; its position if every operand is cut in units of its own."""
        if self.units is None:
            return list(range(len(SHARES)))
        return list(split_by_shares(self.units, SHARES))

    def cut_view(self, value: Tensor, labels: Labels | None, run: DeviceRun) -> Tensor:
        """Return the part of an operand on one device, as a view."""
        if labels is None or self.label not in labels:
            return value
        dim = labels.index(self.label)
        start, stop = self._part_bounds(value.shape[dim], run)
        return value.narrow(dim, start, stop - start)

    def device_call(self, values: Values, position: int, run: DeviceRun) -> _DeviceCall:
        """Return one device's part of the operator."""
        local: dict[str, Tensor | None] = {}
        for index, ((name, value), labels) in enumerate(zip(values.items(), self.labelled.inputs, strict=True)):
            is_absent = self.is_partial and index in self.labelled.once and position > 0
            local[name] = None if is_absent or value is None else self.cut_view(value, labels, run).contiguous()
        call = _DeviceCall(
            operator=replace(self.operator, kind=self.labelled.kinds.get(self.label, self.operator.kind)),
            labelled=self.labelled,
            values=local,
            shape=self.outputs[0],
            position=position,
            all_values=values,
        )
        if not self.is_partial:
            dim = self.result_labels.index(self.label)
            part, length = self._device_part(self.outputs[0], dim, run)
            return replace(call, result_part=part, shape=[*call.shape[:dim], length, *call.shape[dim + 1 :]])
        if self.units is None:
            return call
        first, dim = self._first_operand(self.labelled)
        return replace(call, addend_part=self._device_part(first, dim, run)[0])

    def _device_part(self, shape: Shape, dim: int, run: DeviceRun) -> tuple[DevicePart, int]:
        """Return a device's part of a dimension, and its length."""
        total = numeric_sizes(shape)[dim]
        start, stop = self._part_bounds(total, run)
        return DevicePart(dim, -1 if shape[dim] in ("B", "T") else start, total), stop - start

    def _part_bounds(self, total: int, run: DeviceRun) -> tuple[int, int]:
        if isinstance(run, int):
            return split_by_shares(total, SHARES)[run]
        assert self.units is not None
        return run[0] * total // self.units, run[1] * total // self.units


def check_operator_split(example: OperatorExample, label: str) -> None:
    """Raise AssertionError unless the parts of three devices, split along `label`, make the full result and gradients.

    Split values are joined, partial sums are added up.
    """
    subject = f"{example.id}, split along {label}"
    cut, unsplit = _LabelCut(example, label), _UnsplitRun(example)
    gradients = {name: torch.zeros_like(value) for name, value in unsplit.gradients.items()}

    def run_device(position: int, run: DeviceRun, meeting: ThreadGroup | None) -> tuple[dict[str, Tensor], Tensor]:
        leaves, part = _execute_part(example, cut.device_call(unsplit.values, position, run), meeting)
        gradient = unsplit.output_gradient
        if not cut.is_partial:
            gradient = cut.cut_view(gradient, cut.result_labels, run)
        assert part.shape == gradient.shape, f"{subject}: a part has shape {[*part.shape]}, not {[*gradient.shape]}"
        part.backward(gradient)
        return _gradients_of(leaves), part.detach()

    runs = {position: run for position, run in enumerate(cut.device_runs()) if isinstance(run, int) or run[0] < run[1]}
    calls = [partial(run_device, position, run) for position, run in runs.items()]
    results = _run_together(calls, label in cut.labelled.kinds)
    for (part_gradients, _), run in zip(results, runs.values(), strict=True):
        for name, labels in zip(example.inputs, cut.labelled.inputs, strict=True):
            if name in part_gradients:
                view = cut.cut_view(gradients[name], labels, run)
                view += part_gradients[name]
    parts = [part for _, part in results]
    joined = torch.stack(parts).sum(0) if cut.is_partial else torch.cat(parts, cut.result_labels.index(label))
    unsplit.check_result(subject, joined, 1e-12)
    unsplit.check_gradients(subject, gradients)


def check_operator_sums(example: OperatorExample, number: int) -> None:
    """Raise AssertionError unless partial sums pass through input set `number` of `OperatorLabels.linear`.

    Three devices compute from addends of the inputs in the set. The sum of their results must be the full result. An
    addend must get the full gradient on every device, another input a partial sum of its gradient.
    """
    unsplit = _UnsplitRun(example)
    linear = unsplit.labelled.linear[number]
    subject = f"{example.id}, partial sums in inputs {linear}"
    generator = torch.Generator().manual_seed(4)
    addends = {
        name: _draw_addends(value, generator)
        for index, (name, value) in enumerate(unsplit.values.items())
        if index in linear and value is not None
    }
    results, gradients = [], []
    for position in range(len(SHARES)):
        values = {name: addends[name][position] if name in addends else value for name, value in unsplit.values.items()}
        call = replace(unsplit.call, values=values, position=position, all_values=unsplit.values)
        leaves, result = _execute_part(example, call)
        result.backward(unsplit.output_gradient)
        results.append(result.detach())
        gradients.append(_gradients_of(leaves))
    unsplit.check_result(subject, torch.stack(results).sum(0), 1e-11)
    for part_gradients in gradients:
        unsplit.check_gradients(subject, {name: part_gradients[name] for name in addends})
    summed = {
        name: torch.stack([part_gradients[name] for part_gradients in gradients]).sum(0)
        for name in unsplit.gradients
        if name not in addends
    }
    unsplit.check_gradients(subject, summed)


def _draw_addends(value: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Return one addend of `value` for each device."""
    parts = [torch.randn(value.shape, dtype=torch.float64, generator=generator) for _ in SHARES[1:]]
    return [*parts, value - torch.stack(parts).sum(0)]
