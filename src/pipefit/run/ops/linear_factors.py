"""linear_factors(x, weight, bias|''): `apply_linear` on local rows or tokens, with the weight gradient over all
devices.

The backward gathers x and the output gradient over the shard axis and adds their full product to the buffers, the same
on every device: at once in a fused backward (B), or when W runs. Shapes: x (..., I), weight (O, I), bias (O,), y (...,
O), x and y split along one leading dimension.
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.model.graph import Operator
from pipefit.model.ops.exchange import lowering_of
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.linear import accumulate_linear, apply_linear, runs_narrow
from pipefit.run.ops.shape import deferred_size
from pipefit.run.sharded.parts import gather_parts


def build_linear_factors(operator: Operator, context: OperatorContext) -> OperatorStep:
    layer, shard, dim = context.layer, context.shard, int(operator.attributes["dim"])
    total, (how, gradient_lowering) = deferred_size(operator.attributes["whole"], context.shard), lowering_of(operator)
    assert shard is not None, "factors are gathered in a stage without a shard axis"
    narrow = runs_narrow(operator, context)

    def run_linear_factors(record: SavedForward, x: Any, weight: Any, bias: Any) -> Any:
        runs = shard.runs(total(record))

        def accumulate_factors(weight: Any, bias: Any, x: torch.Tensor, dy: torch.Tensor) -> None:
            whole_x = gather_parts(x, runs, dim, shard, how)
            whole_dy = gather_parts(dy, runs, dim, shard, gradient_lowering)
            accumulate_linear(weight, bias, whole_x, whole_dy, narrow)

        return apply_linear(x, weight, bias, record, layer, accumulate_factors, narrow)

    return OperatorStep(run_linear_factors, wants_record=True)


BUILDERS = {"linear_factors": build_linear_factors}
