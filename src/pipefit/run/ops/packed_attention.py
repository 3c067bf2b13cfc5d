"""packed_attention(q, k, v, documents) {scale, cut}: scaled dot products within the images of a packed row.

q, k, v (B, T, H, K), documents int64 (B, T): the place in its row where a token's image starts; result (B, T, H, K).
Every image (or run of images of one length) is one call of the kernels in `attention_kernels`, forward and backward,
on views of its own tokens: the work is the sum of the squared lengths, and nothing is padded or masked. Where the
images lie is read from `documents` once a microbatch and shared by the layers of the stage; a device that is not the
CPU is waited for then, unless the feed says it (`Feed.image_lengths`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from pipefit.model.graph import Operator
from pipefit.run.autograd.attention_kernels import AttentionCall, attend_backward, attend_forward, statistics_dtype
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep


class ImageSpan(NamedTuple):
    """Images of one length that follow each other: their queries that are here, and all of their keys."""

    row: int
    queries: tuple[int, int]
    "Among the queries of this device."
    keys: tuple[int, int]
    count: int = 1
    "Of images; more than one only where all of their queries are here."

    def view_queries(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, H, K) -> a view of these queries: images, tokens, H, K."""
        return x[self.row, slice(*self.queries)].unflatten(0, (self.count, -1))

    def view_keys(self, x: torch.Tensor) -> torch.Tensor:
        """The same of the keys."""
        return x[self.row, slice(*self.keys)].unflatten(0, (self.count, -1))

    def view_sums(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, T) -> a view of what these queries have there: images, H, tokens."""
        return x[self.row, :, slice(*self.queries)].unflatten(1, (self.count, -1)).transpose(0, 1)


class _PackedAttention(torch.autograd.Function):
    """Keeps q, k, v, the result and the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, spans: Sequence[ImageSpan], call: AttentionCall) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=statistics_dtype(q.dtype), device=q.device)
        for span in spans:
            found, sums = attend_forward(call, span.view_queries(q), span.view_keys(k), span.view_keys(v))
            span.view_queries(out).copy_(found)
            span.view_sums(lse).copy_(sums)
        ctx.spans, ctx.call, ctx.lse = spans, call, lse
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for span in ctx.spans:
            keys, own = (span.view_keys(k), span.view_keys(v)), (span.view_queries(out), span.view_sums(ctx.lse))
            found = attend_backward(ctx.call, span.view_queries(dy), span.view_queries(q), *keys, *own)
            for whole, part, of in zip(
                (dq, dk, dv), found, (span.view_queries, span.view_keys, span.view_keys), strict=True
            ):
                of(whole).copy_(part)
        ctx.lse = None
        return dq, dk, dv, None, None


def image_runs(record: SavedForward, documents: torch.Tensor) -> list[list[tuple[int, int]]]:
    """For every row the runs [start, stop) of its images, in order."""
    key = ("images", id(documents))
    if key not in record.cache:
        lengths = record.feed.image_lengths
        if lengths is not None and documents.shape[0] == 1 and sum(lengths) == documents.shape[1]:
            bounds = [[0]]
            for length in lengths:
                bounds[0].append(bounds[0][-1] + length)
        else:
            bounds = [[*sorted({*starts}), len(starts)] for starts in documents.tolist()]
        found = [[(a, b) for a, b in pairwise(row) if a < b] for row in bounds]
        record.cache[key] = (documents, found)  # with the tensor, so that its identity is nobody else's
    runs: list[list[tuple[int, int]]] = record.cache[key][1]
    return runs


def find_spans(runs: Sequence[Sequence[tuple[int, int]]], first: int, count: int) -> list[ImageSpan]:
    """The spans of the `count` queries from place `first` of every row: images of one length in one, where they follow
    each other and are here whole."""
    found: list[ImageSpan] = []
    for row, of_row in enumerate(runs):
        for start, stop in of_row:
            low, high = max(start, first), min(stop, first + count)
            if low >= high:
                continue
            last = found[-1] if found else None
            whole = (low, high) == (start, stop)
            if (
                last is not None
                and whole
                and last.row == row
                and last.keys[1] == start
                and _has_length(last, stop - start)
            ):
                new = ImageSpan(row, (last.queries[0], high - first), (last.keys[0], stop), last.count + 1)
                found[-1] = new
            else:
                found.append(ImageSpan(row, (low - first, high - first), (start, stop)))
    return found


def _has_length(span: ImageSpan, length: int) -> bool:
    """Whether a span is of whole images of this length."""
    keys = span.keys[1] - span.keys[0]
    return keys == span.queries[1] - span.queries[0] == span.count * length


def build_packed_attention(operator: Operator, context: OperatorContext) -> OperatorStep:
    call = AttentionCall(float(operator.attributes["scale"]), causal=False)
    dim, first, _ = operator.attributes.get("cut", (0, 0, 0))

    def first_place(queries: int, tokens: int) -> int:
        if dim != 1 or queries == tokens:
            return 0
        return context.shard.runs(tokens)[context.shard.position][0] if first < 0 else int(first)

    def run_packed_attention(
        record: SavedForward, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor
    ) -> Any:
        spans = find_spans(image_runs(record, documents), first_place(q.shape[1], k.shape[1]), q.shape[1])
        return _PackedAttention.apply(q, k, v, spans, call)

    return OperatorStep(run_packed_attention, wants_record=True)


BUILDERS = {"packed_attention": build_packed_attention}
