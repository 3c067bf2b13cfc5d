"""Every rule, checked by its meaning: split one label unevenly over three devices, run each device's part alone.

The parts put together (G) or added up (P) are the whole result, and the gradients of the parts, put together where an
operand is split and added up where it is whole, are the whole gradients. Float64, one process: what a device would
see is cut out with indices. The operators' examples are those of the execution tests.
"""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from tests.support.op_case import ROWS, SYMBOLS, TOKENS
from tests.support.op_cases import CASES

from pipefit.errors import PlanError
from pipefit.layout import split_by_shares
from pipefit.model.graph import Operator
from pipefit.model.ops import KINDS
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, build_step
from pipefit.run.sharded.collectives import ShardContext
from pipefit.run.stage_inputs import StageInputs
from pipefit.run.transfers import comms
from pipefit.shard.rules import DevicePart, find_rules, labels_of

SHARES = (2, 1, 1)
COLLECTIVES = {
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_reduce",
    "shard_slice",
    "unshard",
    "linear_factors",
    "reshare",
}


def labelled_of(case):
    operator = case.graph().operators[0]
    outputs = KINDS[case.kind].shapes(tuple(case.inputs.values()), case.attributes)
    return operator, labels_of(operator, tuple(case.inputs.values()), outputs), outputs


def ways():
    for case in CASES:
        _, labelled, _ = labelled_of(case)
        found = {label for labels in labelled.inputs if labels for label in labels if label} | set(labelled.joint)
        for label in sorted(found):
            yield pytest.param(case, label, id=f"{case.id}-{label}")


def test_every_kind_has_a_rule():
    parts = {kind for case in CASES for kind in labelled_of(case)[1].kinds.values()}
    assert set(find_rules()) == set(KINDS) - COLLECTIVES - parts


def test_an_operator_without_a_rule_is_named():
    with pytest.raises(PlanError, match=r"no rule for splitting the operator 'fft'(.|\n)*--fix shards=1"):
        labels_of(Operator(kind="fft", inputs=("x",), outputs=("y",)), (("B",),), (("B",),))


def test_a_result_of_given_size_is_whole():
    attributes = {"target": "aten.new_full.default", "arguments": [{"input": 0}, [{"size": "B"}, 6], 3.0],
                  "keywords": {}, "result": None, "shape": ["B", 6], "dtype": "compute"}  # fmt: skip
    operator = Operator(kind="aten", inputs=("x",), outputs=("y",), attributes=attributes)
    assert labels_of(operator, (("B", 6),), (("B", 6),)).outputs == ((None, None),)


def numbers(shape):
    return [SYMBOLS.get(size, size) for size in shape]


def extent(case, labelled, label):
    """Units in which a label is cut."""
    if label in labelled.units:
        return labelled.units[label]
    for shape, labels in zip(case.inputs.values(), labelled.inputs, strict=True):
        if labels and label in labels:
            return numbers(shape)[labels.index(label)]
    raise AssertionError(label)


def cut(value, labels, label, units, run):
    """The part of an operand that a device with this run of units holds."""
    if value is None or labels is None or label not in labels:
        return value
    return cut_view(value, labels, label, units, run).contiguous()


def execute(case, operator, labelled, values, shape, place, position=0, whole=None, addend=None, meeting=None):
    """(leaves, result) of the operator on one device's operands; `place` is its cut of the result, if it has one, and
    `addend` that of an operand where the result is a partial sum.
    `whole` are everyone's operands: positions come from the feed, which has all of them."""
    attributes = operator.attributes
    if labelled.local is not None and place is not None:
        attributes = labelled.local(attributes, shape, place)
    if labelled.addend is not None and addend is not None:
        attributes = labelled.addend(attributes, addend)
    graph = case.graph()
    tensors = (dataclasses.replace(graph.tensors[0], shape=tuple(shape)),)
    graph = dataclasses.replace(graph, tensors=tensors)
    step = build_step(
        dataclasses.replace(operator, attributes=attributes),
        OperatorContext(
            graph=graph,
            layer=0,
            model_layer=0,
            operator=0,
            dtype=torch.float64,
            device=torch.device("cpu"),
            seed=0,
            slices=1,
            shard=ShardContext(group=(meeting, position), shares=SHARES, position=position),
        ),
    )
    record = SavedForward(0, 0, StageInputs(), train=True)
    record.rows, record.tokens = ROWS, TOKENS
    leaves = {
        name: value if value is None or not value.is_floating_point() else value.clone().requires_grad_()
        for name, value in values.items()
    }
    for name in case.parameters & {name for name in leaves if leaves[name] is not None}:
        leaves[name].main_grad = torch.zeros_like(leaves[name])
    if "positions" in leaves:
        record.feed.positions = (whole or leaves)["positions"]
    elif case.kind == "dropout":
        record.feed.positions = torch.arange(TOKENS).expand(ROWS, TOKENS)
    record.feed.rows = torch.arange(ROWS)
    arguments = [*([record] if step.wants_record else []), *leaves.values()]
    if step.prepare is not None:
        arguments += step.prepare(record)
    return leaves, step.call(*arguments)


def gradient(leaf):
    total = getattr(leaf, "main_grad", torch.zeros_like(leaf))
    return total if leaf.grad is None else total + leaf.grad


class Meeting:
    """A process group of threads."""

    def __init__(self, count):
        self.barrier, self.said = threading.Barrier(count, timeout=60), [None] * count

    def heard(self, position, said):
        """What everyone says."""
        self.said[position] = said
        self.barrier.wait()
        found = list(self.said)
        self.barrier.wait()
        return found


def all_reduce(x, op, group):
    meeting, position = group
    total = torch.stack(meeting.heard(position, x.clone()))
    x.copy_(total.amax(0) if op == dist.ReduceOp.MAX else total.sum(0))


def all_to_all(out, x, received, sent, group):
    meeting, position = group
    out.copy_(torch.cat([parts[position] for parts in meeting.heard(position, x.clone().split(sent))]))
    assert len(out) == sum(received)


def at_once(calls, talk):
    """The results of the devices' work: one after the other, or where they talk, at the same time."""
    if not talk:
        return [call(None) for call in calls]
    meeting = Meeting(len(calls))
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(meeting), calls))


@pytest.mark.parametrize(("case", "label"), list(ways()))
def test_parts_make_the_whole(case, label, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(comms, "exchange", all_to_all)
    operator, labelled, outputs = labelled_of(case)
    values = case.values()
    whole_leaves, whole = execute(case, operator, labelled, values, outputs[0], None)
    torch.manual_seed(3)
    dy = torch.randn(whole.shape, dtype=torch.float64)
    whole.backward(dy)
    units = None if label in labelled.joint else extent(case, labelled, label)  # None: every operand by itself
    labelled = labelled.for_label(label)
    out = labelled.outputs[0]
    partial = label not in out
    part = dataclasses.replace(operator, kind=labelled.kinds.get(label, operator.kind))
    calls, places = [], []
    gradients = {
        n: torch.zeros_like(leaf) for n, leaf in whole_leaves.items() if leaf is not None and leaf.requires_grad
    }
    for position, run in enumerate(range(len(SHARES)) if units is None else split_by_shares(units, SHARES)):
        local, place, back = {}, None, dy
        for index, (name, labels) in enumerate(zip(case.inputs, labelled.inputs, strict=True)):
            absent = partial and index in labelled.once and position > 0
            local[name] = None if absent else cut(values[name], labels, label, units, run)
        shape = list(outputs[0])
        if units is not None and run[0] == run[1]:
            continue
        if not partial:
            dim = out.index(label)
            back = cut(dy, out, label, units, run)
            total = numbers(shape)[dim]
            shape = [*shape[:dim], back.shape[dim], *shape[dim + 1 :]]
            first = -1 if outputs[0][dim] in ("B", "T") else run[0] * total // units
            place = DevicePart(dim, first, total)
        addend = first_cut(case, labelled, label, units, run) if partial else None

        def call(meeting, work=(part, labelled, local, shape, place, position, values, addend), back=back):
            leaves, result = execute(case, *work, meeting)
            result.backward(back)
            return leaves, result.detach()

        calls.append(call)
        places.append(run)
    results = []
    for (leaves, result), run in zip(at_once(calls, label in labelled.kinds), places, strict=True):
        results.append(result)
        for name, labels in zip(case.inputs, labelled.inputs, strict=True):
            if name in gradients and leaves[name] is not None:
                cut_out = cut_view(gradients[name], labels, label, units, run)
                cut_out += gradient(leaves[name])
    if not results:
        return
    together = sum(results) if partial else torch.cat(results, out.index(label))
    assert torch.allclose(together, whole, rtol=1e-12, atol=1e-13)
    for name, total in gradients.items():
        assert torch.allclose(total, gradient(whole_leaves[name]), rtol=1e-11, atol=1e-12), name


def first_cut(case, labelled, label, units, run):
    """Where a device's part of the first split operand lies."""
    for shape, labels in zip(case.inputs.values(), labelled.inputs, strict=True):
        if labels and label in labels:
            dim = labels.index(label)
            total = numbers(shape)[dim]
            return DevicePart(dim, run[0] * total // units, total)
    raise AssertionError(label)


def sums():
    for case in CASES:
        _, labelled, _ = labelled_of(case)
        for number in range(len(labelled.linear)):
            yield pytest.param(case, number, id=f"{case.id}-{number}")


@pytest.mark.parametrize(("case", "number"), list(sums()))
def test_partial_sums_pass_through(case, number):
    """Addends in, addends out: what three devices make of their addends adds up to the whole, forward and backward."""
    operator, labelled, outputs = labelled_of(case)
    among = labelled.linear[number]
    values = case.values()
    whole_leaves, whole = execute(case, operator, labelled, values, outputs[0], None)
    dy = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    whole.backward(dy)
    generator = torch.Generator().manual_seed(4)
    addends = {}
    for index, (name, value) in enumerate(values.items()):
        if index in among:
            parts = [torch.randn(value.shape, dtype=torch.float64, generator=generator) for _ in range(2)]
            addends[name] = [*parts, value - sum(parts)]
    total = 0
    gradients = {}
    for position in range(3):
        local = {name: addends[name][position] if name in addends else value for name, value in values.items()}
        leaves, result = execute(case, operator, labelled, local, outputs[0], None, position, values)
        result.backward(dy)
        total = total + result.detach()
        for name, leaf in leaves.items():
            if leaf is not None and leaf.requires_grad:
                gradients.setdefault(name, []).append(gradient(leaf))
    assert torch.allclose(total, whole, rtol=1e-11, atol=1e-12)
    for name, each in gradients.items():
        wanted = gradient(whole_leaves[name])
        if name in addends:  # the gradient of partial sums is whole on every device
            assert all(torch.allclose(one, wanted, rtol=1e-11, atol=1e-12) for one in each), name
        else:  # and of what is whole a partial sum
            assert torch.allclose(sum(each), wanted, rtol=1e-11, atol=1e-12), name


def test_what_is_not_linear_says_so():
    passing = {case.kind for case in CASES if labelled_of(case)[1].linear}
    assert passing <= {
        "add", "sub", "mul", "div", "neg", "linear", "matmul", "rotary", "reshape", "transpose", "slice", "concat",
        "conv", "conv_transpose", "einsum", "expand", "sum", "put_tokens", "take_tokens",
    }  # fmt: skip
    for case in CASES:
        if case.kind == "linear" and case.values().get("bias") is not None:
            assert not labelled_of(case)[1].linear, "a bias would be added once a device"


def cut_view(value, labels, label, units, run):
    """The part of `value` as a view: gradients of split operands go into their places, of whole ones add up."""
    if labels is None or label not in labels:
        return value
    dim = labels.index(label)
    length = value.shape[dim]
    start, stop = (
        split_by_shares(length, SHARES)[run] if units is None else (run[0] * length // units, run[1] * length // units)
    )
    return value.narrow(dim, start, stop - start)
