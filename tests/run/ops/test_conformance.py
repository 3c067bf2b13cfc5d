"""Every operator kind, executed by the runtime, against plain PyTorch: result, gradients of all inputs and parameters.

A kind without a case here fails, so a new operator cannot come in untested.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.op_case import ROWS, TOKENS, OpCase
from tests.support.op_cases import CASES
from tests.support.packed_cases import DATA

from pipefit.model.ops import KINDS
from pipefit.run.ops import find_builders
from pipefit.run.stage.program import StageLayer, StageProgram
from pipefit.run.stage_inputs import StageInputs

ELSEWHERE = {
    "opaque": "test_opaque.py",
    "constant": "test_constant.py",
    "all_gather": "../sharded/test_collectives.py",
    "all_to_all": "../sharded/test_collectives.py",
    "linear_factors": "../sharded/test_searched.py",
    "reduce_scatter": "../sharded/test_collectives.py",
    "all_reduce": "../sharded/test_collectives.py",
    "shard_slice": "../sharded/test_collectives.py",
    "unshard": "../sharded/test_searched.py",
    "cross_entropy_shard": "../../shard/rules/test_rules.py",
    "moe_shard": "../../shard/rules/test_rules.py",
    "rms_norm_shard": "../../shard/rules/test_rules.py",
    "layer_norm_shard": "../../shard/rules/test_rules.py",
    "softmax_shard": "../../shard/rules/test_rules.py",
    "reshare": "../sharded/test_searched.py",
}
EXACT = 1e-12


def test_every_kind_is_executed_and_tested():
    assert set(find_builders()) == set(KINDS), "the runtime and model/ops know different operators"
    assert {case.kind for case in CASES} | set(ELSEWHERE) == set(KINDS), "an operator kind has no conformance case"


def run(case: OpCase, mode: str, recompute: str):
    """(y, gradients by input name) of the case as a stage of one layer."""
    graph, values = case.graph(), case.values()
    program = StageProgram(
        [StageLayer("layer", graph, {name: name for name in case.parameters})], recompute=recompute, dtype=torch.float64
    )
    buffers = {name: torch.zeros_like(p.data) for name, p in program.parameters.items()}
    for name, parameter in program.parameters.items():
        parameter.data.copy_(values[name])
    program.bind_gradients(buffers)
    program.begin_step(0, 1)
    fed = {name: values[name] for name in case.integers}
    data = {name: fed.pop(name) for name in DATA & set(fed)}
    feed = StageInputs(**fed, data=data, rows=torch.arange(ROWS))
    if feed.positions is None:
        feed.positions = torch.arange(TOKENS).expand(ROWS, TOKENS).contiguous()
    activations = [tensor.name for tensor in graph.inputs if tensor.role == "activation"]
    inputs = {"" if i == 0 else name: values[name] for i, name in enumerate(activations)}
    outputs = program.forward(0, 0, inputs, feed)
    y = outputs.get("", outputs.get("loss"))
    torch.manual_seed(7)
    dy = torch.randn(y.shape, dtype=torch.float64) if y.shape else torch.ones((), dtype=torch.float64)
    back = program.backward if mode == "B" else program.backward_input
    gradients = back(0, 0, {"": dy})
    if mode == "IW":
        program.backward_weight(0, 0)
    found = {activations[0] if name == "" else name: value for name, value in gradients.items()}
    return y, {**found, **buffers}


def wanted(case: OpCase):
    values = case.values()
    leaves = {
        name: value if value is None or name in case.integers else value.clone().requires_grad_()
        for name, value in values.items()
    }
    y = case.plain(*leaves.values())
    torch.manual_seed(7)
    y.backward(torch.randn(y.shape, dtype=torch.float64) if y.shape else torch.ones((), dtype=torch.float64))
    return y.detach(), {n: v.grad for n, v in leaves.items() if v is not None and n not in case.integers}


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("mode", ["B", "IW"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_operator_equals_plain_pytorch(case, mode, recompute):
    y, gradients = run(case, mode, recompute)
    plain_y, plain_gradients = wanted(case)
    assert y.shape == plain_y.shape
    assert (y - plain_y).abs().max() <= EXACT * plain_y.abs().max()
    assert set(gradients) == set(plain_gradients)
    for name, value in plain_gradients.items():
        assert (gradients[name] - value).abs().max() <= EXACT * value.abs().max(), name
