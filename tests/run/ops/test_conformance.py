"""Every operator kind, executed by the runtime, against plain PyTorch: result, gradients of all inputs and parameters.

A kind without a case here fails, so a new operator cannot come in untested.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.op_cases import CASES
from torch import nn

from pipefit.model.families.common import OperatorModule
from pipefit.model.ops import KINDS
from pipefit.run.ops import find_builders
from pipefit.testing.operators import (
    check_operator_facts,
    check_operator_gradients,
    check_operator_module,
    check_operator_types,
)

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


def test_every_kind_is_executed_and_tested():
    assert set(find_builders()) == set(KINDS), "the runtime and model/ops know different operators"
    assert {case.kind for case in CASES} | set(ELSEWHERE) == set(KINDS), "an operator kind has no conformance case"


COPIES = {"einsum-equation=btd,edf->btef": "autograd keeps a copy of an operand in another order"}
"""Examples that save more than their kind states, with the reason."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_an_operator_states_its_types_shapes_and_saved_bytes(case):
    check_operator_types(case)
    if case.id in COPIES:
        with pytest.raises(AssertionError, match="autograd saves"):
            check_operator_facts(case)
    else:
        check_operator_facts(case)


class Norm(OperatorModule):
    kind = "rms_norm"

    def __init__(self, eps: float, scale: float) -> None:
        super().__init__()
        self.weight, self.eps, self.scale = nn.Parameter(torch.ones(1)), eps, scale

    def operator_attributes(self):
        return {"eps": self.eps}

    def operator_parameters(self):
        return ("weight",)

    def forward(self, x):
        return self.scale * x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def test_a_module_is_checked_with_the_parameters_of_the_example():
    case = next(case for case in CASES if case.kind == "rms_norm" and case.parameters)
    check_operator_module(replace(case, module=Norm(case.attributes["eps"], 1.0)))
    with pytest.raises(AssertionError, match="the module's result is off by"):
        check_operator_module(replace(case, module=Norm(case.attributes["eps"], 1.01)))
    with pytest.raises(AssertionError, match=r"the module has the attributes \{'eps': 7.0\}"):
        check_operator_module(replace(case, module=Norm(7.0, 1.0)))


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("mode", ["B", "IW"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_operator_equals_plain_pytorch(case, mode, recompute):
    check_operator_gradients(case, mode, recompute)
