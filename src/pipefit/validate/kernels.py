"""Kernel-level costs of GPT operators on an NVIDIA GPU, with the interface of the roofline model.

A matrix product is cut into tiles that run in waves over the multiprocessors. Each tile runs at the maximum rate of its
shape, with a start-up cost of `PROLOGUE` elements of the inner dimension. A product takes at least the time of moving
its operands. Other kernels only move bytes. Fusion follows Megatron-LM in 2022: bias with GELU, bias with dropout and
residual, scale with mask and softmax; attention is not fused. A kernel takes at least its launch time (eager PyTorch).
Constants come from the vendor's documents or NVIDIA's matrix-multiplication guide and are fixed. The fields of
`GpuRates` can be fitted; each data set names the ones it fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.roofline import LayerCost
from pipefit.cost.compute.shard_exchanges import BACKWARD_COLLECTIVE
from pipefit.cost.static_memory import COMPUTE_BYTES
from pipefit.model.analysis.saved import Recompute, kept_values, operator_call, saved_bytes
from pipefit.model.graph import Graph
from pipefit.model.ops.kind import OperatorCall
from pipefit.validate.collectives import MeasuredAllReduces

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.82), (64, 128, 0.82), (64, 64, 0.65))
"""Rows, columns, and the share of the maximum rate that a kernel with such tiles reaches; larger tiles reuse more of
their loads (NVIDIA, Matrix Multiplication Background User's Guide, section on tile efficiency)."""

INNER_SPLITS = (1, 2, 4, 8)
"""Allowed splits of the inner dimension (split-K), so that few tiles still fill the multiprocessors."""

PROLOGUE = 128
"""Cost of filling and draining a tile's pipeline, in elements of the inner dimension."""

ALIGNED = 8
"""Every dimension must be a multiple of this for a half-precision matrix product at full rate (same guide)."""

LOSS_FORWARD = (12, 40)
"""Kernels of Megatron's vocabulary-parallel cross-entropy, and their bytes per logit: cast to float32, maximum,
difference, exponential, sum, quotient, and the masks of the labels."""

LOSS_BACKWARD = (6, 22)
"""Kernels and bytes per logit of its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """One GPU: its data sheet, and the share of it that kernels reach."""

    peak_flops_per_s: float = 312e12
    memory_bytes_per_s: float = 2039e9
    multiprocessors: int = 108
    matmul_share: float = 0.9
    "Share of the peak that a matrix product reaches if its tiles fill every wave."
    memory_share: float = 0.8
    "Share of the memory bandwidth that kernels without arithmetic reach."
    kernel_s: float = 2e-6
    "Start and end of a kernel on the device."
    launch_s: float = 0.0
    "Least time from one kernel launch to the next in eager PyTorch."
    unaligned_share: float = 1.0
    "Rate of a matrix product with a dimension that is not a multiple of `ALIGNED`, relative to an aligned one."
    collective_s: float = 0.0
    "Start of a collective, in addition to its measured time."


class PassTimes(NamedTuple):
    """Seconds of one operator."""

    forward_s: float
    input_s: float
    weight_s: float


class KernelCosts:
    """Layer costs for `cost_table`; results are cached."""

    def __init__(self, gpu: GpuRates, collectives: MeasuredAllReduces, attention_again: bool = False) -> None:
        """Store the rates and measured collectives.

        `attention_again` selects the selective recomputation of arXiv 2205.05198. It recomputes the scores in the
        backward pass and saves the tensors that `recompute="none"` saves in this project (queries, keys, values,
        output).
        """
        self.gpu = gpu
        self.collectives = collectives
        self.attention_again = attention_again
        self.notes: tuple[str, ...] = (f"kernels: {gpu}",)
        self._known: dict[object, LayerCost] = {}
        self._graphs: dict[int, Graph] = {}

    def layer_cost(self, query: LayerQuery) -> LayerCost:
        """Return the cost of the layer; transient memory is not modelled. `collective_key` is the groups that run a
        collective at the same time. Their size decides its time here, and `collective` is ignored."""
        graph, groups = query.graph, query.collective_key
        devices = len(groups[0]) if isinstance(groups, tuple) and groups else 1
        self._graphs[id(graph)] = graph  # kept alive, so that its id is not reused
        key = (id(graph), query.shape, query.precision, query.recompute, devices)
        if key not in self._known:
            self._known[key] = self._sum_cost(query, devices)
        return self._known[key]

    def _sum_cost(self, query: LayerQuery, devices: int) -> LayerCost:
        facts = _layer_facts(query.graph, query.shape, COMPUTE_BYTES[query.precision], query.recompute)
        passes = [self._operator_times(kind, call, devices) for kind, call in facts.calls]
        # The weight pass of an all_gather has its second gather.
        again = math.fsum(passes[index].forward_s for index in facts.again if facts.calls[index][0] != "all_gather")
        if self.attention_again and query.recompute == "none":
            again = math.fsum(
                p.forward_s for p, (kind, _) in zip(passes, facts.calls, strict=True) if kind == "attention"
            )
        return LayerCost(
            forward_s=math.fsum(p.forward_s for p in passes),
            input_s=math.fsum(p.input_s for p in passes) + again,
            weight_s=math.fsum(p.weight_s for p in passes),
            saved_bytes=facts.saved_bytes,
            pending_bytes=facts.pending_bytes,
        )

    def _operator_times(self, kind: str, call: OperatorCall, devices: int) -> PassTimes:
        if kind in BACKWARD_COLLECTIVE:
            size = float(max(math.prod(call.inputs[0] or ()), math.prod(call.outputs[0])) * call.compute_bytes)
            both = (
                self.collectives.collective_s(collective, devices, size)
                for collective in (kind, BACKWARD_COLLECTIVE[kind])
            )
            forward_s, backward_s = (time_s + self.gpu.collective_s for time_s in both)
            again_s = (
                forward_s if kind == "all_gather" else 0.0
            )  # saved as a shard, gathered again for the weight gradient
            return PassTimes(forward_s, backward_s, again_s)
        if kind == "linear":
            return self._linear_times(call)
        if kind == "attention":
            return self._attention_times(call)
        return self._moving_times(kind, call)

    def _linear_times(self, call: OperatorCall) -> PassTimes:
        x, weight = call.inputs[0], call.inputs[1]
        assert x is not None and weight is not None
        rows, (out, inner) = math.prod(x[:-1]), weight
        bias_s = self._move_s(rows * out * call.compute_bytes) if call.inputs[2] else 0.0
        width = call.compute_bytes
        return PassTimes(
            self.matmul_s(rows, out, inner, width),
            self.matmul_s(rows, inner, out, width),
            self.matmul_s(out, inner, rows, width) + bias_s,
        )

    def _attention_times(self, call: OperatorCall) -> PassTimes:
        """Time unfused attention: batched products for scores and context; one kernel for scale, mask and softmax, one
        for dropout."""
        q, width = call.inputs[0], call.compute_bytes
        assert q is not None
        rows, tokens, heads, dim = q
        count, scores, values = rows * heads, rows * heads * tokens * tokens, rows * tokens * heads * dim
        product_s = self.matmul_s(tokens, tokens, dim, width, count)
        context_s = self.matmul_s(tokens, dim, tokens, width, count)
        softmax_s = self._move_s(2 * width * scores)
        dropout_s = self._move_s((2 * width + 1) * scores)
        copies_s = self._move_s(2 * width * values)
        forward_s = product_s + softmax_s + dropout_s + context_s + 2 * copies_s
        # Backward: two products each for scores and context; softmax reads its output besides the gradient.
        backward_s = 2 * (product_s + context_s) + dropout_s + self._move_s(3 * width * scores) + 4 * copies_s
        return PassTimes(forward_s, backward_s, 0.0)

    def _moving_times(self, kind: str, call: OperatorCall) -> PassTimes:
        """Time the kernels that only move bytes."""
        count = math.prod(call.outputs[0]) * call.compute_bytes
        if kind == "layer_norm":  # its gradient pass is followed by the sum with the residual's gradient
            return PassTimes(
                self._move_s(2 * count), self._move_s(3 * count) + self._move_s(3 * count), self._move_s(2 * count)
            )
        if kind == "gelu":
            return PassTimes(self._move_s(2 * count), self._move_s(3 * count), 0.0)
        if kind == "add" and len(call.inputs[1] or ()) > 1:  # fused with bias and dropout: residual, value, mask
            return PassTimes(
                self._move_s(3 * count + count / 2), self._move_s(2 * count + count / 2), self._move_s(count)
            )
        if kind == "embedding":
            weight = call.inputs[1]
            assert weight is not None
            return PassTimes(
                self._move_s(2 * count), 0.0, self._move_s(2 * count + 2 * math.prod(weight) * call.compute_bytes)
            )
        if kind == "cross_entropy":
            logits = call.inputs[0]
            assert logits is not None
            sizes = ((kernels, moved * math.prod(logits)) for kernels, moved in (LOSS_FORWARD, LOSS_BACKWARD))
            forward_s, input_s = (kernels * self._move_s(size / kernels) for kernels, size in sizes)
            return PassTimes(forward_s, input_s, 0.0)
        return PassTimes(0.0, 0.0, 0.0)

    def matmul_s(self, rows: int, columns: int, inner: int, width: int, count: int = 1) -> float:
        """Return the seconds of `count` products (rows, inner) x (inner, columns) as one kernel."""
        gpu = self.gpu
        aligned = rows % ALIGNED == columns % ALIGNED == inner % ALIGNED == 0
        rate = gpu.peak_flops_per_s * gpu.matmul_share * (1.0 if aligned else gpu.unaligned_share)
        waves_s = _tiled_flops(rows, columns, inner, count, gpu.multiprocessors) / rate
        moved = width * count * (rows * inner + inner * columns + rows * columns)
        return max(waves_s + gpu.kernel_s, moved / (gpu.memory_bytes_per_s * gpu.memory_share), gpu.launch_s)

    def _move_s(self, size: float) -> float:
        gpu = self.gpu
        return max(size / (gpu.memory_bytes_per_s * gpu.memory_share) + gpu.kernel_s, gpu.launch_s)


class _LayerFacts(NamedTuple):
    """Facts of a layer that do not depend on the GPU."""

    calls: tuple[tuple[str, OperatorCall], ...]
    again: tuple[int, ...]
    saved_bytes: int
    pending_bytes: int


_known: dict[object, tuple[Graph, _LayerFacts]] = {}


def _layer_facts(graph: Graph, shape: MicrobatchShape, width: int, recompute: Recompute) -> _LayerFacts:
    """Compute the facts once per graph object and shape. The cache holds the graph, so that its id is not reused."""
    key = (id(graph), shape, width, recompute)
    if key not in _known:
        symbols = {"B": shape.rows, "T": shape.tokens, "P": shape.past, "S": shape.own_tokens}
        calls = tuple((op.kind, operator_call(graph, op, symbols, width)) for op in graph.operators)
        saved = saved_bytes(graph, symbols, width, recompute)
        again = kept_values(graph, recompute, width).again
        _known[key] = (graph, _LayerFacts(calls, again, saved.after_forward, saved.after_input_gradient))
    return _known[key][1]


@lru_cache(maxsize=65536)
def _tiled_flops(rows: int, columns: int, inner: int, count: int, multiprocessors: int) -> float:
    """Return the FLOPs that the full device could do in the time of the best tiling."""
    best = math.inf
    for tall, wide, share in TILES:
        tiles = math.ceil(rows / tall) * math.ceil(columns / wide) * count
        for split in INNER_SPLITS if count == 1 else (1,):
            waves = math.ceil(tiles * split / multiprocessors)
            depth = inner / split + PROLOGUE
            best = min(best, waves * multiprocessors * 2.0 * tall * wide * depth / share)
    return best
