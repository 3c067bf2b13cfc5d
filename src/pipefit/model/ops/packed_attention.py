"""packed_attention(q_BTHK, k_BTHK, v_BTHK, documents_BT) -> o_BTHK: attention that stays within the images of a row.

Several images lie one behind the other in a row; `documents` says for every token the place in its row where its image
starts. Tokens see all tokens of their own image, before and behind them, and no others. Keeps what `attention` keeps.

FLOPs: what is computed, which is one square for every image: two products forward and four backward over the **sum of
the squared lengths** of the images. That number is the symbol `squares` (over all rows of the microbatch on this
device); where nobody gives it, an upper bound stands for it: one image a row, B T^2.
"""

from __future__ import annotations

from collections.abc import Callable

from pipefit.model.graph import Operator
from pipefit.model.ops.kind import Flops, OperatorCall, OperatorKind, same_shape

SQUARES = "squares"
"The symbol: the sum over images of their tokens, squared."


def _count_flops(call: OperatorCall) -> Flops:
    q, k = call.inputs[0], call.inputs[1]
    assert q is not None and k is not None
    rows, queries, heads, features = q
    squares = call.symbols.get(SQUARES, rows * k[1] * k[1])
    if k[1] and queries != k[1]:  # a device of a shard axis that has a part of the queries
        squares = squares * queries // k[1]
    product = 2 * squares * heads * features
    return Flops(2 * product, 4 * product, 0)


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return (*operator.inputs[:3], operator.outputs[0])


def _own_bytes(call: OperatorCall) -> int:
    q = call.inputs[0]
    assert q is not None
    rows, queries, heads, _ = q
    return rows * heads * queries * call.wide_bytes


OPERATORS = (
    OperatorKind(
        kind="packed_attention",
        summary="Attention within the images of a packed row, not causal; (rows, tokens, heads, head dim).",
        inputs=("q", "k", "v", "documents"),
        attributes={
            "scale": "factor of the scores",
            "cut": "of queries that are split along tokens: [1, the first one's place (-1: by shares), all tokens]",
        },
        shapes=same_shape,
        flops=_count_flops,
        saves=_saved_values,
        own_bytes=_own_bytes,
        boundary=True,
        heavy=True,
    ),
)
