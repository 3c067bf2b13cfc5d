"""experts(x, chosen, weight, up, down, more...): the operator of `model/ops/experts.py`.

Pairs of a token and an expert are sorted by expert, as in `moe`. Shapes: x (N, D), chosen and weight (N, K), up (E, 2F,
D) or (E, F, D), down (E, D, F), unless `transposed` or `rows` is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipefit.model.graph import Operator
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.moe import RoutedPairs, WeightForm, expert_weights, run_routed
from pipefit.run.ops.moe_routing import ACTIVATIONS, gate_function


def _gate_of(attributes: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """Return the function of up's result, and of the factor's if that has a weight of its own."""
    activation = ACTIVATIONS[attributes["activation"]]
    if "factor_weight" in attributes.get("more", ()):
        return lambda gate, factor: activation(gate) * factor
    return gate_function(attributes) if attributes["gated"] else activation


def build_experts(operator: Operator, context: OperatorContext) -> OperatorStep:
    attributes, layer = operator.attributes, context.layer
    gate = _gate_of(attributes)
    numbers = torch.arange(int(attributes["experts"]), device=context.device)
    first, names = attributes.get("first"), attributes.get("more", ())
    scales_inputs, transposed = attributes.get("scaled") == "inputs", attributes.get("transposed", ())
    up_form, down_form = (WeightForm(name in transposed, int(attributes.get("rows", 0))) for name in ("up", "down"))

    def run_selected(
        record: SavedForward, x: torch.Tensor, chosen: torch.Tensor, weight: Any, up: Any, down: Any, *more: Any
    ) -> torch.Tensor:
        expert, order = chosen.reshape(-1).sort(stable=True)
        further = dict(zip(names, more, strict=True))
        flat = x.reshape(-1, x.shape[-1])
        routed = RoutedPairs(flat, weight, expert, order, further, may_skip=True, scales_inputs=scales_inputs)
        parameters = expert_weights(up, down, gate, routed)._replace(up_form=up_form, down_form=down_form)
        return run_routed(routed, parameters, numbers, first, record, layer).view(x.shape)

    return OperatorStep(run_selected, wants_record=True)


BUILDERS = {"experts": build_experts}
