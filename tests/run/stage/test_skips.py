"""Activations beside the hidden state: made in one layer, used in a later one, within a stage and between stages."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.support.stage_toys import WIDTH, GraphBuilder, assert_close, fill

from pipefit.model.graph import TensorSpec
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.run.stage_inputs import StageInputs

X = TensorSpec(name="x", shape=("B", "T", WIDTH))
SKIP = TensorSpec(name="skip", shape=("B", "T", WIDTH))


def mix(b: GraphBuilder, x: str) -> str:
    """Two linear layers, so that full recomputation applies."""
    return b.linear(b.add("tanh", b.linear(x, "a", WIDTH)), "b", WIDTH)


def graphs():
    """A layer that makes `skip`, one that knows nothing of it, and one that uses it."""
    first = GraphBuilder(X)
    out = mix(first, "x")
    second = GraphBuilder(X)
    third = GraphBuilder(X, SKIP)
    joined = third.add("mul", mix(third, "x"), "skip")
    made = first.finish(out, first.add("silu", "x"))
    name = made.outputs[1]
    tensors = tuple(TensorSpec(name="skip", shape=t.shape) if t.name == name else t for t in made.tensors)
    operators = tuple(
        type(o)(kind=o.kind, inputs=o.inputs, outputs=("skip",), attributes=o.attributes) if name in o.outputs else o
        for o in made.operators
    )
    made = type(made)(
        inputs=made.inputs, outputs=(out, "skip"), operators=operators, parameters=made.parameters, tensors=tensors
    )
    return [made, second.finish(mix(second, "x")), third.finish(third.add("add", joined, "skip"))]


def layers():
    return [StageLayer(f"l{i}", g, {p.name: f"l{i}.{p.name}" for p in g.parameters}) for i, g in enumerate(graphs())]


def plain(p, x):
    def mixed(i, value):
        return torch.tanh(value @ p[f"l{i}.a.weight"].t()) @ p[f"l{i}.b.weight"].t()

    skip = x * torch.sigmoid(x)
    return mixed(2, mixed(1, mixed(0, x))) * skip + skip


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2)])
def test_a_skip_connection_over_any_cut(cuts, recompute):
    edges = [0, *cuts, 3]
    programs = [
        StageProgram(layers()[a:b], StageSetup(recompute=recompute, dtype=torch.float64))
        for a, b in itertools.pairwise(edges)
    ]
    buffers = {}
    for program in programs:
        buffers |= fill(program)
        program.begin_step(0, 1)
    torch.manual_seed(0)
    x, dy = torch.randn(2, 3, WIDTH, dtype=torch.float64), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    leaves = {n: p.detach().clone().requires_grad_() for program in programs for n, p in program.parameters.items()}
    start = x.clone().requires_grad_()
    wanted = plain(leaves, start)
    wanted.backward(dy)
    values = {"": x}
    for program in programs:
        values = program.forward(0, 0, values, StageInputs())
    assert torch.allclose(values[""], wanted, rtol=1e-12)
    back = {"": dy}
    for program in reversed(programs):
        back = program.backward_input(0, 0, back)
        program.backward_weight(0, 0)
    assert torch.allclose(back[""], start.grad, rtol=1e-11, atol=1e-12)
    assert_close(buffers, {n: leaf.grad for n, leaf in leaves.items()}, 1e-11)
