"""gated_delta(q_BTGK, k_BTGK, v_BTHV, decay_BTH or BTHK, beta_BTH) -> y_BTHV: linear attention by the gated delta rule.

Every head has a state S (K, V), zero before the first token. Head h of values reads head h // (H/G) of queries and
keys. The decay g is a logarithm. Gated DeltaNet (Yang et al., 2024, arXiv:2412.06464) has one for each token, Kimi
Delta Attention (arXiv:2510.26692) one for each feature of a key:

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - k_t^T exp(g_t) S_(t-1))^T,        y_t = scale S_t^T q_t

With `norm_eps` e, q and k are first divided by sqrt(sum of squares + e). Products are in float32 or wider.

FLOPs are the products of the chunkwise form with the UT transform (section 3.3 of the first paper), for chunks of C
tokens, the last one padded. Per token and head of values:

- 4 C K: products of its query and of its key with the keys of the chunk. With one decay for each token they are
  computed once for each head of keys.
- 2 C (K + V): the inverse of the chunk's triangular system times keys and values.
- 6 K V: the state is read for the key and for the query, and written.
- 2 C V: the products of its query times the corrected values.

As for attention, masked halves count fully, the backward counts twice the forward, and recomputation is not counted.

Executed FLOPs solve the triangular system without its inverse, C (K + V), and compute each segment of SEGMENT_CHUNKS
chunks again in the backward. The forward saves its inputs and the states between segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.model.ops.kind import Flops, OperatorCall, OperatorKind

SEGMENT_CHUNKS = 16
"Chunks that are computed together; the states between segments are saved."

PAIR_BLOCK = 16
"Tokens whose pairs are computed feature by feature, if every feature has a decay."

NORM_EPS = 1e-6
"The number that `transformers` adds to the squared norms of queries and keys."


@dataclass(frozen=True, slots=True)
class DeltaWork:
    """FLOPs, bytes and kernels of one call."""

    rows: int
    chunks: int
    "Chunks of a row."
    chunk: int
    "C."
    key_heads: int
    heads: int
    keys: int
    "Features of a key, K."
    values: int
    "Features of a value, V."
    by_feature: bool
    "Whether each feature of a key has a decay."
    wide_bytes: int

    @classmethod
    def of_call(cls, call: OperatorCall) -> DeltaWork:
        k, v, decay = call.inputs[1], call.inputs[2], call.inputs[3]
        assert k is not None and v is not None and decay is not None
        chunk = int(call.attributes["chunk"])
        return cls(v[0], -(-v[1] // chunk), chunk, k[2], v[2], k[3], v[3], len(decay) == 4, call.wide_bytes)

    @property
    def segments(self) -> int:
        """The number of segments of a row."""
        return -(-self.chunks // SEGMENT_CHUNKS)

    def count_flops(self) -> Flops:
        """Return the products of the chunkwise form, forward and twice that backward."""
        product = self._product_flops() + 2 * self._system_flops()
        return Flops(product, 2 * product, 0)

    def count_executed(self) -> Flops:
        """Return the FLOPs of the kernels. The backward computes the forward again, solves one more system, and
        multiplies its result with the solution."""
        forward = self._product_flops() + self._system_flops()
        return Flops(forward, forward + 2 * self._product_flops() + 3 * self._system_flops(), 0)

    def _product_flops(self) -> int:
        pairs = 4 * self.chunk * self.keys * (self.heads if self.by_feature else self.key_heads)
        states = self.heads * (6 * self.keys * self.values + 2 * self.chunk * self.values)
        return self.rows * self.chunks * self.chunk * (pairs + states)

    def _system_flops(self) -> int:
        """Return the FLOPs of solving all triangular systems once."""
        return self.rows * self.chunks * self.chunk * self.heads * self.chunk * (self.keys + self.values)

    def state_bytes(self) -> int:
        """Return the bytes of the states between segments."""
        return (self.segments - 1) * self.rows * self.heads * self.keys * self.values * self.wide_bytes

    def weigh_elements(self, tokens: int, factors: Sequence[float]) -> int:
        """Return the bytes of a weighted sum of sizes of that many tokens of each row: (keys of key heads, keys of all
        heads, values, pairs of a chunk, states of chunks, pairs of blocks with a decay for each feature)."""
        heads, pairs = self.heads, self.keys * self._block_tokens() if self.by_feature else 0
        sizes = (self.key_heads * self.keys, heads * self.keys, heads * self.values, heads * self.chunk,
                 heads * self.keys * self.values / self.chunk, heads * pairs)  # fmt: skip
        elements = sum(factor * size for factor, size in zip(factors, sizes, strict=True))
        return int(self.rows * tokens * elements) * self.wide_bytes

    def forward_peak(self) -> int:
        """Return the bytes of temporaries at the peak of a segment's forward: its end, or a block of pairs with a decay
        for each feature."""
        peak = self._segment_bytes(FORWARD_PEAK)
        if not self.by_feature:
            return peak
        return max(peak, self._segment_bytes((2, 3, 1, 0, 0, 2 * self._block_tokens() / self.chunk)))

    def backward_peak(self) -> int:
        """Return the bytes of temporaries of a segment in the backward, with the values that autograd saves of it."""
        if not self.by_feature:
            return self._segment_bytes(BACKWARD_PEAK)
        return self._segment_bytes((0, 0, 9, 3, 0, 3.1 + 1.1 * self._block_tokens() / self.chunk))

    def _block_tokens(self) -> int:
        return min(PAIR_BLOCK, self.chunk)

    def _segment_bytes(self, factors: Sequence[float]) -> int:
        """Return such a sum for the tokens of one segment."""
        return self.weigh_elements(min(self.chunks, SEGMENT_CHUNKS) * self.chunk, factors)

    def count_kernels(self) -> tuple[int, int]:
        """Return the number of kernels of all segments and chunks, (forward, backward)."""
        blocks = -(-self.chunk // PAIR_BLOCK) if self.by_feature else 0
        forward, backward = (first + more * blocks for first, more in SEGMENT_KERNELS)
        return tuple(  # type: ignore[return-value]
            count * self.segments + more * self.chunks
            for count, more in zip((forward, backward), CHUNK_KERNELS, strict=True)
        )


SEGMENT_KERNELS, CHUNK_KERNELS = ((44, 18), (105, 64)), (3, 14)
"""Kernels of PyTorch for one segment (and more for each block of pairs with a decay for each feature) and for one
chunk, forward and backward."""

FORWARD_PASSES, BACKWARD_PASSES = (25, 13, 22, 15, 8, 13), (88, 57, 53, 58, 27, 47)
"""Reads and writes of the sizes of `weigh_elements`, counted from the functions of PyTorch that run."""

FORWARD_PEAK, BACKWARD_PEAK = (2, 4, 6, 2, 2, 0), (7, 2, 10, 6, 3, 0)
"""Temporaries at the peak of a segment, in the sizes of `weigh_elements`: measured allocations, within an eighth."""


def _traffic(call: OperatorCall) -> tuple[int, int]:
    work = DeltaWork.of_call(call)
    tokens = work.chunks * work.chunk
    return work.weigh_elements(tokens, FORWARD_PASSES), work.weigh_elements(tokens, BACKWARD_PASSES)


def _result_shape(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    v = inputs[2]
    assert v is not None
    return (v,)


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return operator.inputs


def _mixed_tokens(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Shape) -> str:
    return "that reads all earlier tokens"


OPERATORS = (
    OperatorKind(
        kind="gated_delta",
        summary="Linear attention by the gated delta rule, in chunks; (rows, tokens, heads, head dim).",
        inputs=("q", "k", "v", "decay", "beta"),
        attributes={
            "chunk": "tokens of a chunk",
            "scale": "factor of the queries",
            "norm_eps": "null, or the number added to the squared norms by which queries and keys are divided",
        },
        shapes=_result_shape,
        flops=lambda call: DeltaWork.of_call(call).count_flops(),
        executed_flops=lambda call: DeltaWork.of_call(call).count_executed(),
        kernel_traffic=_traffic,
        kernels=lambda call: DeltaWork.of_call(call).count_kernels(),
        saves=_saved_values,
        own_bytes=lambda call: DeltaWork.of_call(call).state_bytes(),
        forward_extra=lambda call: DeltaWork.of_call(call).forward_peak(),
        backward_extra=lambda call: DeltaWork.of_call(call).backward_peak(),
        boundary=True,
        heavy=True,
        mixes_tokens=_mixed_tokens,
        makes_features=True,
    ),
)
