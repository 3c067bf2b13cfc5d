"""gated_delta(q, k, v, decay, beta) {chunk, scale, norm_eps}: the operator of `model/ops/gated_delta.py`, computed by
`run/autograd/delta_rule.py`."""

from __future__ import annotations

import torch

from pipefit.model.graph import Operator
from pipefit.run.autograd.delta_rule import DeltaFunction, DeltaRule
from pipefit.run.ops import OperatorContext, OperatorStep


def build_gated_delta(operator: Operator, context: OperatorContext) -> OperatorStep:
    attributes = operator.attributes
    eps = attributes["norm_eps"]
    rule = DeltaRule(int(attributes["chunk"]), float(attributes["scale"]), None if eps is None else float(eps))

    def run_gated_delta(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        result: torch.Tensor = DeltaFunction.apply(q, k, v, decay, beta, rule)
        return result

    return OperatorStep(run_gated_delta)


BUILDERS = {"gated_delta": build_gated_delta}
