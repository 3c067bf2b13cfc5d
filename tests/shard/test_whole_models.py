"""Whole models synthesized for a mixed cluster of two fast and six slow devices, and run on eight gloo processes.

The programs come from the search on prices of the mixed cluster; loss and every gradient equal those of the user's own
module in one process, in float64.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.pool import Pool
from tests.support.whole_models import HAP, OTHERS, count_of_labels, random_inputs, unet
from tests.support.whole_runs import feed_of, join, mixed_setting, reference, run_case, synthesized

from pipefit.model.capture.whole import UnknownOperatorWarning, capture_whole

pytestmark = pytest.mark.gloo

ROWS = 16


@pytest.fixture(scope="module")
def pool():
    found = Pool(8)
    found.run(join, ranks=8)
    yield found
    found.close()


def case_of(make):
    """A model with what it is to give, its shares and its recipes."""
    torch.manual_seed(1)
    example = make()
    model = capture_whole(example)
    inputs = random_inputs(example, ROWS, seed=2)
    wanted = reference(example, inputs)
    shares, recipes = synthesized(model, mixed_setting())
    state = {n: p.detach().clone() for n, p in example.module.named_parameters()}
    return model, shares, recipes, state, feed_of(model, inputs), count_of_labels(example, inputs), wanted


FEW = ("vgg", "bert", "bert_moe", "qwen3", "unet")


@pytest.mark.parametrize(
    "name", [one if one in FEW else pytest.param(one, marks=pytest.mark.slow) for one in (*HAP, *OTHERS)]
)
def test_a_synthesized_model_gives_the_users_gradients(pool, name):
    case = case_of({**HAP, **OTHERS}[name])
    words = {word for text in case[2] for word in text.split()}
    assert any(word.startswith(("d0", "out", "e", "features")) for word in words), "nothing is split"
    assert pool.run(run_case, (*case, "IW"), ranks=8) == [True] * 8


def test_a_function_without_a_rule_is_whole_among_operators_that_are_split(pool):
    with pytest.warns(UnknownOperatorWarning, match=r"aten\.roll\.default, called at whole_models\.py:\d+"):
        case = case_of(lambda: unet(rolled=True))
    operators = [each for layer in case[0].layers for each in case[0].layer_graph(layer).operators]
    words = " ".join(text.partition(" ")[2] for text in case[2]).split()
    picks = [word for word in words if ":" not in word]
    rolled = next(place for place, each in enumerate(operators) if "roll" in each.attributes.get("target", ""))
    assert picks[rolled] == "-" and {*picks[:rolled]} != {"-"}
    assert pool.run(run_case, (*case, "B"), ranks=8) == [True] * 8
