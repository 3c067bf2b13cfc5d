"""experts(x, chosen, weight, up, down, more...): the operator of `model/ops/experts.py`.

Pairs of a token and an expert are sorted by expert, as in `moe`. Shapes: x (N, D), chosen and weight (N, K), up (E, 2F,
D) or (E, F, D), down (E, D, F).
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.model.graph import Operator
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.moe import RoutedPairs, expert_weights, run_routed
from pipefit.run.ops.moe_routing import ACTIVATIONS, gate_function


def build_experts(operator: Operator, context: OperatorContext) -> OperatorStep:
    attributes, layer = operator.attributes, context.layer
    gate = gate_function(attributes) if attributes["gated"] else ACTIVATIONS[attributes["activation"]]
    numbers = torch.arange(int(attributes["experts"]), device=context.device)
    first, names = attributes.get("first"), attributes.get("more", ())

    def run_selected(
        record: SavedForward, x: torch.Tensor, chosen: torch.Tensor, weight: Any, up: Any, down: Any, *more: Any
    ) -> torch.Tensor:
        expert, order = chosen.reshape(-1).sort(stable=True)
        further = dict(zip(names, more, strict=True))
        routed = RoutedPairs(x.reshape(-1, x.shape[-1]), weight, expert, order, further, may_skip=True)
        parameters = expert_weights(up, down, gate, routed)
        return run_routed(routed, parameters, numbers, first, record, layer).view(x.shape)

    return OperatorStep(run_selected, wants_record=True)


BUILDERS = {"experts": build_experts}
