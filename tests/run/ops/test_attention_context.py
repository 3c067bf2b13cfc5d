"""Attention over parts of sequences against PyTorch's own attention of complete ones, over 2 to 4 processes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.support.processes import run_processes
from torch.nn import functional

from pipefit.layout import zigzag_runs
from pipefit.model.graph import Operator
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops.attention_context import context_attention, gather_sequence, scatter_sequence
from pipefit.run.sharded.parts import ShardContext
from pipefit.run.stage_inputs import StageInputs

pytestmark = pytest.mark.gloo

ROWS, TOKENS, HEADS, DIM, SCALE = 2, 24, 4, 8, 0.4
SETTINGS: list[tuple[bool, int | None, int]] = [
    *itertools.product([True], [None, 2, 5, 10], [4, 2]), (False, None, 4), (False, None, 1),
]  # fmt: skip
"""(causal, window, groups of heads)."""


def plain_attention(q: Any, k: Any, v: Any, causal: bool, window: int | None) -> torch.Tensor:
    places = torch.arange(TOKENS)
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    if causal:
        seen = places[:, None] >= places
    if window is not None:
        seen &= places[:, None] - places < window
    out = functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen, scale=SCALE, enable_gqa=True
    )
    return out.transpose(1, 2)


def split_tokens(x: torch.Tensor, context: ShardContext) -> torch.Tensor:
    runs = zigzag_runs(TOKENS, context.size)[context.position]
    return torch.cat([x[:, start:stop] for start, stop in runs], 1)


def compare_settings(group: Any, rank: int, count: int) -> float:
    """Return the largest error of results and gradients, relative to the largest entry, over all settings."""
    context = ShardContext(group=group, shares=(1,) * count, position=rank)
    worst = 0.0
    for causal, window, groups in SETTINGS:
        torch.manual_seed(3)
        complete = [torch.randn(ROWS, TOKENS, h, DIM, dtype=torch.float64) for h in (HEADS, groups, groups, HEADS)]
        *inputs, dy = complete
        leaves = [x.clone().requires_grad_() for x in inputs]
        expected = plain_attention(*leaves, causal, window)
        gradients = torch.autograd.grad(expected, leaves, dy)
        attributes = {"causal": causal, "scale": SCALE, "window": window}
        operator = Operator(kind="attention", inputs=("q", "k", "v"), outputs=("o",), attributes=attributes)
        record = SavedForward(0, 0, StageInputs(), train=True)
        parts = [split_tokens(x, context).requires_grad_() for x in inputs]
        out = context_attention(operator, context)(record, *parts)
        results = [out, *torch.autograd.grad(out, parts, split_tokens(dy, context))]
        with torch.no_grad():
            results.append(context_attention(operator, context)(record, *parts))
        for result, reference in zip(results, (expected, *gradients, expected), strict=True):
            error = (result - split_tokens(reference, context)).abs().max() / reference.abs().max()
            worst = max(worst, float(error.detach()))
    return worst


@pytest.mark.parametrize("count", [2, 3, 4])
def test_results_and_gradients_are_those_of_complete_sequences(count: int) -> None:
    assert all(error < 1e-13 for error in run_processes(compare_settings, count, count))


def round_trip(group: Any, rank: int, count: int) -> bool:
    context = ShardContext(group=group, shares=(1,) * count, position=rank)
    x = torch.randn(ROWS, TOKENS, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    gathered = gather_sequence(split_tokens(x, context), context)
    summed = scatter_sequence(x * (rank + 1), context)
    total = sum(range(1, count + 1))
    return torch.equal(gathered, x) and torch.allclose(summed, split_tokens(x, context) * total, rtol=1e-14)


@pytest.mark.parametrize("count", [2, 4])
def test_a_sequence_is_gathered_in_order_and_scattered_in_chunks(count: int) -> None:
    assert run_processes(round_trip, count, count) == [True] * count
