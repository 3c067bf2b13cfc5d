"""Linear attention of `transformers`: captured as one operator a layer, equal to the class, and undone afterwards."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.support.whole_runs import compare, feed_of, reference, run_whole
from torch import nn

from benchmarks.models.coverage import EXACT, class_difference, plan_stages, tiny_example
from pipefit.errors import ModelError
from pipefit.model.capture.library_delta import FUNCTIONS, replace_delta_rules
from pipefit.model.capture.whole import capture_whole
from pipefit.model.example import Example

LENGTHS = (12, 200)
"""A part of a chunk of 64 tokens; several chunks, the last one incomplete."""


def count_kinds(model: Any) -> Counter[str]:
    return Counter(operator.kind for layer in model.layers for operator in model.layer_graph(layer).operators)


@pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_a_class_with_linear_attention_is_the_class_at_any_length(kind: str) -> None:
    """The graphs of both lengths have equal operators. A short causal convolution stands before the rule."""
    counts = []
    for tokens in LENGTHS:
        example = tiny_example(kind, dropout=False, tokens=tokens)
        model = capture_whole(example, kind)
        plan_stages(model, tokens)
        counts.append(count_kinds(model))
        assert class_difference(example, model) <= EXACT
    assert counts[0] == counts[1]
    assert counts[0]["gated_delta"] == counts[0]["conv"] == 1


def test_functions_are_replaced_for_the_time_of_an_export() -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear
    from transformers.models.qwen3_next import modeling_qwen3_next

    files = (modeling_kimi_linear, modeling_qwen3_next)
    before = [vars(file).get(name) for file in files for name in FUNCTIONS]
    assert any(before)
    with pytest.raises(ZeroDivisionError), replace_delta_rules(nn.Identity()):
        within = [vars(file).get(name) for file in files for name in FUNCTIONS]
        raise ZeroDivisionError
    assert [new is old for new, old in zip(within, before, strict=True)] == [old is None for old in before]
    assert [vars(file).get(name) for file in files for name in FUNCTIONS] == before


def test_a_call_with_states_is_left_to_the_library() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next

    draw = torch.Generator().manual_seed(0)
    q, v, beta = (torch.randn(shape, generator=draw) for shape in ((1, 5, 2, 4), (1, 5, 2, 3), (1, 5, 2)))
    inputs = {"g": -beta.abs(), "beta": beta.sigmoid(), "output_final_state": True}
    result, state = modeling_qwen3_next.torch_chunk_gated_delta_rule(q, q, v, **inputs)
    with replace_delta_rules(nn.Identity()):
        again, state_again = modeling_qwen3_next.torch_chunk_gated_delta_rule(q, q, v, **inputs)
    assert torch.equal(result, again) and torch.equal(state, state_again)


class EarlierLayer(nn.Module):
    """A layer as earlier releases of `transformers` have it: its function is an attribute, and heads are repeated."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.linear, self.gates = nn.Linear(8, 24), nn.Linear(8, 4)
        self.chunk_gated_delta_rule = rule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.linear(x).unflatten(-1, (-1, 4)).chunk(3, dim=2)
        g, beta = self.gates(x).chunk(2, dim=-1)
        g = -nn.functional.softplus(g.float())
        options = {"g": g, "beta": beta.sigmoid(), "initial_state": None, "use_qk_l2norm_in_kernel": True}
        return self.chunk_gated_delta_rule(q, k, v, chunk_size=32, **options)[0].square().sum()


def test_a_function_that_is_an_attribute_is_replaced_in_a_copy() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next

    rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
    example = Example(module=EarlierLayer(rule), inputs={"x": torch.randn(2, 70, 8)})
    model = capture_whole(example)
    assert example.module.chunk_gated_delta_rule is rule
    operators = [operator for layer in model.layers for operator in model.layer_graph(layer).operators]
    (operator,) = (operator for operator in operators if operator.kind == "gated_delta")
    assert operator.attributes == {"chunk": 32, "scale": 0.5, "norm_eps": 1e-6}
    inputs = {"x": torch.randn(2, 70, 8, dtype=torch.float64)}
    loss, gradients = reference(example, inputs)
    state = {name: parameter.detach() for name, parameter in example.module.named_parameters()}
    compare(run_whole(None, 0, model, (), (), state, feed_of(model, inputs), 1), (loss, gradients))


class StatefulLayer(EarlierLayer):
    """A layer that reads the last state, which is no result of the operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(2)
        return self.chunk_gated_delta_rule(x, x, x, g=x[..., 0], beta=x[..., 1], output_final_state=True)[1].sum()


def test_a_failed_export_restores_the_functions() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next

    def refuse(*tensors: Any, **options: Any) -> Any:
        raise ValueError("no such rule")

    before = modeling_qwen3_next.torch_chunk_gated_delta_rule
    with pytest.raises(ModelError, match="no such rule"):
        capture_whole(Example(module=StatefulLayer(refuse), inputs={"x": torch.randn(2, 6, 8)}))
    assert modeling_qwen3_next.torch_chunk_gated_delta_rule is before
