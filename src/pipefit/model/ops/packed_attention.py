"""packed_attention(q_BTHK, k_BTHK, v_BTHK, documents_BT) -> o_BTHK: attention within each image of a packed row.

A row holds several images one after the other; `documents` gives for every token the start of its image in the row.
Tokens attend to all tokens of their own image, in both directions, and to no others. Saves the same tensors as
`attention`.

A token may stand for M patches, which attend: q, k, v and o are (B, T, M, H, K). Of an image, the first
`unused[0]` and the last `unused[1]` patches take no part, and their results are zero.

With `window`, patches attend within windows of `window` x `window` tokens of their image. `grid` (B, T, 4) begins with
the row and the column of every token. The tokens of a window follow each other in the row (`ImageRule.window`).

FLOPs: one square per image, two products forward and four backward over the **sum of the squared lengths** of the
images, times M^2. That sum is the symbol `squares`, over all rows of the microbatch on this device. Without the symbol
an upper bound is used: one image per row, B T^2. With windows, no token attends to more than `window`^2.
"""

from __future__ import annotations

from collections.abc import Callable

from pipefit.model.graph import Operator
from pipefit.model.ops.kind import Flops, OperatorCall, OperatorKind, Sizes, same_shape

SQUARES = "squares"
"The symbol: the sum over images of the squared number of tokens."


def _count_flops(call: OperatorCall) -> Flops:
    q, k = call.inputs[0], call.inputs[1]
    assert q is not None and k is not None
    rows, queries, heads, features = q[0], q[1], q[-2], q[-1]
    squares = call.symbols.get(SQUARES, rows * k[1] * k[1])
    if k[1] and queries != k[1]:  # a device of a shard axis that has a part of the queries
        squares = squares * queries // k[1]
    if "window" in call.attributes:
        squares = min(squares, rows * queries * int(call.attributes["window"]) ** 2)
    product = 2 * squares * _patches(q) ** 2 * heads * features
    return Flops(2 * product, 4 * product, 0)


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return (*operator.inputs[:3], operator.outputs[0])


def _own_bytes(call: OperatorCall) -> int:
    q = call.inputs[0]
    assert q is not None
    return q[0] * q[-2] * q[1] * _patches(q) * call.wide_bytes


def _patches(q: Sizes) -> int:
    """Return the patches of a token."""
    return q[2] if len(q) == 5 else 1


OPERATORS = (
    OperatorKind(
        kind="packed_attention",
        summary="Attention within the images of a packed row, not causal; (rows, tokens, patches?, heads, head dim).",
        inputs=("q", "k", "v", "documents", "grid*"),
        attributes={
            "scale": "factor of the scores",
            "window": "absent, or the side in tokens of the windows within which patches attend",
            "unused": "absent, or the numbers of first and last patches of an image that take no part",
            "cut": "of queries that are split along tokens: [1, the first one's place (-1: by shares), all tokens]",
        },
        shapes=same_shape,
        flops=_count_flops,
        saves=_saved_values,
        own_bytes=_own_bytes,
        boundary=True,
        heavy=True,
        is_attention=True,
        packs_rows=True,
        makes_features=True,
    ),
)
