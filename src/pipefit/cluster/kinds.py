"""Data-sheet figures of device kinds, and of the links that usually join them.

Every figure is the vendor's public one: dense (not sparse) peaks, memory as printed on the card, memory bandwidth. A
kind without tensor cores for bfloat16 computes it at its float32 rate. `efficiency` (share of the peak that large
matrix products reach) and `overhead_s` are assumptions until they are measured, equal for every kind.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.cluster.types import DeviceKind, Link, Provenance
from pipefit.errors import ClusterError, most_like

GB = 10**9
TERA = 1e12
RESERVED_SHARE = 0.08
"""Share of the card's memory that the driver, the context and the allocator reserve: assumed."""

OVERLAP = 0.8
"""Share of a gradient reduction that overlaps a backward at no cost: assumed. NCCL takes a few multiprocessors and some
of the memory bandwidth."""


@dataclass(frozen=True, slots=True)
class DataSheet:
    """One line of a data sheet: TFLOP/s by dtype, GB, GB/s, and the link between two such devices of one host."""

    float64: float
    float32: float
    bfloat16: float
    memory_gb: int
    memory_gb_per_s: float
    link_gb_per_s: float
    "One direction of the usual link between two devices of a host."
    link_name: str
    source: str


# float32 is the rate without TF32, as a float32 run here uses it. float64 counts tensor cores where they
# exist, and is 1/64 (T4: 1/32) of float32 on cards without double-precision units.
SHEETS: dict[str, DataSheet] = {
    "H200": DataSheet(67, 67, 989, 141, 4800, 450, "NVLink 4", "NVIDIA H200 data sheet, SXM"),
    "H100": DataSheet(67, 67, 989, 80, 3350, 450, "NVLink 4", "NVIDIA H100 data sheet, SXM5"),
    "H100-PCIe": DataSheet(51, 51, 756, 80, 2000, 64, "PCIe 5 x16", "NVIDIA H100 data sheet, PCIe"),
    "A100-80": DataSheet(19.5, 19.5, 312, 80, 2039, 300, "NVLink 3", "NVIDIA A100 data sheet, 80 GB SXM4"),
    "A100-40": DataSheet(19.5, 19.5, 312, 40, 1555, 300, "NVLink 3", "NVIDIA A100 data sheet, 40 GB SXM4"),
    "L40S": DataSheet(1.4, 91.6, 362, 48, 864, 32, "PCIe 4 x16", "NVIDIA L40S data sheet"),
    "L4": DataSheet(0.47, 30.3, 121, 24, 300, 32, "PCIe 4 x16", "NVIDIA L4 data sheet (half of the sparse figures)"),
    "RTX-4090": DataSheet(1.29, 82.6, 165, 24, 1008, 32, "PCIe 4 x16", "NVIDIA Ada GPU architecture paper"),
    "RTX-3090": DataSheet(0.56, 35.6, 71, 24, 936, 32, "PCIe 4 x16", "NVIDIA Ampere GA102 architecture paper"),
    "V100": DataSheet(7.8, 15.7, 15.7, 16, 900, 150, "NVLink 2", "NVIDIA V100 data sheet, SXM2 (no bfloat16 units)"),
    "V100-32": DataSheet(7.8, 15.7, 15.7, 32, 900, 150, "NVLink 2", "NVIDIA V100 data sheet, SXM2 (no bfloat16 units)"),
    "T4": DataSheet(0.25, 8.1, 8.1, 16, 320, 16, "PCIe 3 x16", "NVIDIA T4 data sheet (no bfloat16 units)"),
    "MI300X": DataSheet(163.4, 163.4, 1307, 192, 5300, 64, "Infinity Fabric", "AMD Instinct MI300X data sheet"),
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
        memory_bytes=round(sheet.memory_gb * GB * (1 - RESERVED_SHARE)),
        peak_flops_per_s={
            "float64": sheet.float64 * TERA,
            "float32": sheet.float32 * TERA,
            "bfloat16": sheet.bfloat16 * TERA,
        },
        memory_bandwidth_bytes_per_s=float(sheet.memory_gb_per_s * GB),
        overlap=OVERLAP,
        provenance=Provenance(
            source="data-sheet", where=f"{sheet.source}; {RESERVED_SHARE:.0%} of the memory kept by the driver: assumed"
        ),
    )
    return kind, Link(latency_s=5e-6, bandwidth_bytes_per_s=float(sheet.link_gb_per_s * GB))
