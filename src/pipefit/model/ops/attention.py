"""attention(q_BTHK, k_BTGK, v_BTGK, sinks_H...) -> o_BTHK: softmax(scale q k^T + mask) v, head h reading keys of group
h // (H/G). With `softcap` c (Gemma 2) scores s become c tanh(s / c). Sinks (gpt-oss) are scores of one more key for
each head, with the value zero. With `ahead`, the fourth input (B, T) is the last key that each query sees (Gemma 3:
tokens of an image see all of it). The kernel then takes a mask and computes the full square.

Values may have fewer features than keys, as in latent attention; kernels of equal sizes then take padded values.

Saves q, k, v, o and the log-sum-exp of the scores (B*H*T, float32 or wider), as FlashAttention does (Dao et al., 2022).
FLOPs: two products forward and four backward over the full square of queries and keys, whatever the mask. The
recomputed scores of a flash kernel are not counted. This is the convention of FlopCounterMode and of the MFU of PaLM
(appendix B).

Executed FLOPs determine the time: these products, and in the backward the scores once more, over the pairs of a query
and a key that the kernels of `run/ops/attention.py` compute. A causal kernel skips the masked half: T queries of their
own T keys are a triangle of T (T + 1) / 2 pairs. Keys of earlier slices, and keys before a device's part of the
queries, are rectangles. If a window is shorter than the queries, or documents are kept apart, the kernel takes a mask
and computes the full square of own keys. A run of earlier keys is computed completely, or skipped if no query sees any
of it.

Capped scores are computed by plain products, QUERY_BLOCK queries at a time; blocks skip the keys behind them.

The symbol P, if given, is the number of earlier tokens whose keys are attended to (slices). The keys are read in place,
chunk by chunk: only one chunk's result, and in the backward one chunk's gradients, is alive at a time. A window shorter
than P + T needs masks while an action runs. The layers of the action share them; they take at most T x (2 T + window)
numbers of the compute dtype.

With the symbol `context parts`, T are the tokens of one of that many devices, in two chunks (`layout.zigzag_runs`).
Each pass gathers the keys and values of all devices and puts them in order. The backward adds up the gradients of all
keys and values that its queries see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.model.ops.kind import Flops, OperatorCall, OperatorKind


def _count_flops(call: OperatorCall) -> Flops:
    q, k = call.inputs[0], call.inputs[1]
    assert q is not None and k is not None
    rows, queries, heads, _ = q
    keys = k[1] * _context_parts(call) + call.symbols.get("P", 0)
    pairs = 2 * rows * heads * queries * keys
    key_size, value_size = _head_sizes(call)
    return Flops(pairs * (key_size + value_size), 2 * pairs * (key_size + value_size), 0)


def _count_executed_flops(call: OperatorCall) -> Flops:
    q = call.inputs[0]
    assert q is not None
    rows, _, heads, _ = q
    pairs = 2 * rows * heads * computed_pairs(call)
    key_size, value_size = _head_sizes(call)
    return Flops(pairs * (key_size + value_size), pairs * (3 * key_size + 2 * value_size), 0)


def _head_sizes(call: OperatorCall) -> tuple[int, int]:
    """Return the features of a head of keys and of values."""
    k, v = call.inputs[1], call.inputs[2]
    assert k is not None and v is not None
    return k[3], v[3]


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    q, v = inputs[0], inputs[2]
    assert q is not None and v is not None
    return ((*q[:-1], v[-1]),)


def _padded_bytes(call: OperatorCall, copies: int) -> int:
    """Return the bytes of values, and of `copies` tensors like the result, padded to the features of keys. The kernels
    take heads of one size."""
    key_size, value_size = _head_sizes(call)
    if key_size == value_size:
        return 0
    v = call.inputs[2]
    assert v is not None
    return (prod(v) + copies * prod(call.outputs[0])) * key_size // value_size * call.compute_bytes


def computed_pairs(call: OperatorCall) -> int:
    """Return the number of pairs of a query and a key that the kernels compute, of one row and head."""
    q, k = call.inputs[0], call.inputs[1]
    assert q is not None and k is not None
    queries, keys, window = q[1], k[1], call.attributes.get("window")
    parts = _context_parts(call)
    if not call.attributes.get("causal", True):
        return queries * keys * parts
    if parts > 1:
        chunk = queries // 2  # the two chunks of a device have 2 parts - 1 chunks before them
        own_chunk = chunk * chunk if window is not None and window < chunk else _causal_pairs(call, chunk)
        return 2 * own_chunk + (2 * parts - 1) * chunk * chunk * (window != 1)
    masked = (window is not None and window < queries) or call.symbols.get(DOCUMENTS_APART, 0) > 0 or _sees_ahead(call)
    own_pairs = queries * queries if masked else _causal_pairs(call, queries)
    return own_pairs + queries * _earlier_keys(call, _first_query(call, keys - queries), window)


def _sees_ahead(call: OperatorCall) -> bool:
    """Return whether queries see keys behind them."""
    return bool(call.attributes.get("ahead", False))


def _causal_pairs(call: OperatorCall, queries: int) -> int:
    """Return the pairs of queries and their own keys under a causal mask: a triangle, in blocks for capped scores."""
    if call.attributes.get("softcap") is None:
        return queries * (queries + 1) // 2
    blocks, rest = divmod(queries, QUERY_BLOCK)
    return QUERY_BLOCK * QUERY_BLOCK * (blocks * (blocks + 1) // 2) + rest * queries


def _score_bytes(call: OperatorCall, copies: int) -> int:
    """Return the bytes of that many copies of a block of capped scores, in the wide dtype; 0 for other scores."""
    if call.attributes.get("softcap") is None:
        return 0
    q, k = call.inputs[0], call.inputs[1]
    assert q is not None and k is not None
    keys = max(k[1] * _context_parts(call), call.symbols.get("P", 0))
    return copies * q[0] * q[2] * min(q[1], QUERY_BLOCK) * keys * call.wide_bytes


def _score_traffic(call: OperatorCall) -> tuple[int, int]:
    """Return the bytes of capped scores that the plain products read and write, forward and backward."""
    q = call.inputs[0]
    if call.attributes.get("softcap") is None or q is None:
        return 0, 0
    scores = q[0] * q[2] * computed_pairs(call) * call.wide_bytes
    return FORWARD_SCORE_PASSES * scores, BACKWARD_SCORE_PASSES * scores


def _first_query(call: OperatorCall, last: int) -> int:
    """Return the first query of this device, counted from the start of the slice; 0 unless queries are split. The
    default `last` belongs to the device with the last part, the slowest one."""
    first: int = call.attributes.get("cut", (1, -1, 0))[1]
    if last <= 0 or first >= 0:
        return max(0, first)
    return call.symbols.get(FIRST_QUERY, last)


def _earlier_keys(call: OperatorCall, before: int, window: int | None) -> int:
    """Return the number of keys in the runs of earlier keys that some query sees: the `before` keys of the own slice,
    then the earlier slices, last one first."""
    past = call.symbols.get("P", 0)
    if window is None:
        return before + past
    seen = window - 1  # keys before its own that the first query sees
    if seen <= before or not past:
        return before if seen > 0 else 0
    slice_tokens = -(-past // max(1, call.symbols.get(EARLIER_SLICES, 1)))
    return before + min(past, slice_tokens * -(-(seen - before) // slice_tokens))


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    count = 3 if operator.attributes.get("ahead") else len(operator.inputs)
    return (*operator.inputs[:count], operator.outputs[0])


def _own_bytes(call: OperatorCall) -> int:
    q = call.inputs[0]
    assert q is not None
    rows, queries, heads, _ = q
    return rows * heads * queries * call.wide_bytes


def _context_parts(call: OperatorCall) -> int:
    return call.symbols.get(CONTEXT_PARTS, 1)


def gathered_sizes(call: OperatorCall) -> tuple[int, int]:
    """Return the bytes of the keys and of the values of all devices that hold parts of the sequences."""
    k, v = call.inputs[1], call.inputs[2]
    assert k is not None and v is not None
    parts = _context_parts(call)
    return prod(k) * parts * call.compute_bytes, prod(v) * parts * call.compute_bytes


def _forward_extra(call: OperatorCall) -> int:
    """The masks; with earlier tokens also the running sum and the next chunk's result, in the wide dtype. With parts of
    sequences, the gathered keys and values: a gather and its ordered copy, then the results of both chunks."""
    if _context_parts(call) > 1:
        keys, values = gathered_sizes(call)
        merged = prod(call.outputs[0]) * (3 * call.compute_bytes // 2 + _wider_bytes(call)) + 2 * _own_bytes(call)
        return _mask_bytes(call) + max(2 * keys, keys + 2 * values, keys + values + merged)
    return _mask_bytes(call) + _merged_bytes(call)


def _backward_extra(call: OperatorCall) -> int:
    """The masks; with earlier tokens also one chunk's gradients of q, k and v (a chunk is as long as the slice), and
    the sum of the gradients of q if its dtype is wider. With parts of sequences, see `_context_gradients`."""
    if _context_parts(call) > 1:
        return _mask_bytes(call) + _context_gradients(call)
    if not call.symbols.get("P", 0):
        return _mask_bytes(call)
    chunk = sum(prod(shape) for shape in call.inputs[:3] if shape is not None) * call.compute_bytes
    return _mask_bytes(call) + chunk + prod(call.outputs[0]) * _wider_bytes(call)


def _context_gradients(call: OperatorCall) -> int:
    """Return the transient bytes of the backward with parts of sequences. The last chunk of queries sees nearly all
    keys: they, the sum of their gradients and its last addend are alive, with three times the gradient of q. The
    gradients of the local q, k and v are counted as outputs."""
    complete = sum(gathered_sizes(call))
    local = complete // _context_parts(call)
    if not call.attributes.get("causal", True):
        return 5 * complete // 2 - local
    return 3 * complete - 3 * local // 2 + 2 * prod(call.outputs[0]) * (call.compute_bytes + _wider_bytes(call))


def _wider_bytes(call: OperatorCall) -> int:
    """Return the bytes of an element of the wide dtype; 0 if the run computes in it."""
    return call.wide_bytes if call.wide_bytes != call.compute_bytes else 0


def _merged_bytes(call: OperatorCall) -> int:
    if not call.symbols.get("P", 0):
        return 0
    passing = 2 * call.wide_bytes if call.wide_bytes != call.compute_bytes else call.compute_bytes
    return prod(call.outputs[0]) * passing + 3 * _own_bytes(call)


def _mask_bytes(call: OperatorCall) -> int:
    q, window = call.inputs[0], call.attributes.get("window")
    assert q is not None
    queries, earlier = q[1], call.symbols.get("P", 0)
    if _sees_ahead(call):
        return q[0] * queries * queries * call.compute_bytes
    if window is None or window >= earlier + queries:
        return 0
    slice_keys = queries if window < queries else 0
    before = min(earlier, window - 1, 2 * queries)
    total: int = queries * (slice_keys + before) * call.compute_bytes
    return total


FIRST_QUERY = "first query"
"The symbol: the tokens of the slice before this device's part of its queries, where they are split along tokens."

CONTEXT_PARTS = "context parts"
"The symbol: the number of devices that hold equal parts of each sequence, T tokens each; 1 without the symbol."

DOCUMENTS_APART = "documents apart"
"The symbol: 1 if masks keep the documents of a row apart."

QUERY_BLOCK = 512
"""Queries whose capped scores are in memory together."""

FORWARD_SCORE_PASSES, BACKWARD_SCORE_PASSES = 16, 30
"""Reads and writes of a capped score in the plain products: one for each factor and result of the functions in
`run/autograd/attention_kernels.py`."""

EARLIER_SLICES = "earlier slices"
"The symbol: the number of slices, taken to be of equal length, that form the P earlier tokens; 1 without the symbol."

_MERGING_KERNELS = (5, 4)
"""Attention over the keys of the earlier slice, and the merge of its result (`run/ops/attention.py`)."""

OPERATORS = (
    OperatorKind(
        kind="attention",
        summary="Grouped-query attention in (rows, tokens, heads, head dim) layout; heads a multiple of groups.",
        inputs=("q", "k", "v", "sinks*"),
        attributes={
            "causal": "query i sees keys j <= i (counted over the whole sequence)",
            "scale": "factor of the scores",
            "window": "null, or the number of last keys that a query sees, itself included: i - window < j <= i",
            "softcap": "absent, or the number that scores are capped at: softcap tanh(score / softcap)",
            "ahead": "absent, or true: the fourth input, int64 (B, T), is the last key of a query, in place of sinks",
            "cut": "of queries that are split along tokens: [1, the first one's place (-1: by shares), all tokens]",
        },
        shapes=_output_shapes,
        flops=_count_flops,
        executed_flops=_count_executed_flops,
        kernel_traffic=_score_traffic,
        saves=_saved_values,
        read_later=(1, 2),
        own_bytes=_own_bytes,
        forward_extra=lambda call: _forward_extra(call) + _score_bytes(call, 3) + _padded_bytes(call, 1),
        backward_extra=lambda call: _backward_extra(call) + _score_bytes(call, 5) + _padded_bytes(call, 3),
        boundary=True,
        heavy=True,
        is_attention=True,
        makes_features=True,
        merging_kernels=_MERGING_KERNELS,
    ),
)
