"""squared_error(prediction, target): the sum of squared differences, in float32 or wider; the difference is saved."""

from __future__ import annotations

import torch

from pipefit.model.graph import Operator
from pipefit.run.autograd.attention_kernels import statistics_dtype
from pipefit.run.ops import OperatorContext, OperatorStep


def squared_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    wide = statistics_dtype(prediction.dtype)
    return (prediction.to(wide) - target.to(wide)).square().sum()


def build_squared_error(operator: Operator, context: OperatorContext) -> OperatorStep:
    return OperatorStep(squared_error)


BUILDERS = {"squared_error": build_squared_error}
