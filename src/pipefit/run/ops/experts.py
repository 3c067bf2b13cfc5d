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
from pipefit.run.ops.moe import RoutedPairs, counts_on_host, expert_weights, join_outputs, local_pairs, run_experts
from pipefit.run.ops.moe_routing import ACTIVATIONS, gate_function


def build_experts(operator: Operator, context: OperatorContext) -> OperatorStep:
    attributes, layer = operator.attributes, context.layer
    gate = gate_function(attributes) if attributes["gated"] else ACTIVATIONS[attributes["activation"]]
    experts, first = int(attributes["experts"]), attributes.get("first")
    numbers, names = torch.arange(experts, device=context.device), attributes.get("more", ())

    def run_selected(
        record: SavedForward, x: torch.Tensor, chosen: torch.Tensor, weight: Any, up: Any, down: Any, *more: Any
    ) -> torch.Tensor:
        expert, order = chosen.reshape(-1).sort(stable=True)
        further = dict(zip(names, more, strict=True))
        routed = RoutedPairs(x.reshape(-1, x.shape[-1]), weight, expert, order, further)
        ends: Any = torch.searchsorted(expert, numbers, right=True, out_int32=True)
        if first is None and not counts_on_host(x) and up.shape[0] == experts:
            return _run_on_device(routed, ends, up, down, record).view(x.shape)
        pairs, ends = local_pairs(ends.tolist(), int(first or 0), down)
        expert, order = expert[pairs] - int(first or 0), order[pairs]
        token = order // chosen.shape[-1]
        out = run_experts(routed.flat[token], expert, expert_weights(up, down, gate, routed), ends, record, layer)
        return join_outputs(routed, order, token, out).view(x.shape)

    def _run_on_device(routed: RoutedPairs, ends: Any, up: Any, down: Any, record: SavedForward) -> torch.Tensor:
        """Run all pairs. Rows of no expert are undefined in grouped products, so they are set to zero on both sides."""
        outside = (routed.expert >= experts).unsqueeze(-1)
        token = routed.order // routed.weights.shape[-1]
        x = routed.flat[token].masked_fill(outside, 0.0)
        inside = routed.expert.clamp(max=experts - 1)
        out = run_experts(x, inside, expert_weights(up, down, gate, routed), ends, record, layer)
        return join_outputs(routed, routed.order, token, out.masked_fill(outside, 0.0))

    return OperatorStep(run_selected, wants_record=True)


BUILDERS = {"experts": build_experts}
