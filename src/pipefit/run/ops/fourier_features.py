"""fourier_features(time) {frequencies}: cosines and sines of times (B, T), (B, T, 2K), in float32 or wider."""

from __future__ import annotations

import torch

from pipefit.model.graph import Operator
from pipefit.model.ops.fourier_features import fourier_frequencies
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.elementwise import torch_dtype


def build_fourier_features(operator: Operator, context: OperatorContext) -> OperatorStep:
    values = fourier_frequencies(int(operator.attributes["frequencies"]))
    rates = torch.tensor(values, dtype=torch.float64).to(context.device, torch_dtype("float32", context))

    def compute_features(time: torch.Tensor) -> torch.Tensor:
        angle = time.to(rates.dtype).unsqueeze(-1) * rates
        return torch.cat((angle.cos(), angle.sin()), dim=-1)

    return OperatorStep(compute_features)


BUILDERS = {"fourier_features": build_fourier_features}
