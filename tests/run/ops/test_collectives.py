"""Collectives over the shard axis: the right parts, and gradients that follow the forms, even and uneven, with units.

The reference is the duality itself: a function of the whole tensor, computed once on one device.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.run.processes import run_processes

from pipefit.run.shard_comm import AllGather, AllReduce, ReduceScatter, ShardContext, ShardSlice

pytestmark = pytest.mark.gloo

WAYS = [((1, 1, 1), 9, 0), ((3, 2, 2), 11, 0), ((2, 1, 1), 12, 4), ((1, 1, 1), 2, 0)]
"""(shares, length of the split dimension, units): the last leaves one device with nothing."""


def check(group, rank):
    count = 3
    for shares, length, units in WAYS:
        context = ShardContext(group=group, shares=shares, position=rank)
        runs = context.runs(length, units)
        if units:
            assert all((stop - start) % (length // units) == 0 for start, stop in runs)
        start, stop = runs[rank]
        torch.manual_seed(5)
        for dim, shape in ((0, (length, 3)), (1, (2, length, 3)), (2, (2, 3, length))):
            whole = torch.randn(shape, dtype=torch.float64)
            weight = torch.randn(count, *shape, dtype=torch.float64)
            own = weight[rank]
            part = whole.narrow(dim, start, stop - start)
            # G to I: every device uses the whole tensor differently; the parts get the sum of the gradients.
            leaf = part.clone().requires_grad_()
            gathered = AllGather.apply(leaf, runs, dim, context)
            assert torch.equal(gathered, whole)
            (gathered * own).sum().backward()
            assert torch.allclose(leaf.grad, weight.sum(0).narrow(dim, start, stop - start), rtol=1e-13)
            # P to G, then P to I: the sum of everyone's addends; a gradient that is split, then partial.
            addend = own.clone().requires_grad_()
            scattered = ReduceScatter.apply(addend, runs, dim, context)
            assert torch.allclose(scattered, weight.sum(0).narrow(dim, start, stop - start), rtol=1e-13)
            (scattered * part).sum().backward()
            assert torch.equal(addend.grad, whole)
            addend = own.clone().requires_grad_()
            summed = AllReduce.apply(addend, context)
            assert torch.allclose(summed, weight.sum(0), rtol=1e-13)
            (summed * own).sum().backward()
            assert torch.allclose(addend.grad, weight.sum(0), rtol=1e-13)
            # I to G: nothing moves; the gradient is partial: zeros where others hold the part.
            leaf = whole.clone().requires_grad_()
            sliced = ShardSlice.apply(leaf, runs[rank], dim)
            assert torch.equal(sliced, part)
            sliced.sum().backward()
            total = leaf.grad.clone()
            dist.all_reduce(total, group=group)
            assert torch.equal(total, torch.ones_like(whole)) and leaf.grad.sum() == part.numel()
    return True


def test_collectives_and_their_gradients():
    assert run_processes(check, 3) == [True] * 3
