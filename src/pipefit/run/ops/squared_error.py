"""squared_error(prediction, target): the sum of squared differences, in float32 or wider; the difference is kept."""

from __future__ import annotations

import torch

from pipefit.model.graph import Operator
from pipefit.run.autograd.attention_kernels import wide_of
from pipefit.run.ops import Context, Step


def squared_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    wide = wide_of(prediction.dtype)
    return (prediction.to(wide) - target.to(wide)).square().sum()


def build(operator: Operator, context: Context) -> Step:
    return Step(squared_error)


BUILDERS = {"squared_error": build}
