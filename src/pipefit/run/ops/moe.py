"""moe(x, router, gate_up, down, more...): the operator of `model/ops/moe.py`, dropless, with weight gradients deferred
to W.

N = B*T*top_k pairs of (token, expert) are sorted by expert; every product is then one matrix product per expert. On
CUDA in bfloat16 these are PyTorch's grouped products, which need no count on the host. Otherwise the host reads the
number of pairs per expert, which on CUDA waits for the device once per layer. Shapes: x (B, T, D), router (E, D),
gate_up (E, 2F, D), down (E, D, F).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from pipefit.model.graph import Operator
from pipefit.run.autograd.saved_forward import DeferredGradient, SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.linear import add_product, apply_linear
from pipefit.run.ops.moe_routing import gate_function, select_experts
from pipefit.run.sharded.weights import add_gradient, leaf_parameter, whole_weight


class WeightForm(NamedTuple):
    """The storage of the matrices of all experts in one parameter."""

    transposed: bool = False
    "Whether the matrix of an expert is (I, O)."
    rows: int = 0
    "Rows of an expert, if the experts have no dimension of their own."

    def split_experts(self, stored: torch.Tensor) -> torch.Tensor:
        """Return a view with the experts as its first dimension."""
        return stored.view(-1, self.rows, stored.shape[-1]) if self.rows else stored

    def stack_matrices(self, weight: Any) -> torch.Tensor:
        """Return the matrices of all experts (E, O, I)."""
        stored = self.split_experts(whole_weight(weight))
        return stored.transpose(1, 2) if self.transposed else stored


USUAL_FORM = WeightForm()
"""Weights (E, O, I)."""


class _ExpertLinear(torch.autograd.Function):
    """y_p = x_p W_e^T for every pair p of expert e: x (N, I) sorted by expert, ends (E,). `stored` is the weight (E, O,
    I) and its form."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, leaf: Any, stored: Any, ends: Any, record: SavedForward, layer: int
    ) -> torch.Tensor:
        (weight, form), ctx.ends, ctx.record, ctx.layer = stored, ends, record, layer
        ctx.weight, ctx.form = weight, form
        ctx.save_for_backward(x if weight.requires_grad else None)
        return expert_product(x, form.stack_matrices(weight).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        weight, deferred = ctx.weight, ctx.record.deferred
        if weight.requires_grad:
            (x,) = ctx.saved_tensors
            if deferred is None:
                accumulate_experts(weight, ctx.ends, x, dy, ctx.form)
            else:
                factors = weight, ctx.ends, x.detach(), dy, ctx.form
                deferred.append(DeferredGradient(ctx.layer, accumulate_experts, factors))
        dx = expert_product(dy, ctx.form.stack_matrices(weight), ctx.ends) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


class _GateFunction(torch.autograd.Function):
    """A function of gate_up (N, 2F), such as activation(g) * u of its halves, or of gate and up; saves only these."""

    @staticmethod
    def forward(ctx: Any, gate: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.gate = gate
        ctx.save_for_backward(*parts)
        result: torch.Tensor = gate(*parts)
        return result

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        with torch.enable_grad():
            leaves = [part.detach().requires_grad_() for part in ctx.saved_tensors]
            out = ctx.gate(*leaves)
        return None, *torch.autograd.grad(out, leaves, dy)


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


def accumulate_experts(
    weight: Any, ends: Any, x: torch.Tensor, dy: torch.Tensor, form: WeightForm = USUAL_FORM
) -> None:
    """Add dy_e^T x_e of every expert to the weight's buffer (E, O, I), or its transpose, by the weight's form."""
    a, b = (x, dy) if form.transposed else (dy, x)

    def add_expert_gradients(buffer: torch.Tensor) -> None:
        buffer = form.split_experts(buffer)
        if isinstance(ends, torch.Tensor):
            buffer.add_(functional.grouped_mm(a.t(), b, offs=ends))
            return
        start = 0
        for expert, stop in enumerate(ends):
            if stop > start:
                add_product(buffer[expert], a[start:stop].t(), b[start:stop])
            start = stop

    add_gradient(weight, add_expert_gradients)


class ExpertWeights(NamedTuple):
    """The parameters of experts, and the function between their projections."""

    gate_up: Any
    down: Any
    gate: Callable[..., torch.Tensor]
    gate_up_bias: Any = None
    down_bias: Any = None
    factor: Any = None
    "Weight of the gate's factor, if gate_up is that of the gate alone."
    up_form: WeightForm = USUAL_FORM
    "Of gate_up and factor."
    down_form: WeightForm = USUAL_FORM

    def count_experts(self) -> int:
        """Return the number of experts on this device."""
        return int(self.down.shape[0]) // (self.down_form.rows or 1)


def run_experts(
    x: torch.Tensor, expert: torch.Tensor, weights: ExpertWeights, ends: Any, record: SavedForward, layer: int
) -> Any:
    """Apply the experts to their pairs, x (N, D) sorted by expert. `expert` (N,) is the number of each pair's expert on
    this device."""

    def multiply(values: Any, weight: Any, form: WeightForm) -> Any:
        return _ExpertLinear.apply(values, leaf_parameter(weight), (weight, form), ends, record, layer)

    inner = multiply(x, weights.gate_up, weights.up_form)
    if weights.gate_up_bias is not None:
        inner = inner + weights.gate_up_bias[expert]
    factors = () if weights.factor is None else (multiply(x, weights.factor, weights.up_form),)
    out = multiply(_GateFunction.apply(weights.gate, inner, *factors), weights.down, weights.down_form)
    return out if weights.down_bias is None else out + weights.down_bias[expert]


class RoutedPairs(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert."""

    flat: torch.Tensor
    "Tokens (N, D)."
    weights: torch.Tensor
    "Of every pair, in the order of the tokens (N, top_k), in the wide dtype."
    expert: torch.Tensor
    "Of every pair."
    order: torch.Tensor
    "Place of every pair in the order of the tokens."
    further: Mapping[str, Any]
    "Further inputs of the operator, by the names in its attribute `more`."
    may_skip: bool = False
    "Whether numbers beyond the last expert, which select none, are possible."
    scales_inputs: bool = False
    "Whether the weights scale the inputs of the experts in place of their outputs."

    def scale_rows(self, order: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of the pairs at the places `order`, each multiplied by its weight."""
        return rows * self.weights.to(rows.dtype).reshape(-1)[order].unsqueeze(-1)


def route_tokens(
    operator: Operator, x: torch.Tensor, router: Any, more: Sequence[Any], record: SavedForward, layer: int
) -> RoutedPairs:
    """Return the pairs of the tokens of x (B, T, D), by the router's weight (E, D)."""
    attributes = operator.attributes
    flat, further = x.reshape(-1, x.shape[-1]), dict(zip(attributes.get("more", ()), more, strict=True))
    logits = apply_linear(flat, router, further.get("router_bias"), record, layer)
    wide = torch.promote_types(x.dtype, torch.float32)
    weights, chosen = select_experts(attributes, logits, wide, further.get("correction"))
    expert, order = chosen.reshape(-1).sort(stable=True)
    return RoutedPairs(flat, weights, expert, order, further)


def expert_weights(gate_up: Any, down: Any, gate: Callable[..., torch.Tensor], pairs: RoutedPairs) -> ExpertWeights:
    """Return the parameters of the experts on this device."""
    names = ("gate_up_bias", "down_bias", "factor_weight")
    return ExpertWeights(gate_up, down, gate, *(pairs.further.get(name) for name in names))


def join_outputs(pairs: RoutedPairs, order: torch.Tensor, token: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the sum (N, D) of the weighted outputs of each token's pairs: of those at the places `order`, which are of
    the tokens `token`."""
    out = out if pairs.scales_inputs else pairs.scale_rows(order, out)
    return torch.zeros_like(pairs.flat).index_add(0, token, out)


def local_pairs(ends: Sequence[int], first: int, count: int) -> tuple[slice, list[int]]:
    """Return the pairs of `count` experts that begin with the expert `first`, and the end of each expert's pairs among
    them."""
    start = ends[first - 1] if first else 0
    mine = ends[first : first + count]
    return slice(start, mine[-1]), [end - start for end in mine]


def run_routed(
    routed: RoutedPairs,
    parameters: ExpertWeights,
    numbers: torch.Tensor,
    first: int | None,
    record: SavedForward,
    layer: int,
) -> torch.Tensor:
    """Return the sums (N, D) of the weighted outputs of each token's experts. Experts have the `numbers`; if `first` is
    given, only those from there on are on this device. Pairs of a number beyond the last one give nothing."""
    expert, order, x = routed.expert, routed.order, routed.flat
    ends: Any = torch.searchsorted(expert, numbers, right=True, out_int32=True)
    outside = None
    if first is not None or counts_on_host(x):
        count = len(numbers) if first is None else parameters.count_experts()
        pairs, ends = local_pairs(ends.tolist(), first or 0, count)
        expert, order = expert[pairs], order[pairs]
        expert = expert - first if first else expert
    elif routed.may_skip:  # rows beyond the last end are undefined in grouped products
        outside = (expert >= len(numbers)).unsqueeze(-1)
        expert = expert.clamp(max=len(numbers) - 1)
    token = order // routed.weights.shape[-1]
    x = routed.scale_rows(order, x[token]) if routed.scales_inputs else x[token]
    x = x if outside is None else x.masked_fill(outside, 0.0)  # masks undefined gradients as well
    out = run_experts(x, expert, parameters, ends, record, layer)
    return join_outputs(routed, order, token, out if outside is None else out.masked_fill(outside, 0.0))


def build_moe(operator: Operator, context: OperatorContext) -> OperatorStep:
    layer, gate = context.layer, gate_function(operator.attributes)
    numbers = torch.arange(int(operator.attributes["experts"]), device=context.device)
    first = operator.attributes.get("first")

    def run_moe(
        record: SavedForward, x: torch.Tensor, router: Any, gate_up: Any, down: Any, *more: Any
    ) -> torch.Tensor:
        routed = route_tokens(operator, x, router, more, record, layer)
        parameters = expert_weights(gate_up, down, gate, routed)
        return run_routed(routed, parameters, numbers, first, record, layer).view(x.shape)

    return OperatorStep(run_moe, wants_record=True)


BUILDERS = {"moe": build_moe}
