"""experts(x_ND, chosen_NK, weight_NK, up_EUD, down_EDF, more...) -> y_ND: MLPs of experts that a model's own router
selects; `moe` also contains the router.

    y = sum over the selected experts e of weight_e (h down[e]^T),   h = gate function of x up[e]^T

With a gate U is 2F: h = activation(first half) * second half. Without one U is F. A gate's factor may have a weight of
its own: h = activation(x up[e]^T) * (x factor[e]^T). A number of E or more selects no expert. P = N K is the number of
selected pairs.

Weights scale outputs, or with `scaled` the inputs of the experts (Llama 4): x is weight_e x, and y has no weight. An
expert without biases maps zero to zero, so experts with the weight zero need not be selected.

The matrices of an expert are (outputs, inputs), or (inputs, outputs) for the weights in `transposed`. With `rows` the
experts have no dimension of their own: their weights are the rows of one matrix (E F, D) (DBRX).

The forward saves per pair: the weight, the gathered x (D), the result of up (U), h (F), the output (D) and the weighted
output (D) or the weighted x (D), and two indices (int64): order by expert, and token; with biases also the expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipefit.model.ops.kind import Flops, OperatorCall, OperatorKind, same_shape


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """FLOPs and bytes of the experts of one call, with or without their router. Routing is assumed to be balanced."""

    tokens: int
    features: int
    "Features of x."
    upper: int
    "Features of up's result."
    inner: int
    "Features of an expert."
    pairs: int
    "Selected pairs of the local experts."
    compute_bytes: int
    scales_inputs: bool = False
    "Whether the weights scale the inputs of the experts."

    @property
    def product_flops(self) -> int:
        """FLOPs of all pairs, once."""
        return 2 * self.pairs * self.features * (self.upper + self.inner)

    def saved_bytes(self, indices: int) -> int:
        """Return the bytes that the forward saves of the pairs, with this number of indices for each."""
        elements = 1 + 3 * self.features + self.upper + self.inner
        return self.pairs * (8 * indices + elements * self.compute_bytes)

    @property
    def pending_bytes(self) -> int:
        """Bytes that a deferred weight gradient holds: the input, gradients of up's result and of the output, h."""
        return self.pairs * (2 * self.features + self.upper + self.inner) * self.compute_bytes

    @property
    def sum_bytes(self) -> int:
        """Bytes of the zero tensor that the weighted outputs are added to; the sum is another tensor."""
        return self.tokens * self.features * self.compute_bytes

    def backward_peak(self, freed: int = 2) -> int:
        """Return the larger of two peaks before x has its gradient. First: the gradient of the output before and after
        its weight (2 D per pair). Second: the recomputed gate and its gradients (2 U + F), after output and weighted
        output (2 D, or `freed`) are freed. With scaled inputs the output has one gradient (D), and D is freed."""
        return self.pairs * self._larger_peak(freed, 0) * self.compute_bytes - self.sum_bytes

    def deferred_extra(self, freed: int = 2) -> int:
        """Return the addition to that peak of a deferred weight gradient, which holds the output's gradient and h at
        the second one."""
        further = self._larger_peak(freed, self.features + self.inner) - self._larger_peak(freed, 0)
        return self.pairs * further * self.compute_bytes

    def _larger_peak(self, freed: int, held: int) -> int:
        """Elements of a pair at the larger peak; `held` ones more at the second. With scaled inputs and `held` ones
        there is a third: the gradient of the input, before and after its weight, and the weight's (3 D)."""
        if self.scales_inputs:
            third = 3 * self.features if held else 0
            return max(self.features, 2 * self.upper + self.inner - self.features + held, third)
        return max(2 * self.features, 2 * self.upper + self.inner - freed * self.features + held)


def _work_of(call: OperatorCall) -> ExpertWork:
    x, chosen, up, down = call.inputs[0], call.inputs[1], call.inputs[3], call.inputs[4]
    assert x is not None and chosen is not None and up is not None and down is not None
    tokens, total = math.prod(x[:-1]), int(call.attributes["experts"])
    transposed, rows = call.attributes.get("transposed", ()), int(call.attributes.get("rows", 0))
    inner = rows or down[1 if "down" in transposed else 2]
    upper = rows or up[2 if "up" in transposed else 1]
    if "factor_weight" in call.attributes.get("more", ()):
        upper += inner
    pairs = tokens * chosen[-1] * (down[0] // (rows or 1)) // total
    scales_inputs = call.attributes.get("scaled") == "inputs"
    return ExpertWork(tokens, x[-1], upper, inner, pairs, call.compute_bytes, scales_inputs)


def _count_flops(call: OperatorCall) -> Flops:
    product = _work_of(call).product_flops
    return Flops(product, product, product)


def _own_bytes(call: OperatorCall) -> int:
    return _work_of(call).saved_bytes(3 if "down_bias" in call.attributes.get("more", ()) else 2)


OPERATORS = (
    OperatorKind(
        kind="experts",
        summary="Experts that a router of the model's own selects; no token dropped.",
        inputs=("x", "chosen", "weight", "up_weight", "down_weight", "more*"),
        attributes={
            "experts": "E",
            "gated": "whether the result of up is a gate and a factor",
            "activation": "`silu`, `gelu`, `gelu_tanh` or `relu`",
            "more": "names of further inputs: `gate_up_bias`, `down_bias`, `factor_weight`",
            "scaled": "absent or `outputs`, or `inputs`: the side of the experts that the weights scale",
            "transposed": "`up` (with the factor) and `down`, where their experts are (inputs, outputs)",
            "rows": "F, where the experts are the rows of matrices (E F, D) and have no dimension",
            "first": "the first expert whose weights are here, where they are a run; the result is then an addend",
        },
        shapes=same_shape,
        gathers={3: 2, 4: 2},
        named_gathers={"factor_weight": 2},
        flops=_count_flops,
        own_bytes=_own_bytes,
        pending_bytes=lambda call: _work_of(call).pending_bytes,
        forward_extra=lambda call: _work_of(call).sum_bytes,
        backward_extra=lambda call: _work_of(call).backward_peak(),
        deferred_extra=lambda call: _work_of(call).deferred_extra(),
        boundary=True,
        heavy=True,
        mixes_features=True,
    ),
)
