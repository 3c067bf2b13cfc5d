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
from functools import partial

from pipefit.model.graph import Operator
from pipefit.model.ops.kind import Flops, InternalCollectives, OperatorCall, OperatorKind, same_shape

EXPERT_PARTS = "expert_parts"
"""The attribute with the number of positions of an expert axis, if it divides the experts together with the shards."""

EXPERT_EXCHANGE = "expert_exchange"
"""The all-to-all over the devices of an expert axis and their shards, in the collectives of `moe_shard`."""


def _expert_sizes(call: OperatorCall) -> tuple[int, int, int, int, int]:
    """(tokens, features, routed experts, features of an expert, selected pairs of the local experts). Routing is
    assumed to be balanced: every expert has the same number of pairs."""
    x, router, down = call.inputs[0], call.inputs[1], call.inputs[3]
    assert x is not None and router is not None and down is not None
    tokens = math.prod(x[:-1])
    experts, top = int(call.attributes["experts"]), int(call.attributes["top_k"])
    parts = int(call.attributes.get(EXPERT_PARTS, 1))
    everyone = tokens if down[0] == experts else call.symbols["B"] * call.symbols["T"] * parts
    return tokens, x[-1], router[0], down[2], everyone * top * down[0] // experts


def _count_flops(call: OperatorCall) -> Flops:
    tokens, features, experts, inner, pairs = _expert_sizes(call)
    product = 2 * tokens * features * experts + 2 * pairs * features * 3 * inner
    return Flops(product, product, product)


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return operator.inputs


def _own_bytes(call: OperatorCall) -> int:
    tokens, features, experts, inner, pairs = _expert_sizes(call)
    statistics = tokens * experts + (pairs + tokens if call.attributes["normalize"] else 0)
    statistics += pairs if "weight_scale" in call.attributes else 0
    indices = 4 if "down_bias" in call.attributes.get("more", ()) else 3
    return (
        statistics * call.wide_bytes + indices * pairs * 8 + pairs * (1 + 3 * features + 3 * inner) * call.compute_bytes
    )


def _exchanged_bytes(call: OperatorCall) -> int:
    """Return the bytes that `moe_shard` saves beside its inputs (see above)."""
    _, features, _, _, pairs = _expert_sizes(call)
    return _own_bytes(call) + pairs * (8 + features * call.compute_bytes)


def _pending_bytes(call: OperatorCall) -> int:
    tokens, features, experts, inner, pairs = _expert_sizes(call)
    return (tokens * experts + pairs * (2 * features + 3 * inner)) * call.compute_bytes


def _forward_extra(call: OperatorCall) -> int:
    """The zero tensor that the weighted outputs are added to; the sum is another tensor."""
    tokens, features, _, _, _ = _expert_sizes(call)
    return tokens * features * call.compute_bytes


def _backward_peak(call: OperatorCall, freed: int = 2) -> int:
    """The larger of two peaks before x has its gradient. First: the gradient of the output before and after its weight
    (2 D per pair). Second: the recomputed gate and its gradients (5 F), after output and weighted output (2 D, or
    `freed`) are freed."""
    tokens, features, _, inner, pairs = _expert_sizes(call)
    return (pairs * max(2 * features, 5 * inner - freed * features) - tokens * features) * call.compute_bytes


def _deferred_peak(call: OperatorCall, freed: int = 2) -> int:
    """At the second peak a deferred weight gradient holds the output's gradient and h."""
    _, features, _, inner, pairs = _expert_sizes(call)
    late = max(2 * features, 6 * inner - (freed - 1) * features)
    return pairs * (late - max(2 * features, 5 * inner - freed * features)) * call.compute_bytes


def _inner_collectives(call: OperatorCall) -> InternalCollectives:
    """All-to-alls of the pairs' inputs to the experts and of their outputs back; the same for both gradients."""
    _, features, experts, _, _ = _expert_sizes(call)
    parts = int(call.attributes.get(EXPERT_PARTS, 1))
    tokens = call.symbols["B"] * call.symbols["T"] * parts
    size = float(tokens * int(call.attributes["top_k"]) * features * call.compute_bytes)
    exchange = "all_to_all" if parts == 1 else EXPERT_EXCHANGE, size, "alltoallv", (tokens, experts)
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
    forward_extra=_forward_extra,
    backward_extra=_backward_peak,
    deferred_extra=_deferred_peak,
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
        backward_extra=partial(_backward_peak, freed=3),
        deferred_extra=partial(_deferred_peak, freed=3),
        talks=_inner_collectives,
    ),
)
