"""fourier_features(time) {frequencies}: cosines and sines of times (B, T), (B, T, 2K), in float32 or wider."""

from __future__ import annotations

import torch

from pipefit.model.graph import Operator
from pipefit.model.ops.fourier_features import frequencies
from pipefit.run.ops import Context, Step
from pipefit.run.ops.elementwise import type_of


def build(operator: Operator, context: Context) -> Step:
    values = frequencies(int(operator.attributes["frequencies"]))
    rates = torch.tensor(values, dtype=torch.float64).to(context.device, type_of("float32", context))

    def features(time: torch.Tensor) -> torch.Tensor:
        angle = time.to(rates.dtype).unsqueeze(-1) * rates
        return torch.cat((angle.cos(), angle.sin()), dim=-1)

    return Step(features)


BUILDERS = {"fourier_features": build}
