"""moe(x, router, gate_up, down): the operator of `model/ops/moe.py`, dropless, with weight gradients deferred to W.

N = B*T*top_k pairs of (token, expert) are sorted by expert; every product is then one matrix product per expert. On
CUDA in bfloat16 these are PyTorch's grouped products, which need no count on the host. Otherwise the host reads the
number of pairs per expert, which on CUDA waits for the device once per layer. Shapes: x (B, T, D), router (E, D),
gate_up (E, 2F, D), down (E, D, F).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from pipefit.model.graph import Operator
from pipefit.run.autograd.saved_forward import DeferredGradient, SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.linear import add_product, apply_linear
from pipefit.run.sharded.weights import add_gradient, leaf_parameter, whole_weight

EXPERT_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
}


class _ExpertLinear(torch.autograd.Function):
    """y_p = x_p W_e^T for every pair p of expert e: x (N, I) sorted by expert, weight (E, O, I), ends (E,)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, leaf: Any, weight: Any, ends: Any, record: SavedForward, layer: int
    ) -> torch.Tensor:
        ctx.weight, ctx.ends, ctx.record, ctx.layer = weight, ends, record, layer
        ctx.save_for_backward(x if weight.requires_grad else None)
        return expert_product(x, whole_weight(weight).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        weight, deferred = ctx.weight, ctx.record.deferred
        if weight.requires_grad:
            (x,) = ctx.saved_tensors
            if deferred is None:
                accumulate_experts(weight, ctx.ends, x, dy)
            else:
                deferred.append(DeferredGradient(ctx.layer, accumulate_experts, (weight, ctx.ends, x.detach(), dy)))
        dx = expert_product(dy, whole_weight(weight), ctx.ends) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


class _GateFunction(torch.autograd.Function):
    """activation(g) * u of the halves of gate_up (N, 2F); saves only gate_up."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, activation: Any) -> torch.Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return activation(gate) * up

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        with torch.enable_grad():
            leaf = ctx.saved_tensors[0].detach().requires_grad_()
            gate, up = leaf.chunk(2, -1)
            out = ctx.activation(gate) * up
        return *torch.autograd.grad(out, leaf, dy), None


def counts_on_host(x: torch.Tensor) -> bool:
    """Return True if the pairs of each expert must be counted on the host."""
    return not (x.is_cuda and x.dtype == torch.bfloat16 and hasattr(functional, "grouped_mm"))


def expert_product(x: torch.Tensor, weight: torch.Tensor, ends: Any) -> torch.Tensor:
    """Return (N, O) from x (N, I) sorted by expert and weight (E, I, O); `ends` (E,) is a tensor or a list."""
    if isinstance(ends, torch.Tensor):
        return functional.grouped_mm(x, weight, offs=ends)
    out = x.new_empty((x.shape[0], weight.shape[2]))
    start = 0
    for expert, stop in enumerate(ends):
        if stop > start:
            torch.mm(x[start:stop], weight[expert], out=out[start:stop])
        start = stop
    return out


def accumulate_experts(weight: Any, ends: Any, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Add dy_e^T x_e of every expert to the weight's buffer (E, O, I)."""

    def add_expert_gradients(buffer: torch.Tensor) -> None:
        if isinstance(ends, torch.Tensor):
            buffer.add_(functional.grouped_mm(dy.t(), x, offs=ends))
            return
        start = 0
        for expert, stop in enumerate(ends):
            if stop > start:
                add_product(buffer[expert], dy[start:stop].t(), x[start:stop])
            start = stop

    add_gradient(weight, add_expert_gradients)


def run_experts(
    x: torch.Tensor, gate_up: Any, down: Any, activation: Any, ends: Any, record: SavedForward, layer: int
) -> Any:
    """Apply the experts to their pairs, x (N, D) sorted by expert."""
    inner: Any = _ExpertLinear.apply(x, leaf_parameter(gate_up), gate_up, ends, record, layer)
    return _ExpertLinear.apply(_GateFunction.apply(inner, activation), leaf_parameter(down), down, ends, record, layer)


def build_moe(operator: Operator, context: OperatorContext) -> OperatorStep:
    experts, top = int(operator.attributes["experts"]), int(operator.attributes["top_k"])
    normalize = bool(operator.attributes["normalize"])
    activation = EXPERT_ACTIVATIONS[operator.attributes["activation"]]
    layer = context.layer
    wide = torch.promote_types(context.dtype, torch.float32)
    numbers = torch.arange(experts, device=context.device)
    first = operator.attributes.get("first")

    def own_pairs(ends: Sequence[int], down: Any) -> tuple[slice, list[int]]:
        """Return the pairs of the local experts, and the end of each expert's pairs among them."""
        start = ends[first - 1] if first else 0
        mine = ends[first : first + down.shape[0]]
        return slice(start, mine[-1]), [end - start for end in mine]

    def run_moe(record: SavedForward, x: torch.Tensor, router: Any, gate_up: Any, down: Any) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        logits = apply_linear(flat, router, None, record, layer)
        weights, chosen = torch.softmax(logits, -1, dtype=wide).topk(top, -1)
        if normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen, order = chosen.reshape(-1).sort(stable=True)
        ends: Any = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
        if first is not None or counts_on_host(x):
            ends = ends.tolist()
        if first is not None:
            pairs, ends = own_pairs(ends, down)
            order = order[pairs]
        token = order // top
        out = run_experts(flat[token], gate_up, down, activation, ends, record, layer)
        out = out * weights.to(x.dtype).reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, token, out).view(x.shape)

    return OperatorStep(run_moe, wants_record=True)


BUILDERS = {"moe": build_moe}
