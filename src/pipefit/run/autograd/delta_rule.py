"""The gated delta rule in chunks of tokens: Gated DeltaNet (Yang et al., 2024, arXiv:2412.06464, section 3.3), and Kimi
Delta Attention, in which every feature of a key has a decay of its own (arXiv:2510.26692).

A state S (K, V) of each head is read and corrected token by token:

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - k_t^T exp(g_t) S_(t-1))^T,        y_t = S_t^T q_t

Within a chunk the corrections of all tokens are one triangular system (the UT transform), so only the states between
chunks are sequential. A segment is a run of chunks that is computed together. The forward keeps the inputs and the
states between segments; the backward computes one segment after the other again, the last one first.

Letters of shapes: B rows, T tokens, G heads of keys, R heads of values for each of them, H = G R. N chunks have C
tokens. K and V are the features of a key and of a value. F is the number of decays of a token: K, or 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pipefit.model.ops.gated_delta import PAIR_BLOCK, SEGMENT_CHUNKS


class DeltaRule(NamedTuple):
    """Settings of a gated delta rule."""

    chunk: int
    scale: float
    "Factor of the queries."
    norm_eps: float | None
    "Queries and keys have norm 1, with this number added to their squared norm; None: they are taken as they are."

    def segment_ranges(self, tokens: int) -> list[tuple[int, int]]:
        """Return the first token and the end of every segment."""
        step = SEGMENT_CHUNKS * self.chunk
        return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]


class ChunkedInputs(NamedTuple):
    """The inputs of a segment in chunks, in float32 or wider; tokens of padding change no state."""

    query: Tensor
    "(B, G, 1, N, C, K), normalised and scaled."
    key: Tensor
    "(B, G, 1, N, C, K), normalised."
    value: Tensor
    "(B, G, R, N, C, V)."
    decay: Tensor
    "(B, G, R, N, C, F): sums of the decays g from the start of the chunk."
    beta: Tensor
    "(B, G, R, N, C, 1)."


class DeltaFunction(torch.autograd.Function):
    """The gated delta rule of complete rows: saves its inputs and the states between segments."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, rule: DeltaRule
    ) -> Any:
        inputs = (query, key, value, decay, beta)
        result, state, states = torch.empty_like(value, dtype=query.dtype), first_state(key, value), []
        for start, stop in rule.segment_ranges(value.shape[1]):
            if start:
                states.append(state)
            part, state = run_segment([tensor[:, start:stop] for tensor in inputs], state, rule)
            result[:, start:stop] = part
        ctx.rule = rule
        ctx.save_for_backward(*inputs, *states)
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        rule, inputs, states = ctx.rule, ctx.saved_tensors[:5], list(ctx.saved_tensors[5:])
        gradients = [torch.empty_like(tensor) for tensor in inputs]
        state_gradient = None
        for start, stop in reversed(rule.segment_ranges(dy.shape[1])):
            state = states.pop() if start else first_state(inputs[1], inputs[2])
            leaves = [tensor.detach().requires_grad_() for tensor in (*(x[:, start:stop] for x in inputs), state)]
            with torch.enable_grad():
                outputs = run_segment(leaves[:5], leaves[5], rule)
            count = 1 if state_gradient is None else 2  # nothing reads the state behind the last token
            output_gradients = (dy[:, start:stop], state_gradient)[:count]
            *parts, state_gradient = torch.autograd.grad(outputs[:count], leaves, output_gradients)
            for gradient, part in zip(gradients, parts, strict=True):
                gradient[:, start:stop] = part
        return *gradients, None


def first_state(key: Tensor, value: Tensor) -> Tensor:
    """Return the zero state (B, G, R, K, V) before the first token."""
    rows, _, groups, features = key.shape
    shape = (rows, groups, value.shape[2] // groups, features, value.shape[3])
    return torch.zeros(shape, dtype=torch.promote_types(key.dtype, torch.float32), device=key.device)


def run_segment(inputs: Sequence[Tensor], state: Tensor, rule: DeltaRule) -> tuple[Tensor, Tensor]:
    """Return the results (B, T, H, V) of the tokens of a segment, and the state behind its last token."""
    chunked = split_chunks(inputs, state, rule)
    query, key, value, decay, beta = chunked
    query_pairs, key_pairs = pair_products(query, key, decay)
    grown = decay.exp()
    corrections = torch.cat((value, key * grown), -1) * beta
    solved = torch.linalg.solve_triangular(key_pairs * beta, corrections, upper=False, unitriangular=True)
    values, readers = solved.split((value.shape[-1], key.shape[-1]), -1)
    last = decay[..., -1:, :]
    states, corrected, state = scan_chunks(values, readers, key * (last - decay).exp(), last.exp().mT, state)
    result = (query * grown) @ states + query_pairs @ corrected
    tokens = inputs[2].shape[1]
    return result.permute(0, 3, 4, 1, 2, 5).flatten(1, 2)[:, :tokens].flatten(2, 3).to(inputs[0].dtype), state


def split_chunks(inputs: Sequence[Tensor], state: Tensor, rule: DeltaRule) -> ChunkedInputs:
    """Return the inputs of a segment in chunks, in the dtype of the state."""
    groups, behind = inputs[1].shape[2], -inputs[1].shape[1] % rule.chunk
    parts = []
    for tensor in inputs:
        tensor = tensor.to(state.dtype)
        tensor = tensor.unsqueeze(-1) if tensor.dim() == 3 else tensor
        tensor = functional.pad(tensor, (0, 0, 0, 0, 0, behind)) if behind else tensor
        tensor = tensor.unflatten(2, (groups, -1)).unflatten(1, (-1, rule.chunk))
        parts.append(tensor.permute(0, 3, 4, 1, 2, 5).contiguous())
    query, key, value, decay, beta = parts
    if rule.norm_eps is not None:
        query, key = (x * (x.square().sum(-1, keepdim=True) + rule.norm_eps).rsqrt() for x in (query, key))
    return ChunkedInputs(query * rule.scale, key, value, decay.cumsum(-2), beta)


def pair_products(query: Tensor, key: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return two matrices of each chunk (B, G, R, N, C, C): the products of all queries, and of all keys, with earlier
    keys that have decayed until then."""
    chunk = key.shape[-2]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=key.device).triu(1)
    if decay.shape[-1] == 1:
        decayed = (decay - decay.mT).masked_fill(later, float("-inf")).exp()
        return (query @ key.mT) * decayed, (key @ key.mT) * decayed
    blocks = [_pair_block(query, key, decay, later, start) for start in range(0, chunk, PAIR_BLOCK)]
    query_pairs, key_pairs = (torch.cat(rows, -2) for rows in zip(*blocks, strict=True))
    return query_pairs, key_pairs


def _pair_block(query: Tensor, key: Tensor, decay: Tensor, later: Tensor, start: int) -> list[Tensor]:
    """Return the rows of both matrices from token `start` on. Earlier keys decay until that token first: each factor is
    then at most 1, and the rest is a product of matrices."""
    chunk = key.shape[-2]
    rows = slice(start, min(start + PAIR_BLOCK, chunk))
    first, here = decay[..., start : start + 1, :], decay[..., rows, :]
    hidden = later[rows, rows].unsqueeze(-1)
    decayed = (here.unsqueeze(-2) - here.unsqueeze(-3)).masked_fill(hidden, float("-inf")).exp()
    near = decayed * key[..., rows, :].unsqueeze(-3)
    before = (key[..., :start, :] * (first - decay[..., :start, :]).exp()).mT
    grown, results = (here - first).exp(), []
    for x in (query[..., rows, :], key[..., rows, :]):
        products = torch.cat(((x * grown) @ before, (near @ x.unsqueeze(-1)).squeeze(-1)), -1)
        results.append(functional.pad(products, (0, chunk - rows.stop)))
    return results


def scan_chunks(
    values: Tensor, readers: Tensor, keys: Tensor, decays: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states before every chunk, the values that its tokens add to them, and the state after the last one.

    `values` and `readers` solve the system of a chunk. The values are added to a zero state; the readers subtract the
    part that an earlier state already has. `keys` have decayed until the end of the chunk, a state by `decays`.
    """
    parts = [x.flatten(0, 2).unbind(1) for x in (values, -readers, keys.mT, decays)]
    heads, state, states, corrected = state.shape[:3], state.flatten(0, 2), [], []
    for value, reader, key, decay in zip(*parts, strict=True):
        states.append(state)
        corrected.append(torch.baddbmm(value, reader, state))
        state = torch.baddbmm(state * decay, key, corrected[-1])
    before, added = (torch.stack(items, 1).unflatten(0, heads) for items in (states, corrected))
    return before, added, state.unflatten(0, heads)
