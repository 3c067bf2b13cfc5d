"""The gated delta rule in chunks against the functions of `transformers`, in float64: results and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.in_float64 import AllInFloat64

from pipefit.model.ops.gated_delta import NORM_EPS, SEGMENT_CHUNKS
from pipefit.run.autograd.delta_rule import DeltaFunction, DeltaRule

EXACT = 1e-10
ROWS, KEYS, VALUES = 2, 8, 6


def draw_inputs(tokens: int, key_heads: int, heads: int, by_feature: bool, normalised: bool) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    q, k = normal(ROWS, tokens, key_heads, KEYS), normal(ROWS, tokens, key_heads, KEYS)
    if normalised:
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    decay = -normal(ROWS, tokens, heads, *((KEYS,) if by_feature else ())).abs()
    return [q, k, normal(ROWS, tokens, heads, VALUES), decay, normal(ROWS, tokens, heads).sigmoid()]


def run_backward(call: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the result and the gradients of all inputs."""
    leaves = [value.clone().requires_grad_() for value in inputs]
    result = call(*leaves)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient)]


def run_library(name: str, **options: Any) -> Any:
    from transformers.models.kimi_linear import modeling_kimi_linear
    from transformers.models.qwen3_next import modeling_qwen3_next

    function = getattr(modeling_kimi_linear if "kimi" in name else modeling_qwen3_next, name)

    def call(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        with AllInFloat64():
            return function(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False, **options)[0]

    return call


@pytest.mark.parametrize("by_feature", [False, True], ids=["token", "feature"])
@pytest.mark.parametrize("norm_eps", [None, NORM_EPS])
@pytest.mark.parametrize(("tokens", "chunk"), [(12, 64), (200, 64), (200, 8), (128, 32)])
def test_chunks_equal_the_chunks_and_the_recurrence_of_the_library(
    tokens: int, chunk: int, norm_eps: float | None, by_feature: bool
) -> None:
    """200 tokens in chunks of 8 are two segments; 12 and 200 tokens fill no chunk of 64."""
    heads = 2 if by_feature else 4
    inputs = draw_inputs(tokens, 2, heads, by_feature, norm_eps is None)
    rule = DeltaRule(chunk, KEYS**-0.5, norm_eps)
    ours = run_backward(lambda *values: DeltaFunction.apply(*values, rule), inputs)
    normalises = {"use_qk_l2norm_in_kernel": norm_eps is not None}
    chunks, recurrence = (
        ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
        if by_feature
        else ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    )
    for call in (run_library(chunks, chunk_size=chunk, **normalises), run_library(recurrence, **normalises)):
        for value, expected in zip(ours, run_backward(call, inputs), strict=True):
            assert float((value - expected).abs().max()) <= EXACT * float(expected.abs().max())


@pytest.mark.parametrize("by_feature", [False, True], ids=["token", "feature"])
def test_strong_decays_do_not_overflow_in_float32(by_feature: bool) -> None:
    """A chunk may forget its first tokens completely."""
    inputs = draw_inputs(96, 2, 2, by_feature, True)
    inputs[3] = inputs[3] - 8.0
    rule = DeltaRule(64, KEYS**-0.5, None)
    exact = run_backward(lambda *values: DeltaFunction.apply(*values, rule), inputs)
    leaves = [value.float().requires_grad_() for value in inputs]
    result = DeltaFunction.apply(*leaves, rule)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).float()
    rounded = [result.detach(), *torch.autograd.grad(result, leaves, gradient)]
    for value, expected in zip(rounded, exact, strict=True):
        assert float((value - expected).abs().max()) <= 1e-3 * float(expected.abs().max())


def test_results_have_the_type_of_the_queries() -> None:
    """As in a run in bfloat16 whose decays are float32. Products are in float32."""
    inputs = draw_inputs(40, 2, 4, False, False)
    leaves = [value.to(torch.float32 if index == 3 else torch.bfloat16) for index, value in enumerate(inputs)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    rule = DeltaRule(16, KEYS**-0.5, NORM_EPS)
    result = DeltaFunction.apply(*leaves, rule)
    result.sum().backward()
    assert result.dtype == torch.bfloat16
    assert [leaf.grad.dtype for leaf in leaves] == [leaf.dtype for leaf in leaves]
    exact = DeltaFunction.apply(*(leaf.detach().double() for leaf in leaves), rule)
    assert float((result.detach() - exact).abs().max()) <= 2**-8 * float(exact.abs().max())


def test_no_rows_have_a_result() -> None:
    """A device of uneven replicas may hold no row of a microbatch."""
    inputs = [value[:0].requires_grad_() for value in draw_inputs(40, 2, 4, False, False)]
    result = DeltaFunction.apply(*inputs, DeltaRule(16, 0.5, NORM_EPS))
    assert result.shape == (0, 40, 4, VALUES)
    assert [gradient.shape for gradient in torch.autograd.grad(result.sum(), inputs)] == [x.shape for x in inputs]


def test_segments_are_runs_of_chunks() -> None:
    rule = DeltaRule(8, 1.0, None)
    step = 8 * SEGMENT_CHUNKS
    assert rule.segment_ranges(2 * step + 3) == [(0, step), (step, 2 * step), (2 * step, 2 * step + 3)]
    assert rule.segment_ranges(step) == [(0, step)]
