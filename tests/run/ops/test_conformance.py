"""Every operator kind, executed by the runtime, against plain PyTorch: result, gradients of all inputs and parameters.

A kind without a case here fails, so a new operator cannot come in untested.
"""

from __future__ import annotations

import pytest
from tests.support.op_cases import CASES

from pipefit.model.ops import KINDS
from pipefit.run.ops import find_builders
from pipefit.testing.operators import check_operator_gradients

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


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("mode", ["B", "IW"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_operator_equals_plain_pytorch(case, mode, recompute):
    check_operator_gradients(case, mode, recompute)
