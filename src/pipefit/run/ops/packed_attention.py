"""packed_attention(q, k, v, documents, grid...) {scale, cut, unused, window}: scaled dot products within the images of
a packed row, or within windows of them.

q, k, v (B, T, H, K), or (B, T, M, H, K) if a token stands for M patches, all of which attend. documents int64 (B, T):
the position in its row where a token's image starts. The result has the shape of q. First and last patches of an image
may be unused. Every image (or run of images of equal length) is one call of the kernels in `attention_kernels`, forward
and backward, on views of its tokens. The work is the sum of the squared lengths, without padding or masks. Image
boundaries are read from `documents` once per microbatch and shared by the layers of the stage. On a device other than
the CPU this waits for the device, unless the inputs provide them (`StageInputs.image_lengths`).
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
    """Consecutive images of equal length: their queries on this device, and all of their keys, without the unused
    ones."""

    row: int
    queries: tuple[int, int]
    "Range among the queries of this device."
    keys: tuple[int, int]
    count: int = 1
    "Number of images; more than one only if all of their queries are on this device."
    unused_queries: tuple[int, int] = (0, 0)
    "First and last of these queries, in each image, that take no part."
    unused_keys: tuple[int, int] = (0, 0)

    def view_queries(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, H, K) -> a view of these queries: images, tokens, H, K."""
        return _used_part(x[self.row, slice(*self.queries)].unflatten(0, (self.count, -1)), self.unused_queries)

    def view_keys(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, H, K) -> a view of these keys: images, tokens, H, K."""
        return _used_part(x[self.row, slice(*self.keys)].unflatten(0, (self.count, -1)), self.unused_keys)

    def view_sums(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, T) -> a view of the log-sum-exps of these queries: images, H, tokens."""
        sums = x[self.row, :, slice(*self.queries)].unflatten(1, (self.count, -1))
        return _used_part(sums.movedim(2, 1), self.unused_queries).movedim(1, 2).transpose(0, 1)


def _used_part(x: torch.Tensor, unused: tuple[int, int]) -> torch.Tensor:
    """Return a view without the first and last unused entries of dimension 1."""
    return x[:, unused[0] : x.shape[1] - unused[1]] if any(unused) else x


class _PackedAttention(torch.autograd.Function):
    """Attention within images; saves q, k, v, the result and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, spans: Sequence[ImageSpan], call: AttentionCall, complete: bool
    ) -> torch.Tensor:
        out = (torch.empty if complete else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=statistics_dtype(q.dtype), device=q.device)
        for span in spans:
            result, sums = attend_forward(call, span.view_queries(q), span.view_keys(k), span.view_keys(v))
            span.view_queries(out).copy_(result)
            span.view_sums(lse).copy_(sums)
        ctx.spans, ctx.call, ctx.lse = spans, call, lse
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for span in ctx.spans:
            keys, outputs = (span.view_keys(k), span.view_keys(v)), (span.view_queries(out), span.view_sums(ctx.lse))
            span_gradients = attend_backward(ctx.call, span.view_queries(dy), span.view_queries(q), *keys, *outputs)
            for gradient, part, of in zip(
                (dq, dk, dv), span_gradients, (span.view_queries, span.view_keys, span.view_keys), strict=True
            ):
                of(gradient).copy_(part)
        ctx.lse = None
        return dq, dk, dv, None, None, None


def image_runs(record: SavedForward, documents: torch.Tensor) -> list[list[tuple[int, int]]]:
    """Return for every row the runs [start, stop) of its images, in order."""
    key = ("images", id(documents))
    if key not in record.cache:
        lengths = record.feed.image_lengths
        if lengths is not None and documents.shape[0] == 1 and sum(lengths) == documents.shape[1]:
            bounds = [[0]]
            for length in lengths:
                bounds[0].append(bounds[0][-1] + length)
        else:
            bounds = [[*sorted({*starts}), len(starts)] for starts in documents.tolist()]
        row_runs = [[(a, b) for a, b in pairwise(row) if a < b] for row in bounds]
        record.cache[key] = (documents, row_runs)  # holding the tensor keeps its id unique
    runs: list[list[tuple[int, int]]] = record.cache[key][1]
    return runs


def window_runs(
    record: SavedForward, documents: torch.Tensor, grid: torch.Tensor, side: int
) -> list[list[tuple[int, int]]]:
    """Return for every row the runs [start, stop) of the windows of side x side tokens of its images, in order.

    Tokens of one window follow each other. A longer run, as inputs of a profile have it, is cut.
    """
    key = ("windows", id(documents), id(grid), side)
    if key not in record.cache:
        windows = torch.cat((documents.unsqueeze(-1), grid[..., :2] // side), dim=-1)
        begins = (windows[:, 1:] != windows[:, :-1]).any(-1)
        row_runs = []
        for row in begins.tolist():
            bounds = [0, *(position + 1 for position, begin in enumerate(row) if begin), documents.shape[1]]
            cuts = [range(first, last, side * side) for first, last in pairwise(bounds)]
            row_runs.append([(i, min(i + side * side, cut.stop)) for cut in cuts for i in cut])
        record.cache[key] = (documents, grid, row_runs)  # holding the tensors keeps their ids unique
    runs: list[list[tuple[int, int]]] = record.cache[key][2]
    return runs


def find_spans(
    runs: Sequence[Sequence[tuple[int, int]]], first: int, count: int, unused: tuple[int, int] = (0, 0)
) -> list[ImageSpan]:
    """Return the spans of the `count` queries from position `first` of every row. Consecutive complete images of equal
    length form one span. The first `unused[0]` and the last `unused[1]` tokens of an image take no part."""
    spans: list[ImageSpan] = []
    for row, of_row in enumerate(runs):
        for start, stop in of_row:
            low, high = max(start, first), min(stop, first + count)
            if low >= high:
                continue
            last = spans[-1] if spans else None
            complete = (low, high) == (start, stop)
            if (
                last is not None
                and complete
                and last.row == row
                and last.keys[1] == start
                and _has_length(last, stop - start)
            ):
                spans[-1] = last._replace(
                    queries=(last.queries[0], high - first), keys=(last.keys[0], stop), count=last.count + 1
                )
            else:
                absent = max(0, start + unused[0] - low), max(0, high - stop + unused[1])
                if sum(absent) < high - low:
                    spans.append(ImageSpan(row, (low - first, high - first), (start, stop), 1, absent, unused))
    return spans


def _has_length(span: ImageSpan, length: int) -> bool:
    """Return True if all images of a span are complete and have this length."""
    keys = span.keys[1] - span.keys[0]
    return keys == span.queries[1] - span.queries[0] == span.count * length


def build_packed_attention(operator: Operator, context: OperatorContext) -> OperatorStep:
    call = AttentionCall(float(operator.attributes["scale"]), causal=False)
    dim, first, _ = operator.attributes.get("cut", (0, 0, 0))
    before, after = operator.attributes.get("unused", (0, 0))
    unused, complete = (int(before), int(after)), not before + after
    side = int(operator.attributes.get("window", 0))

    def first_place(queries: int, tokens: int) -> int:
        if dim != 1 or queries == tokens:
            return 0
        return context.shard.runs(tokens)[context.shard.position][0] if first < 0 else int(first)

    def run_packed_attention(
        record: SavedForward, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor, *grid: Any
    ) -> Any:
        start, queries = first_place(q.shape[1], k.shape[1]), q.shape[1]
        runs = window_runs(record, documents, grid[0], side) if side else image_runs(record, documents)
        if q.dim() == 4:
            return _PackedAttention.apply(q, k, v, find_spans(runs, start, queries, unused), call, complete)
        patches = q.shape[2]
        runs = [[(a * patches, b * patches) for a, b in row] for row in runs]
        spans = find_spans(runs, start * patches, queries * patches, unused)
        flat = (x.flatten(1, 2) for x in (q, k, v))
        return _PackedAttention.apply(*flat, spans, call, complete).view_as(q)

    return OperatorStep(run_packed_attention, wants_record=True)


BUILDERS = {"packed_attention": build_packed_attention}
