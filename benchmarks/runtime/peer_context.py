"""Context parallelism in plain PyTorch, for `engine_peers.py`: keys and values gathered by hand.

PyTorch 2.13 has no context parallelism for CPUs. Under `torch.distributed.tensor.experimental.context_parallel` its
attention is a ring over the flash, memory-efficient and cuDNN kernels of CUDA; the kernel of CPUs has no sharding
strategy (`torch_problem` returns the error). FlexAttention, whose context parallelism gathers keys and values, has no
backward on CPUs. So every rank holds chunks r and 2c - 1 - r of the 2c chunks of a sequence, as PyTorch's load balancer
and pipefit deal them, gathers all keys and values by one collective a layer, and attends by two calls with a mask.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SequenceParts:
    """The part of each sequence on one rank, of `size`: positions, masks, and the order of gathered tokens."""

    def __init__(self, tokens: int, rank: int, size: int) -> None:
        chunks = torch.arange(tokens).chunk(2 * size)
        held = [torch.cat((chunks[index], chunks[2 * size - 1 - index])) for index in range(size)]
        self.positions = held[rank]
        self.size = size
        self.order = torch.cat(held).argsort()
        "For each token of the sequence, its place among the gathered ones."
        self.places = torch.cat(held)
        self.masks = []
        for queries in self.positions.chunk(2):
            seen = torch.arange(int(queries[-1]) + 1)
            hidden = seen[None, :] > queries[:, None]
            self.masks.append(torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")))


class _GatherSequence(torch.autograd.Function):
    """(N, B, G, t, K) of this rank's tokens -> (N, B, G, T, K) of all, in their order; backward reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, parts: SequenceParts) -> Tensor:
        ctx.parts = parts
        moved = part.movedim(3, 0).contiguous()
        gathered = moved.new_empty((parts.size * moved.shape[0], *moved.shape[1:]))
        ALL_GATHER(gathered, moved)
        return gathered[parts.order].movedim(0, 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        parts = ctx.parts
        moved = gradient.movedim(3, 0)[parts.places]
        part = moved.new_empty((moved.shape[0] // parts.size, *moved.shape[1:]))
        REDUCE_SCATTER(part, moved)
        return part.movedim(0, 3), None


def attend_sequence(q: Tensor, k: Tensor, v: Tensor, parts: SequenceParts) -> Tensor:
    """Return causal attention (B, H, t, K) of this rank's queries to the keys and values of all ranks."""
    keys, values = _GatherSequence.apply(torch.stack((k, v)), parts)
    results = [
        functional.scaled_dot_product_attention(
            queries, keys[:, :, : mask.shape[1]], values[:, :, : mask.shape[1]], attn_mask=mask, enable_gqa=True
        )
        for queries, mask in zip(q.chunk(2, 2), parts.masks, strict=True)
    ]
    return torch.cat(results, 2)


def torch_problem() -> str:
    """Return the error of PyTorch's own context parallelism in this world; empty if it works. All ranks call this."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    size = dist.get_world_size()
    mesh, x = init_device_mesh("cpu", (size,)), torch.randn(1, 2, 4 * size, 8)
    try:
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            leaf = x.detach().clone().requires_grad_()
            functional.scaled_dot_product_attention(leaf, leaf, leaf, is_causal=True).sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""
