"""Attention kernels that give and take log-sum-exps, against dense attention under PyTorch's autograd in float64."""

from __future__ import annotations

import pytest
import torch

from pipefit.run.autograd import attention_kernels as kernels
from pipefit.run.autograd.attention_kernels import (
    PLAIN_KERNEL,
    AttentionCall,
    AttentionKernel,
    attend_backward,
    attend_forward,
    choose_kernel,
    hidden_score,
)

CPU = torch.device("cpu")
DTYPES = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 3e-2, "float16": 4e-3}


@pytest.fixture(autouse=True)
def fresh_choices():
    choose_kernel.cache_clear()
    yield
    choose_kernel.cache_clear()


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(q, k, v, scale, banned):
    """(out, log-sum-exp) by a table of scores; `banned` (B or 1, 1, T, S) is True where a key is not seen."""
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("bthk,bshk->bhts", q, k) * scale
    scores = scores.masked_fill(banned, -torch.inf)
    return torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v), scores.logsumexp(-1)


def near(found, wanted, bound):
    assert found.shape == wanted.shape
    error = (found.double() - wanted).abs().max()
    assert error <= bound * (1 + wanted.abs().max()), float(error)


@pytest.mark.parametrize("kind", ["square", "causal", "rectangle", "masked"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plain", [False, True])
def test_two_runs_of_keys_make_the_attention_to_both(monkeypatch, kind, groups, dtype, plain):
    """The first run is an unmasked rectangle; of the second, `masked` hides all keys from one query."""
    if plain:
        monkeypatch.setattr(kernels, "KERNELS", ())
    bound, wanted_type = DTYPES[dtype], getattr(torch, dtype)
    tokens, before = 7, 5
    own = {"square": tokens, "causal": tokens, "rectangle": 3, "masked": 4}[kind]
    q, dy = draw(2, tokens, 4, 8, seed=1), draw(2, tokens, 4, 8, seed=2)
    k, v = draw(2, before + own, groups, 8, seed=3), draw(2, before + own, groups, 8, seed=4)
    banned = torch.zeros(2, 1, tokens, before + own, dtype=torch.bool)
    if kind == "causal":
        banned[..., before:] = torch.ones(tokens, own, dtype=torch.bool).triu(1)
    if kind == "masked":
        banned[1, :, 2, before:] = True
        banned[:, :, :4, before + 1] = True
    q, dy, k, v = (x.to(wanted_type).double() for x in (q, dy, k, v))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, 0.3, banned)
    wanted = torch.autograd.grad(out, leaves, dy)

    q, dy, k, v = (x.to(wanted_type) for x in (q, dy, k, v))
    mask = None
    if kind == "masked":
        mask = torch.zeros(2, 1, tokens, own, dtype=wanted_type).masked_fill(
            banned[..., before:], hidden_score(wanted_type)
        )
    runs = [
        (AttentionCall(0.3, False), k[:, :before], v[:, :before], None),
        (AttentionCall(0.3, kind == "causal"), k[:, before:], v[:, before:], mask),
    ]
    parts = [attend_forward(call, q, *kv, m) for call, *kv, m in runs]
    merged_lse = torch.logaddexp(parts[0][1], parts[1][1])
    near(merged_lse, lse.detach(), 3 * bound)
    merged = sum(o.double() * (part - merged_lse).double().exp().transpose(1, 2).unsqueeze(-1) for o, part in parts)
    near(merged, out.detach(), bound)
    merged = merged.to(wanted_type)
    back = [attend_backward(call, dy, q, *kv, merged, merged_lse, m) for call, *kv, m in runs]
    near(sum(x[0].double() for x in back), wanted[0], 3 * bound)
    near(torch.cat([x[1] for x in back], 1), wanted[1], 3 * bound)
    near(torch.cat([x[2] for x in back], 1), wanted[2], 3 * bound)
    assert {x.dtype for each in back for x in each} == {wanted_type}
    assert merged_lse.dtype == torch.promote_types(wanted_type, torch.float32)


def test_this_torch_has_a_kernel_for_every_type():
    for dtype in DTYPES:
        for masked in (False, True):
            assert choose_kernel(CPU, getattr(torch, dtype), masked, False, True, 8) is not PLAIN_KERNEL


def missing(call, q, k, v, mask):
    raise AttributeError("'_OpNamespace' 'aten' object has no attribute 'a_kernel'")


def wrong(call, q, k, v, mask):
    out, lse = kernels.KERNELS[0].forward(call, q, k, v, mask)
    return out, lse + 0.01


@pytest.mark.parametrize("forward", [missing, wrong])
def test_a_kernel_that_is_missing_or_differs_is_not_used(monkeypatch, forward):
    cpu = kernels.KERNELS[0]
    monkeypatch.setattr(kernels, "KERNELS", (AttentionKernel(forward, cpu.backward, cpu.takes), *kernels.KERNELS[1:]))
    if forward is wrong:
        monkeypatch.setitem(wrong.__globals__, "kernels", type("Old", (), {"KERNELS": (cpu,)}))
    assert choose_kernel(CPU, torch.float64, False, True, False, 8) is PLAIN_KERNEL


def test_heads_are_repeated_where_the_kernel_wants_that(monkeypatch):
    """As on a PyTorch whose CPU kernel does not read grouped heads."""
    q, k, v = draw(1, 5, 4, 8), draw(1, 6, 2, 8, seed=1), draw(1, 6, 2, 8, seed=2)
    call = AttentionCall(0.3, False)
    out, lse = attend_forward(call, q, k, v)
    native = attend_backward(call, q, q, k, v, out, lse)
    monkeypatch.setattr(kernels, "_groups_are_native", lambda: False)
    assert torch.equal(attend_forward(call, q, k, v)[0], out)
    for one, two in zip(attend_backward(call, q, q, k, v, out, lse), native, strict=True):
        assert one.shape == two.shape
        assert torch.allclose(one, two, rtol=1e-13)


@pytest.mark.parametrize("kind", ["causal", "rectangle", "masked"])
@pytest.mark.parametrize("features", [8, 5])
@pytest.mark.parametrize("groups", [4, 2])
def test_capped_scores_in_blocks_of_queries_are_dense_ones(monkeypatch, kind, features, groups):
    """Blocks of three queries, the last one of one; values with as many features as keys, or fewer."""
    monkeypatch.setattr(kernels, "QUERY_BLOCK", 3)
    tokens, keys, cap = 7, 7 if kind == "causal" else 9, 0.7
    q, k = draw(2, tokens, 4, 8, seed=1), draw(2, keys, groups, 8, seed=2)
    v, dy = draw(2, keys, groups, features, seed=3), draw(2, tokens, 4, features, seed=4)
    banned = torch.zeros(2, 1, tokens, keys, dtype=torch.bool)
    if kind == "causal":
        banned |= torch.ones(tokens, keys, dtype=torch.bool).triu(1)
    mask = None
    if kind == "masked":
        banned[1, :, 2:5, 4:] = True
        mask = torch.zeros(2, 1, tokens, keys, dtype=torch.float64).masked_fill(banned, hidden_score(torch.float64))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (x.repeat_interleave(4 // groups, 2) for x in leaves[1:])
    scores = cap * torch.tanh(torch.einsum("bthk,bshk->bhts", leaves[0], wide_k) * 0.3 / cap)
    scores = scores.masked_fill(banned, -torch.inf)
    expected = torch.einsum("bhts,bshk->bthk", scores.softmax(-1), wide_v)
    gradients = torch.autograd.grad(expected, leaves, dy)

    call = AttentionCall(0.3, kind == "causal", cap)
    out, lse = attend_forward(call, q, k, v, mask)
    near(out, expected.detach(), 1e-12)
    near(lse, scores.logsumexp(-1).detach(), 1e-12)
    for gradient, reference in zip(attend_backward(call, dy, q, k, v, out, lse, mask), gradients, strict=True):
        near(gradient, reference, 1e-12)
