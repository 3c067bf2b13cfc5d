"""The time of one pass of an operator on one device, by its data sheet.

Without more figures of a device kind, the larger of FLOPs / (peak x efficiency) and bytes / bandwidth decides
(roofline: Williams, Waterman and Patterson 2009). Kernels of accelerators take longer, for three reasons that
`DeviceKind` describes:

- A matrix product moves its activations `product_traffic` times, and this adds to its FLOPs: products of small matrices
  reach less of the peak than large ones. For hidden size h the share reached is about h / (h + constant).
- Attention in one kernel reaches `attention_efficiency` of the peak.
- Other operators reach `bandwidth_efficiency` of the bandwidth: eager kernels read and write intermediate results which
  the operator graph does not count.
"""

from __future__ import annotations

from typing import NamedTuple

from pipefit.cluster.types import DeviceKind
from pipefit.model.ops import OperatorKind
from pipefit.precision import COMPUTE_TYPE, NARROW, PRODUCT_TYPE, Precision

NARROW_TRAFFIC = 0.75
"""Traffic of a product in FP8 over that in 16 bits: the two factors are half as wide, the result is not."""


class PassWork(NamedTuple):
    """Executed FLOPs and memory traffic of one pass of an operator."""

    flops: float
    moved_bytes: float
    "Everything that is read and written once."
    weight_bytes: float = 0.0
    "The part of `moved_bytes` that are parameters and their gradients."
    quantized_bytes: float = 0.0
    "Moved to turn the factors of a product into FP8; 0: the product runs in the type of the activations."


class KernelTime(NamedTuple):
    """Seconds that the FLOPs and the bytes of one pass take, without the time to issue it."""

    compute_s: float
    memory_s: float
    adds_up: bool
    "The time is the sum of both; otherwise the larger one."

    @property
    def seconds(self) -> float:
        """The time of the pass, without the time to issue it."""
        return self.compute_s + self.memory_s if self.adds_up else max(self.compute_s, self.memory_s)


def kernel_time(work: PassWork, operator: OperatorKind, kind: DeviceKind, precision: Precision) -> KernelTime:
    """Return the time of one pass of an operator on a device of this kind."""
    wide = precision in NARROW and not work.quantized_bytes
    peak = kind.peak_flops_per_s[(COMPUTE_TYPE if wide else PRODUCT_TYPE)[precision]]
    bandwidth = kind.memory_bandwidth_bytes_per_s
    if operator.is_attention and not operator.packs_rows and kind.attention_efficiency is not None:
        return KernelTime(work.flops / (peak * kind.attention_efficiency), work.moved_bytes / bandwidth, False)
    compute_s = work.flops / (peak * kind.efficiency)
    if work.flops and kind.product_traffic is not None:
        moved_bytes = kind.product_traffic * (work.moved_bytes - work.weight_bytes) + work.weight_bytes
        if work.quantized_bytes:
            moved_bytes = NARROW_TRAFFIC * moved_bytes + work.quantized_bytes
        return KernelTime(compute_s, moved_bytes / bandwidth, True)
    moved_bytes = work.moved_bytes + work.quantized_bytes
    return KernelTime(compute_s, moved_bytes / (bandwidth * kind.bandwidth_efficiency), False)
