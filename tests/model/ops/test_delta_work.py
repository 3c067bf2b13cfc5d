"""FLOPs, bytes and kernels that the gated delta rule states, against the functions of PyTorch that run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from pipefit.cluster.types import DeviceKind
from pipefit.cost.compute.operator_times import operator_times
from pipefit.model.graph import Graph, Operator, TensorSpec
from pipefit.model.ops import KINDS
from pipefit.model.ops.kind import OperatorCall
from pipefit.run.autograd.delta_rule import DeltaFunction, DeltaRule
from pipefit.run.stage.memory_audit import AllocationAudit

KIND = KINDS["gated_delta"]
Sizes = tuple[int, int, int, int, int, int, int, bool]
"""(rows, tokens, key heads, heads, features of a key, of a value, tokens of a chunk, a decay for each feature)."""

BY_TOKEN: list[Sizes] = [
    (2, 512, 1, 2, 32, 32, 32, False), (1, 700, 2, 4, 32, 64, 16, False), (1, 1056, 2, 2, 48, 48, 64, False),
]  # fmt: skip
BY_FEATURE: list[Sizes] = [
    (2, 512, 2, 2, 32, 32, 32, True), (1, 1056, 2, 2, 48, 48, 64, True), (1, 320, 1, 1, 32, 32, 16, True),
]  # fmt: skip
SIZES = BY_TOKEN + BY_FEATURE


def delta_call(sizes: Sizes, compute_bytes: int = 4) -> OperatorCall:
    rows, tokens, key_heads, heads, keys, values, chunk, by_feature = sizes
    k, v, beta = (rows, tokens, key_heads, keys), (rows, tokens, heads, values), (rows, tokens, heads)
    inputs = (k, k, v, (*beta, keys) if by_feature else beta, beta)
    return OperatorCall(inputs, (v,), {"chunk": chunk, "scale": 0.5, "norm_eps": 1e-6}, {}, compute_bytes)


def make_leaves(call: OperatorCall, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    leaves = [torch.rand(shape or (), dtype=dtype) for shape in call.inputs]
    leaves[3].mul_(-1.0)
    return [leaf.requires_grad_() for leaf in leaves]


class Kernels(TorchDispatchMode):
    """Counts the functions that make or change numbers, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, written = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in ((args, kwargs), result)
        )
        storages = {leaf.untyped_storage()._cdata for leaf in read}
        is_view = all(leaf.untyped_storage()._cdata in storages for leaf in written) and not func._schema.is_mutable
        if not is_view and "empty" not in str(func):
            self.count += 1
            self.bytes += sum(leaf.numel() * leaf.itemsize for leaf in (*read, *written))
        return result


def run_passes(sizes: Sizes, watch: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return two watches, one of the forward and one of the backward."""
    leaves, rule = make_leaves(delta_call(sizes), dtype), DeltaRule(sizes[6], 0.5, 1e-6)
    with watch() as forward:
        result = DeltaFunction.apply(*leaves, rule)
    gradient = torch.ones_like(result)
    with watch() as backward:
        torch.autograd.grad(result, leaves, gradient)
    return forward, backward


def unsolved(sizes: Sizes) -> int:
    """Return the FLOPs of one solution of all triangular systems, which PyTorch's counter omits."""
    rows, tokens, _, heads, keys, values, chunk, _ = sizes
    return rows * -(-tokens // chunk) * chunk * heads * chunk * (keys + values)


@pytest.mark.parametrize("sizes", BY_TOKEN, ids=str)
def test_flops_are_those_of_the_products(sizes: Sizes) -> None:
    forward, backward = run_passes(sizes, lambda: FlopCounterMode(display=False))
    assert KIND.executed_flops is not None
    stated, executed = KIND.flops(delta_call(sizes)), KIND.executed_flops(delta_call(sizes))
    system = unsolved(sizes)
    assert stated.forward == forward.get_total_flops() + 2 * system
    assert stated.input_gradient == 2 * stated.forward and stated.weight_gradient == 0
    assert executed.forward == forward.get_total_flops() + system
    # Twice the systems of the backward are solutions; the first reader of a row needs no gradient of a zero state.
    assert executed.input_gradient == pytest.approx(backward.get_total_flops() + 2 * system, rel=0.03)


def test_flops_do_not_depend_on_the_chunks_before() -> None:
    """The work grows with the tokens, in whole chunks."""
    one, two, more = (KIND.flops(delta_call((1, tokens, 2, 4, 16, 16, 64, False))).forward for tokens in (64, 128, 129))
    assert two == 2 * one and more == 3 * one


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_saved_bytes_are_those_that_autograd_saves(sizes: Sizes) -> None:
    call, saved = delta_call(sizes), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        DeltaFunction.apply(*make_leaves(call), DeltaRule(sizes[6], 0.5, 1e-6))
    inputs = sum(4 * torch.Size(shape or ()).numel() for shape in call.inputs)
    assert sum(saved) == inputs + KIND.own_bytes(call)
    assert KIND.own_bytes(call) > 0 or sizes[1] <= 16 * sizes[6]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernels_and_their_traffic_are_counted(sizes: Sizes) -> None:
    call, near = delta_call(sizes), 0.25 if sizes[-1] else 0.1
    assert KIND.kernels is not None and KIND.kernel_traffic is not None
    stated = zip(KIND.kernels(call), KIND.kernel_traffic(call), strict=True)
    for watch, (count, traffic) in zip(run_passes(sizes, Kernels), stated, strict=True):
        assert count == pytest.approx(watch.count, rel=near)
        assert traffic == pytest.approx(watch.bytes, rel=near)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_peak_of_a_segment_is_known(sizes: Sizes) -> None:
    call = delta_call(sizes)
    leaves, rule, results = make_leaves(call), DeltaRule(sizes[6], 0.5, 1e-6), []
    gradient = torch.ones(call.outputs[0])
    with AllocationAudit() as audit:
        audit.mark_phase("F", lambda: results.append(DeltaFunction.apply(*leaves, rule)))()
        audit.mark_phase("B", lambda: results.extend(torch.autograd.grad(results[0], leaves, gradient)))()
    forward, backward = audit.usage
    kept = 4 * results[0].numel() + KIND.own_bytes(call)
    gradients = sum(leaf.nbytes for leaf in leaves)
    assert KIND.forward_extra(call) == pytest.approx(forward.peak_bytes - kept, rel=0.15)
    assert KIND.backward_extra(call) == pytest.approx(backward.peak_bytes - kept - gradients, rel=0.15)


def test_the_time_counts_every_kernel() -> None:
    """On a device without limits, only the time to issue kernels is left."""
    call = delta_call((2, 512, 1, 2, 32, 32, 32, False))
    names = ("q", "k", "v", "decay", "beta")
    inputs = tuple(TensorSpec(name=n, shape=s or ()) for n, s in zip(names, call.inputs, strict=True))
    operator = Operator(kind="gated_delta", inputs=names, outputs=("y",), attributes=call.attributes)
    result = TensorSpec(name="y", shape=call.outputs[0])
    graph = Graph(inputs=inputs, outputs=("y",), operators=(operator,), parameters=(), tensors=(result,))
    peaks = dict.fromkeys(("float64", "float32", "bfloat16"), 1e30)
    toy = DeviceKind(
        name="toy", memory_bytes=1, peak_flops_per_s=peaks, memory_bandwidth_bytes_per_s=1e30, efficiency=1.0,
        overhead_s=1.0,
    )  # fmt: skip
    assert KIND.kernels is not None
    assert operator_times(graph, operator, toy, "float32", None, {})[:2] == pytest.approx(KIND.kernels(call))
