"""Every rule, checked by its meaning: split one label unevenly over three devices, run each device's part alone.

The parts put together (G) or added up (P) are the whole result, and the gradients of the parts, put together where an
operand is split and added up where it is whole, are the whole gradients. Float64, one process: what a device would
see is cut out with indices. The operators' examples are those of the execution tests.
"""

from __future__ import annotations

import pytest
from tests.support.op_cases import CASES

from pipefit.errors import PlanError
from pipefit.model.graph import Operator
from pipefit.model.ops import KINDS
from pipefit.shard.rules import find_rules, labels_of
from pipefit.testing.operators import check_operator_split, check_operator_sums

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


def ways():
    for case in CASES:
        for label in case.split_labels():
            yield pytest.param(case, label, id=f"{case.id}-{label}")


def test_every_kind_has_a_rule():
    parts = {kind for case in CASES for kind in case.find_labels()[1].kinds.values()}
    assert set(find_rules()) == set(KINDS) - COLLECTIVES - parts


def test_an_operator_without_a_rule_is_named():
    with pytest.raises(PlanError, match=r"no rule for splitting the operator 'fft'(.|\n)*--fix shards=1"):
        labels_of(Operator(kind="fft", inputs=("x",), outputs=("y",)), (("B",),), (("B",),))


def test_a_result_of_given_size_is_whole():
    attributes = {"target": "aten.new_full.default", "arguments": [{"input": 0}, [{"size": "B"}, 6], 3.0],
                  "keywords": {}, "result": None, "shape": ["B", 6], "dtype": "compute"}  # fmt: skip
    operator = Operator(kind="aten", inputs=("x",), outputs=("y",), attributes=attributes)
    assert labels_of(operator, (("B", 6),), (("B", 6),)).outputs == ((None, None),)


@pytest.mark.parametrize(("case", "label"), list(ways()))
def test_parts_make_the_whole(case, label):
    check_operator_split(case, label)


def sums():
    for case in CASES:
        _, labelled, _ = case.find_labels()
        for number in range(len(labelled.linear)):
            yield pytest.param(case, number, id=f"{case.id}-{number}")


@pytest.mark.parametrize(("case", "number"), list(sums()))
def test_partial_sums_pass_through(case, number):
    """Addends in, addends out: what three devices make of their addends adds up to the whole, forward and backward."""
    check_operator_sums(case, number)


def test_what_is_not_linear_says_so():
    passing = {case.kind for case in CASES if case.find_labels()[1].linear}
    assert passing <= {
        "add", "sub", "mul", "div", "neg", "linear", "matmul", "rotary", "reshape", "transpose", "slice", "concat",
        "conv", "conv_transpose", "einsum", "expand", "sum", "put_tokens", "take_tokens",
    }  # fmt: skip
    for case in CASES:
        if case.kind == "linear" and case.inputs.get("bias") is not None:
            assert not case.find_labels()[1].linear, "a bias would be added once a device"
