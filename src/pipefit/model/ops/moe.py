"""moe(x_BTD, router_ED, gate_up_E2FD, down_EDF, more...) -> y_BTD: a mixture of gated expert MLPs (Mixtral, Qwen3-MoE).

    p_BTE = softmax(x router^T) in float32 or wider; the top_k largest per token, in torch.topk's order
    w = p[selected], divided by its sum if `normalize`, cast to the dtype of x
    g, u = halves (first F rows, last F rows) of x gate_up[e]^T;   h = activation(g) * u
    y = sum over the selected experts e of w_e (h down[e]^T)

Options: biases of router and experts, and a gate clamped to a limit l, g sigmoid(gain g) (u + 1), in gpt-oss; in
DeepSeek-V3 scores are sigmoids, and experts are selected by scores plus a correction, within the groups of experts
whose best scores have the largest sum. Weights are the scores without the correction.

No token is dropped. The auxiliary router loss is not part of the operator. N = B*T*top_k is the number of selected
pairs.

The forward saves x; the probabilities (B*T*E) and, if normalized, the selected ones (N) and their sums (B*T), all in
float32 or wider; three index vectors (N int64: selected experts, order by expert, token of each pair), and with
biases the expert of each pair. Per pair it saves the weight, the gathered x (D), the gate-and-up output (2F), h (F),
the output (D) and the weighted output (D). `moe_shard` also saves the outputs as they are sent back (D), and the
order of the received pairs by expert.

A deferred weight gradient (W) holds per pair: gathered x (D), the gradient of gate-and-up (2F), h (F), the gradient of
the output (D). Per token it holds x (D) and the gradient of the router's logits (E).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from pipefit.model.graph import Operator
from pipefit.model.ops.experts import ExpertWork
from pipefit.model.ops.kind import Flops, InternalCollectives, OperatorCall, OperatorKind, same_shape

EXPERT_PARTS = "expert_parts"
"""The attribute with the number of positions of an expert axis, if it divides the experts together with the shards."""

EXPERT_EXCHANGE = "expert_exchange"
"""The all-to-all over the devices of an expert axis and their shards, in the collectives of `moe_shard`."""


def _work_of(call: OperatorCall) -> ExpertWork:
    x, router, down = call.inputs[0], call.inputs[1], call.inputs[3]
    assert x is not None and router is not None and down is not None
    tokens = math.prod(x[:-1])
    experts, top = int(call.attributes["experts"]), int(call.attributes["top_k"])
    parts = int(call.attributes.get(EXPERT_PARTS, 1))
    everyone = tokens if down[0] == experts else call.symbols["B"] * call.symbols["T"] * parts
    pairs = everyone * top * down[0] // experts
    return ExpertWork(tokens, x[-1], 2 * down[2], down[2], pairs, call.compute_bytes)


def _routed_experts(call: OperatorCall) -> int:
    """The number of experts that the router selects from."""
    router = call.inputs[1]
    assert router is not None
    return router[0]


def _count_flops(call: OperatorCall) -> Flops:
    work = _work_of(call)
    product = 2 * work.tokens * work.features * _routed_experts(call) + work.product_flops
    return Flops(product, product, product)


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return operator.inputs


def _own_bytes(call: OperatorCall) -> int:
    work = _work_of(call)
    statistics = work.tokens * _routed_experts(call)
    statistics += work.pairs + work.tokens if call.attributes["normalize"] else 0
    statistics += work.pairs if "weight_scale" in call.attributes else 0
    indices = 4 if "down_bias" in call.attributes.get("more", ()) else 3
    return statistics * call.wide_bytes + work.saved_bytes(indices)


def _exchanged_bytes(call: OperatorCall) -> int:
    """Return the bytes that `moe_shard` saves beside its inputs (see above)."""
    work = _work_of(call)
    return _own_bytes(call) + work.pairs * (8 + work.features * call.compute_bytes)


def _pending_bytes(call: OperatorCall) -> int:
    work = _work_of(call)
    return work.tokens * _routed_experts(call) * call.compute_bytes + work.pending_bytes


def _inner_collectives(call: OperatorCall) -> InternalCollectives:
    """All-to-alls of the pairs' inputs to the experts and of their outputs back; the same for both gradients."""
    parts = int(call.attributes.get(EXPERT_PARTS, 1))
    tokens = call.symbols["B"] * call.symbols["T"] * parts
    size = float(tokens * int(call.attributes["top_k"]) * _work_of(call).features * call.compute_bytes)
    units = (tokens, _routed_experts(call))
    exchange = "all_to_all" if parts == 1 else EXPERT_EXCHANGE, size, "alltoallv", units
    return InternalCollectives(forward=(exchange, exchange), input_gradient=(exchange, exchange))


_MOE = OperatorKind(
    kind="moe",
    summary="Mixture of gated experts with softmax routing over the top_k; no token dropped, no auxiliary loss.",
    inputs=("x", "router_weight", "gate_up_weight", "down_weight", "more*"),
    attributes={
        "experts": "E",
        "top_k": "experts per token",
        "normalize": "whether the selected probabilities are divided by their sum",
        "activation": "`silu`, `gelu`, `gelu_tanh` or `relu`",
        "more": "names of further inputs: `router_bias`, `correction`, `gate_up_bias`, `down_bias`",
        "scores": "absent or `softmax`, or `sigmoid` of the router's logits",
        "groups": "absent, or [groups of experts, groups that a token selects, scores by which a group counts]",
        "clamp": "absent, or [gain, limit] of a clamped gate in place of the activation",
        "weight_scale": "factor of the weights; 1 where it is absent",
        EXPERT_PARTS: "positions of an expert axis that divide the experts beside the shards, if there is one",
        "first": "the first expert whose weights are here, where they are a run; the result is then an addend",
    },
    shapes=same_shape,
    gathers={1: 2, 2: 2, 3: 2},
    flops=_count_flops,
    saves=_saved_values,
    own_bytes=_own_bytes,
    pending_values=(0,),
    pending_bytes=_pending_bytes,
    forward_extra=lambda call: _work_of(call).sum_bytes,
    backward_extra=lambda call: _work_of(call).backward_peak(),
    deferred_extra=lambda call: _work_of(call).deferred_extra(),
    boundary=True,
    heavy=True,
    mixes_features=True,
)

OPERATORS = (
    _MOE,
    replace(
        _MOE,
        kind="moe_shard",
        summary="The same of this device's tokens and this device's experts: tokens are sent to their experts.",
        gathers={},
        own_bytes=_exchanged_bytes,
        backward_extra=lambda call: _work_of(call).backward_peak(freed=3),
        deferred_extra=lambda call: _work_of(call).deferred_extra(freed=3),
        talks=_inner_collectives,
    ),
)
