"""Small reductions inside of operators that every device of the shard axis computes in part."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from pipefit.lab.pace import pace_collective
from pipefit.run.sharded.parts import ShardContext

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def reduce_in_place(x: torch.Tensor, context: ShardContext, by: Literal["sum", "max"] = "sum") -> torch.Tensor:
    """Replace x by the sum or maximum over all devices and return it. Every device of the axis calls this together."""
    pace_collective(lambda: dist.all_reduce(x, op=_OPERATIONS[by], group=context.group))
    return x
