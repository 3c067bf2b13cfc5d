"""Attention in bfloat16 over many slices: results and gradients are summed in float32.

The error of every sum, root mean square, beside what one rounding to bfloat16 leaves of the exact figure: the kernels
round each slice's part, so about twice that; sums in bfloat16 leave 2.6 to 3 times that.
"""

from __future__ import annotations

import torch

from pipefit.run.autograd.attention_runs import AttentionSpec, KeyValueCache, backward_over, forward_over
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.stage_inputs import StageInputs

SLICES, TOKENS, HEADS, GROUPS, FEATURES = 32, 8, 4, 2, 16
SCALE = 0.25


def draw(seed, heads):
    numbers = torch.randn(1, SLICES * TOKENS, heads, FEATURES, generator=torch.Generator().manual_seed(seed))
    return numbers.to(torch.bfloat16)


def exact(q, k, v, dy):
    """(out, dq, dk, dv) of the uncut sequence in float64, by a table of scores under PyTorch's autograd."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in leaves[1:])
    scores = torch.einsum("bthk,bshk->bhts", leaves[0], wide_k) * SCALE
    above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = torch.einsum("bhts,bshk->bthk", scores.masked_fill(above, -torch.inf).softmax(-1), wide_v)
    return out.detach(), *torch.autograd.grad(out, leaves, dy.double())


def in_slices(q, k, v, dy):
    """The same, slice by slice, as the operator runs them."""
    past, sees = KeyValueCache(), AttentionSpec(SCALE, None, None)
    parts = [[x[:, i * TOKENS : (i + 1) * TOKENS] for x in (q, k, v, dy)] for i in range(SLICES)]
    records = [SavedForward(0, i, StageInputs(), True) for i in range(SLICES)]
    made = []
    for record, part in zip(records, parts, strict=True):
        past.put_keys(record.slice, part[1], part[2])
        made.append(forward_over(past, record, part[0], sees))
    back = []
    for record, part, (out, lse) in reversed([*zip(records, parts, made, strict=True)]):
        back.append(backward_over(past, record, part[3], part[0], out, lse, sees))
    gradients = (torch.cat(each, 1) for each in zip(*reversed(back), strict=True))
    return torch.cat([out for out, _ in made], 1), *gradients


def test_sums_over_slices_are_in_float32():
    arguments = draw(1, HEADS), draw(2, GROUPS), draw(3, GROUPS), draw(4, HEADS)
    for name, found, wanted in zip(("out", "dq", "dk", "dv"), in_slices(*arguments), exact(*arguments), strict=True):
        assert found.dtype == torch.bfloat16
        error, least = ((x.double() - wanted).square().mean().sqrt() for x in (found, wanted.to(torch.bfloat16)))
        assert error <= 2.25 * least, f"{name}: {float(error / least):.2f} times one rounding"
