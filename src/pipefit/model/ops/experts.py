"""experts(x_ND, chosen_NK, weight_NK, up_EUD, down_EDF, more...) -> y_ND: MLPs of experts that a model's own router
selects; `moe` also contains the router.

    y = sum over the selected experts e of weight_e (h down[e]^T),   h = gate function of x up[e]^T

With a gate U is 2F: h = activation(first half) * second half. Without one U is F. A number of E or more selects no
expert. P = N K is the number of selected pairs.

The forward saves per pair: the weight, the gathered x (D), the result of up (U), h (F), the output (D) and the weighted
output (D), and two indices (int64): order by expert, and token; with biases also the expert.
"""

from __future__ import annotations

import math

from pipefit.model.ops.kind import Flops, OperatorCall, OperatorKind, same_shape


def _pair_sizes(call: OperatorCall) -> tuple[int, int, int, int, int]:
    """(tokens, features, features of up's result, features of an expert, selected pairs of the local experts). Routing
    is assumed to be balanced."""
    x, chosen, up, down = call.inputs[0], call.inputs[1], call.inputs[3], call.inputs[4]
    assert x is not None and chosen is not None and up is not None and down is not None
    tokens, total = math.prod(x[:-1]), int(call.attributes["experts"])
    return tokens, x[-1], up[1], down[2], tokens * chosen[-1] * down[0] // total


def _count_flops(call: OperatorCall) -> Flops:
    _, features, upper, inner, pairs = _pair_sizes(call)
    product = 2 * pairs * features * (upper + inner)
    return Flops(product, product, product)


def _own_bytes(call: OperatorCall) -> int:
    _, features, upper, inner, pairs = _pair_sizes(call)
    indices = 3 if "down_bias" in call.attributes.get("more", ()) else 2
    return pairs * (8 * indices + (1 + 3 * features + upper + inner) * call.compute_bytes)


def _pending_bytes(call: OperatorCall) -> int:
    _, features, upper, inner, pairs = _pair_sizes(call)
    return pairs * (2 * features + upper + inner) * call.compute_bytes


def _forward_extra(call: OperatorCall) -> int:
    """The zero tensor that the weighted outputs are added to."""
    tokens, features, _, _, _ = _pair_sizes(call)
    return tokens * features * call.compute_bytes


def _backward_peak(call: OperatorCall) -> int:
    """The larger of two peaks before x has its gradient: the gradient of the output before and after its weight, or the
    recomputed gate and its gradients, after output and weighted output are freed."""
    tokens, features, upper, inner, pairs = _pair_sizes(call)
    late = 2 * upper + inner - 2 * features
    return (pairs * max(2 * features, late) - tokens * features) * call.compute_bytes


def _deferred_peak(call: OperatorCall) -> int:
    """At the second peak a deferred weight gradient holds the output's gradient and h."""
    _, features, upper, inner, pairs = _pair_sizes(call)
    late = 2 * upper + inner - 2 * features
    return pairs * (max(2 * features, late + features + inner) - max(2 * features, late)) * call.compute_bytes


OPERATORS = (
    OperatorKind(
        kind="experts",
        summary="Experts that a router of the model's own selects; no token dropped.",
        inputs=("x", "chosen", "weight", "up_weight", "down_weight", "more*"),
        attributes={
            "experts": "E",
            "gated": "whether the result of up is a gate and a factor",
            "activation": "`silu`, `gelu`, `gelu_tanh` or `relu`",
            "more": "names of further inputs: `gate_up_bias`, `down_bias`",
            "first": "the first expert whose weights are here, where they are a run; the result is then an addend",
        },
        shapes=same_shape,
        gathers={3: 2, 4: 2},
        flops=_count_flops,
        own_bytes=_own_bytes,
        pending_bytes=_pending_bytes,
        forward_extra=_forward_extra,
        backward_extra=_backward_peak,
        deferred_extra=_deferred_peak,
        boundary=True,
        heavy=True,
        mixes_features=True,
    ),
)
