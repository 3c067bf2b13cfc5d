"""Collectives over the shard axis: the right parts, and gradients that follow the forms, in all lowerings, even and
uneven, with units and with empty parts, over 2 to 4 processes in float64.

The reference is the duality itself: a function of the whole tensor, computed once on one device.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from tests.support.processes import run_processes

from pipefit.cost.comm.lowerings import LOWERINGS
from pipefit.errors import PipefitError
from pipefit.run.sharded import parts as shard_parts
from pipefit.run.sharded.collectives import AllGather, AllReduce, AllToAll, ReduceScatter, ShardContext, ShardSlice
from pipefit.run.transfers import comms

pytestmark = pytest.mark.gloo

WAYS = [
    ((1, 1), 8, 0), ((5, 2), 9, 0), ((1, 0), 3, 0),
    ((1, 1, 1), 9, 0), ((3, 2, 2), 11, 0), ((2, 1, 1), 12, 4), ((1, 1, 1), 2, 0),
    ((4, 3, 1, 2), 13, 0), ((1, 1, 1, 1), 2, 0), ((0, 1, 0, 1), 5, 0),
]  # fmt: skip
"""(shares, length of the split dimension, units): some leave devices with nothing."""

HOW = list(itertools.product(LOWERINGS, LOWERINGS))


def only_even(call):
    """An even kernel that first proves with everyone that the parts are of one size."""

    def checked(a, b, group):
        sizes = [None] * dist.get_world_size(group)
        dist.all_gather_object(sizes, (a.numel(), b.numel()), group=group)
        assert len({*sizes}) == 1, f"an uneven tensor reached an even collective: {sizes}"
        return call(a, b, group)

    return checked


def check(group, rank, count):
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        setattr(comms, name, only_even(getattr(comms, name)))
    done = 0
    for shares, length, units in [way for way in WAYS if len(way[0]) == count]:
        context = ShardContext(group=group, shares=shares, position=rank)
        runs = context.runs(length, units)
        if units:
            assert all((stop - start) % (length // units) == 0 for start, stop in runs)
        for dim, shape in ((0, (length, 3)), (1, (2, length, 3)), (2, (2, 3, length))):
            for how in HOW:
                check_parts(context, runs, dim, shape, how)
                done += 1
        check_whole(context, runs, (2, length, 3))
        for how in HOW:
            check_exchange(context, runs, (length, 2, 7), how)
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        setattr(comms, name, getattr(comms, name).__closure__[0].cell_contents)
    return done


def check_parts(context, runs, dim, shape, how):
    start, stop = runs[context.position]
    torch.manual_seed(5)
    whole = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(context.size, *shape, dtype=torch.float64)
    own = weight[context.position]
    part = whole.narrow(dim, start, stop - start)
    # G to I: every device uses the whole tensor differently; the parts get the sum of the gradients.
    leaf = part.clone().requires_grad_()
    whole_again = AllGather.apply(leaf, runs, dim, context, how)
    assert torch.equal(whole_again, whole)
    (whole_again * own).sum().backward()
    assert torch.allclose(leaf.grad, weight.sum(0).narrow(dim, start, stop - start), rtol=1e-13, atol=1e-13)
    # P to G: the sum of everyone's addends; a gradient that is split.
    addend = own.clone().requires_grad_()
    scattered = ReduceScatter.apply(addend, runs, dim, context, how)
    assert torch.allclose(scattered, weight.sum(0).narrow(dim, start, stop - start), rtol=1e-13, atol=1e-13)
    (scattered * part).sum().backward()
    assert torch.equal(addend.grad, whole)


def check_whole(context, runs, shape):
    """Conversions that are of one kind only."""
    start, stop = runs[context.position]
    weight = torch.randn(context.size, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    own = weight[context.position]
    addend = own.clone().requires_grad_()
    summed = AllReduce.apply(addend, context)
    assert torch.allclose(summed, weight.sum(0), rtol=1e-13, atol=1e-13)
    (summed * own).sum().backward()
    assert torch.allclose(addend.grad, weight.sum(0), rtol=1e-13, atol=1e-13)
    # I to G: nothing moves; the gradient is partial: zeros where others hold the part.
    leaf = weight[0].clone().requires_grad_()
    sliced = ShardSlice.apply(leaf, runs[context.position], 1)
    assert torch.equal(sliced, weight[0].narrow(1, start, stop - start))
    sliced.sum().backward()
    total = leaf.grad.clone()
    dist.all_reduce(total, group=context.group)
    assert torch.equal(total, torch.ones_like(leaf)) and leaf.grad.sum() == sliced.numel()


def check_exchange(context, runs, shape, how):
    """G0 to G2 and, in the backward, the other way: the same numbers as through the whole tensor."""
    whole, weight = (
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (7, 8)
    )
    targets = context.runs(shape[2])
    (start, stop), (first, last) = runs[context.position], targets[context.position]
    leaf = whole[start:stop].clone().requires_grad_()
    found = AllToAll.apply(leaf, (runs, 0), (targets, 2), context, how)
    assert torch.equal(found, whole[:, :, first:last])
    (found * weight[:, :, first:last]).sum().backward()
    assert torch.equal(leaf.grad, weight[start:stop])


@pytest.mark.parametrize("count", [2, 3, 4])
def test_collectives_and_their_gradients(count):
    done = sum(len(shares) == count for shares, _, _ in WAYS) * 3 * len(HOW)
    assert run_processes(check, count, count) == [done] * count and done > 0


def refusals(group, rank):
    context = ShardContext(group=group, shares=(2, 1), position=rank)
    runs = context.runs(6)
    part = torch.zeros(runs[rank][1] - runs[rank][0], 4)
    told = []
    for call in (
        lambda: shard_parts.gather_parts(torch.zeros(3, 2), runs, 0, context, "padded"),
        lambda: shard_parts.scatter_sums(torch.zeros(5, 2), runs, 0, context, "alltoallv"),
        lambda: shard_parts.exchange_parts(part, (runs, 0), (runs, 1), context),
        lambda: comms.all_gather(torch.zeros(6), torch.zeros(4 if rank == 0 else 2), group),
        lambda: comms.reduce_scatter(torch.zeros(4 if rank == 0 else 2), torch.zeros(6), group),
    ):
        with pytest.raises(PipefitError) as caught:
            call()
        told.append(caught.value.full_text())
    return told


def test_a_part_of_another_size_is_refused_before_it_is_sent():
    """On every rank, so that none waits for the others."""
    for told in run_processes(refusals, 2):
        part, sums, exchange, gather, scatter = told
        assert "not this device's part" in part and "seen: 3 of 6" in part and "runs 0-4 4-6" in part
        assert "reduce_scatter along dimension 0" in sums and "seen: 5 of 6" in sums
        assert "all_to_all along dimension 1" in exchange
        for one in (gather, scatter):
            assert "takes even ones only" in one and "a whole of 2 equal parts" in one
