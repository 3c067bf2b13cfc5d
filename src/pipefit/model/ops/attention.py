"""attention(q_BTHK, k_BTGK, v_BTGK) -> o_BTHK: softmax(scale q k^T + mask) v, head h reading keys of group h // (H/G).

Keeps q, k, v, o and the log-sum-exp of the scores (B*H*T, float32 or wider), as FlashAttention does (Dao et al.,
2022). FLOPs: two products forward, four backward (the recomputed scores of a flash kernel are not counted), the full
square of queries and keys whatever the mask: the convention of FlopCounterMode and of the MFU of PaLM (appendix B).
The symbol P, where given, is the number of earlier tokens whose keys are attended to (slices); the keys and values of
all P + T tokens are then kept in one piece beside those of the slice. A window shorter than P + T, and earlier tokens,
need a mask of T x (P + T), kept in the computing type.
"""

from __future__ import annotations

from collections.abc import Callable

from pipefit.model.graph import Operator
from pipefit.model.ops.kind import Call, Flops, OperatorKind, same_shape


def _flops(call: Call) -> Flops:
    q, k = call.inputs[0], call.inputs[1]
    assert q is not None and k is not None
    rows, queries, heads, dim = q
    keys = k[1] + call.symbols.get("P", 0)
    product = 2 * rows * heads * queries * keys * dim
    return Flops(2 * product, 4 * product, 0)


def _saves(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return (*operator.inputs, operator.outputs[0])


def _own_bytes(call: Call) -> int:
    q, k = call.inputs[0], call.inputs[1]
    assert q is not None and k is not None
    rows, queries, heads, dim = q
    earlier = call.symbols.get("P", 0)
    keys = k[1] + earlier
    window = call.attributes.get("window")
    total = rows * heads * queries * call.wide_bytes
    if earlier or (window is not None and window < keys):
        total += queries * keys * call.compute_bytes
    if earlier:
        total += 2 * rows * keys * k[2] * dim * call.compute_bytes
    return total


OPERATORS = (
    OperatorKind(
        kind="attention",
        summary="Grouped-query attention in (rows, tokens, heads, head dim) layout; heads a multiple of groups.",
        inputs=("q", "k", "v"),
        attributes={
            "causal": "query i sees keys j <= i (counted over the whole sequence)",
            "scale": "factor of the scores",
            "window": "null, or the number of last keys that a query sees, itself included: i - window < j <= i",
        },
        shapes=same_shape,
        flops=_flops,
        saves=_saves,
        own_bytes=_own_bytes,
        boundary=True,
        heavy=True,
    ),
)
