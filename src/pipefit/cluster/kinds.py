"""Data-sheet figures of device kinds, and of the links that usually join them.

Every figure is the vendor's public one: dense (not sparse) peaks, memory as the driver reports it, memory bandwidth. A
kind without tensor cores for bfloat16 computes it at its float32 rate.

The share of the peak that large matrix products reach was measured by others where `product_share` names a source:
S. Bekman, Machine Learning Engineering, table of maximum achievable matmul FLOPS (torch 2.5 to 2.7, bfloat16). Five
constants are fitted to published training runs by `benchmarks/predictions/published_steps.py --fit`: the two shares of
attention, `PRODUCT_TRAFFIC`, `BANDWIDTH_SHARE` and `OVERLAP`. `overhead_s` is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.cluster.types import DeviceKind, Link, Provenance
from pipefit.errors import ClusterError, most_like

GB, MIB = 10**9, 2**20
TERA = 1e12
RESERVED_SHARE = 0.08
"""Share of the card's memory that is kept for the context, libraries, NCCL's buffers and the gaps of the allocator:
assumed."""

OVERLAP = 0.38
"""Share of the collectives beside a computation that costs nothing: fitted. NCCL takes a few multiprocessors and some
of the memory bandwidth."""

LINK_SHARE = 0.76
"""Share of a link's bandwidth inside a host that collectives reach: NCCL's all-reduce of 1 GiB on eight A100 has a bus
bandwidth of 229 of 300 GB/s (VIA-Research/vTrain). Assumed for all kinds."""

PRODUCT_TRAFFIC = 2.0
"""How often a matrix product moves its activations: fitted."""

BANDWIDTH_SHARE = 0.36
"""Share of the memory bandwidth of operators other than products and attention: fitted."""

ATTENTION_SHARE, HOPPER_ATTENTION_SHARE = 0.333, 0.178
"""Share of the peak that attention in one kernel reaches: fitted on A100, and on H100 with kernels of 2023 and 2024."""


@dataclass(frozen=True, slots=True)
class DataSheet:
    """One line of a data sheet: TFLOP/s by dtype, MiB, GB/s, and the link between two such devices of one host."""

    float64: float
    float32: float
    bfloat16: float
    memory_mib: int
    "As the driver reports it."
    memory_gb_per_s: float
    link_gb_per_s: float
    "One direction of the usual link between two devices of a host."
    link_name: str
    source: str
    product_share: float = 0.8
    "Share of the bfloat16 peak that large matrix products reach; 0.8: assumed."
    attention_share: float = ATTENTION_SHARE


HOPPER = 0.803, HOPPER_ATTENTION_SHARE

# float32 is the rate without TF32, as a float32 run here uses it. float64 counts tensor cores where they
# exist, and is 1/64 (T4: 1/32) of float32 on cards without double-precision units.
SHEETS: dict[str, DataSheet] = {
    "H200": DataSheet(67, 67, 989, 143771, 4800, 450, "NVLink 4", "NVIDIA H200 data sheet, SXM", *HOPPER),
    "H100": DataSheet(67, 67, 989, 81559, 3350, 450, "NVLink 4", "NVIDIA H100 data sheet, SXM5", *HOPPER),
    "H100-PCIe": DataSheet(51, 51, 756, 81559, 2000, 64, "PCIe 5 x16", "NVIDIA H100 data sheet, PCIe", *HOPPER),
    "A100-80": DataSheet(19.5, 19.5, 312, 81920, 2039, 300, "NVLink 3", "NVIDIA A100 data sheet, 80 GB SXM4", 0.869),
    "A100-40": DataSheet(19.5, 19.5, 312, 40960, 1555, 300, "NVLink 3", "NVIDIA A100 data sheet, 40 GB SXM4", 0.869),
    "L40S": DataSheet(1.4, 91.6, 362, 46068, 864, 32, "PCIe 4 x16", "NVIDIA L40S data sheet"),
    "L4": DataSheet(0.47, 30.3, 121, 23034, 300, 32, "PCIe 4 x16", "NVIDIA L4 data sheet (half of the sparse figures)"),
    "RTX-4090": DataSheet(1.29, 82.6, 165, 24564, 1008, 32, "PCIe 4 x16", "NVIDIA Ada GPU architecture paper"),
    "RTX-3090": DataSheet(0.56, 35.6, 71, 24576, 936, 32, "PCIe 4 x16", "NVIDIA Ampere GA102 architecture paper"),
    "V100": DataSheet(7.8, 15.7, 15.7, 16384, 900, 150, "NVLink 2", "NVIDIA V100 data sheet, SXM2 (no bfloat16)"),
    "V100-32": DataSheet(7.8, 15.7, 15.7, 32768, 900, 150, "NVLink 2", "NVIDIA V100 data sheet, SXM2 (no bfloat16)"),
    "T4": DataSheet(0.25, 8.1, 8.1, 15360, 320, 16, "PCIe 3 x16", "NVIDIA T4 data sheet (no bfloat16 units)"),
    "MI300X": DataSheet(
        163.4, 163.4, 1307, 196592, 5300, 64, "Infinity Fabric", "AMD Instinct MI300X data sheet", 0.514, 0.178
    ),
}

ALIASES = {"A100": "A100-80", "RTX4090": "RTX-4090", "4090": "RTX-4090", "RTX3090": "RTX-3090", "3090": "RTX-3090"}


def data_sheet_kind(name: str) -> tuple[DeviceKind, Link]:
    """Return the device kind of that name and the link between two of them in one host. Raises ClusterError if
    unknown."""
    known = {key.lower(): key for key in SHEETS} | {key.lower(): value for key, value in ALIASES.items()}
    if name.lower() not in known:
        near = most_like(name.lower(), known)
        raise ClusterError(
            f"No data sheet is known for the device {name!r}.",
            seen=name,
            allowed=", ".join(SHEETS),
            next_step=f"did you mean {known[near[0]]}?"
            if near
            else "write a cluster file: see docs/reference/clusters.md",
        )
    key = known[name.lower()]
    sheet = SHEETS[key]
    kind = DeviceKind(
        name=key,
        memory_bytes=round(sheet.memory_mib * MIB * (1 - RESERVED_SHARE)),
        peak_flops_per_s={
            "float64": sheet.float64 * TERA,
            "float32": sheet.float32 * TERA,
            "bfloat16": sheet.bfloat16 * TERA,
        },
        memory_bandwidth_bytes_per_s=float(sheet.memory_gb_per_s * GB),
        efficiency=sheet.product_share,
        product_traffic=PRODUCT_TRAFFIC,
        attention_efficiency=sheet.attention_share,
        bandwidth_efficiency=BANDWIDTH_SHARE,
        overlap=OVERLAP,
        provenance=Provenance(
            source="data-sheet",
            where=f"{sheet.source}; {RESERVED_SHARE:.0%} of the memory kept for libraries and gaps: assumed",
        ),
    )
    return kind, Link(latency_s=5e-6, bandwidth_bytes_per_s=LINK_SHARE * sheet.link_gb_per_s * GB)
