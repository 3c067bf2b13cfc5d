"""attention(q_BTHK, k_BTGK, v_BTGK) -> o_BTHK: softmax(scale q k^T + mask) v, head h reading keys of group h // (H/G).

Saves q, k, v, o and the log-sum-exp of the scores (B*H*T, float32 or wider), as FlashAttention does (Dao et al., 2022).
FLOPs: two products forward and four backward over the full square of queries and keys, whatever the mask. The
recomputed scores of a flash kernel are not counted. This is the convention of FlopCounterMode and of the MFU of PaLM
(appendix B).

The symbol P, if given, is the number of earlier tokens whose keys are attended to (slices). The keys are read in place,
chunk by chunk: only one chunk's result, and in the backward one chunk's gradients, is alive at a time. A window shorter
than P + T needs masks while an action runs. The layers of the action share them; they take at most T x (2 T + window)
numbers of the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from pipefit.model.graph import Operator
from pipefit.model.ops.kind import Flops, OperatorCall, OperatorKind, same_shape


def _count_flops(call: OperatorCall) -> Flops:
    q, k = call.inputs[0], call.inputs[1]
    assert q is not None and k is not None
    rows, queries, heads, dim = q
    keys = k[1] + call.symbols.get("P", 0)
    product = 2 * rows * heads * queries * keys * dim
    return Flops(2 * product, 4 * product, 0)


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return (*operator.inputs, operator.outputs[0])


def _own_bytes(call: OperatorCall) -> int:
    q = call.inputs[0]
    assert q is not None
    rows, queries, heads, _ = q
    return rows * heads * queries * call.wide_bytes


def _forward_extra(call: OperatorCall) -> int:
    """The masks; with earlier tokens also the running sum and the next chunk's result, in the wide dtype."""
    return _mask_bytes(call) + _merged_bytes(call)


def _backward_extra(call: OperatorCall) -> int:
    """The masks; with earlier tokens also one chunk's gradients of q, k and v (a chunk is as long as the slice), and
    the sum of the gradients of q if its dtype is wider."""
    if not call.symbols.get("P", 0):
        return _mask_bytes(call)
    chunk = sum(prod(shape) for shape in call.inputs if shape is not None) * call.compute_bytes
    wider = call.wide_bytes if call.wide_bytes != call.compute_bytes else 0
    return _mask_bytes(call) + chunk + prod(call.outputs[0]) * wider


def _merged_bytes(call: OperatorCall) -> int:
    if not call.symbols.get("P", 0):
        return 0
    passing = 2 * call.wide_bytes if call.wide_bytes != call.compute_bytes else call.compute_bytes
    return prod(call.outputs[0]) * passing + 3 * _own_bytes(call)


def _mask_bytes(call: OperatorCall) -> int:
    q, window = call.inputs[0], call.attributes.get("window")
    assert q is not None
    queries, earlier = q[1], call.symbols.get("P", 0)
    if window is None or window >= earlier + queries:
        return 0
    slice_keys = queries if window < queries else 0
    before = min(earlier, window - 1, 2 * queries)
    total: int = queries * (slice_keys + before) * call.compute_bytes
    return total


_MERGING_KERNELS = (5, 4)
"""Attention over the keys of the earlier slice, and the merge of its result (`run/ops/attention.py`)."""

OPERATORS = (
    OperatorKind(
        kind="attention",
        summary="Grouped-query attention in (rows, tokens, heads, head dim) layout; heads a multiple of groups.",
        inputs=("q", "k", "v"),
        attributes={
            "causal": "query i sees keys j <= i (counted over the whole sequence)",
            "scale": "factor of the scores",
            "window": "null, or the number of last keys that a query sees, itself included: i - window < j <= i",
            "cut": "of queries that are split along tokens: [1, the first one's place (-1: by shares), all tokens]",
        },
        shapes=same_shape,
        flops=_count_flops,
        saves=_saved_values,
        read_later=(1, 2),
        own_bytes=_own_bytes,
        forward_extra=_forward_extra,
        backward_extra=_backward_extra,
        boundary=True,
        heavy=True,
        is_attention=True,
        makes_features=True,
        merging_kernels=_MERGING_KERNELS,
    ),
)
