"""The exact global gradient norm, with every parameter counted once, and the factor that clips to it.

A replicated gradient is equal on all its devices after reduction: only position 0 along those axes counts it. A sharded
one (shards, ZeRO-1) is counted by each device for its own part, and of several groups that shard the state only in the
first. A tied parameter is counted by its owner's lane.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipefit.layout import Mesh
from pipefit.optimizers import update_elements
from pipefit.run.update.buckets import GradientBucket
from pipefit.run.update.state_devices import state_devices


def counts_in_norm(bucket: GradientBucket, group: Mesh, device: int) -> bool:
    """Return True if this device adds the bucket (its owned part) to the global sum of squares."""
    entry = bucket.entries[0]
    copies = [name for name in (*entry.sum_over, *entry.alike_over) if name not in entry.state_axes]
    is_first = state_devices(group, device, entry).is_first
    return entry.counted and is_first and all(group.axis_position(device, name) == 0 for name in copies)


def sum_of_squares(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of flat pieces, float64, shape ()."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    run = update_elements(device)
    for piece in pieces:
        for part in piece.split(run) if piece.numel() else ():
            total += torch.linalg.vector_norm(part, dtype=torch.float64).square()
    return total


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that clips gradients, as in `torch.nn.utils.clip_grad_norm_`: never above 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
