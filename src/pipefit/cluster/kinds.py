"""Device kinds from data sheets: the figures of `catalogue.py`, and the shares of them that kernels and links reach.

The share of the peak that large matrix products reach (`product_share` of a device's file) was measured by others: S.
Bekman, Machine Learning Engineering, table of maximum achievable matmul FLOPS (torch 2.5 to 2.7, bfloat16). Five
constants are fitted to published training runs by `benchmarks/predictions/published_steps.py --fit`: the two shares of
attention, `PRODUCT_TRAFFIC`, `BANDWIDTH_SHARE` and `OVERLAP`. `overhead_s` is assumed.
"""

from __future__ import annotations

from pipefit.cluster.catalogue import PEAKS, DataSheet, find_sheet
from pipefit.cluster.types import DeviceKind, Link, Provenance

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

PRODUCT_SHARE = 0.8
"""Share of the bfloat16 peak that large matrix products reach on devices without a measurement: assumed."""

ATTENTION_SHARE = 0.333
"""Share of the peak that attention in one kernel reaches: fitted on A100, assumed where a device's file has no share.
0.178 of H100 is fitted to runs with kernels of 2023 and 2024."""


def data_sheet_kind(name: str, where: str | None = None) -> tuple[DeviceKind, Link]:
    """Return the device kind of that name and the link between two of them in one host. Raises ClusterError if
    unknown; `where` names the input."""
    sheet = find_sheet(name, where)
    kind = DeviceKind(
        name=sheet.name,
        memory_bytes=round(sheet.memory_mib * MIB * (1 - RESERVED_SHARE)),
        peak_flops_per_s=sheet_peaks(sheet),
        memory_bandwidth_bytes_per_s=float(sheet.memory_gb_per_s * GB),
        efficiency=sheet.product_share or PRODUCT_SHARE,
        product_traffic=PRODUCT_TRAFFIC,
        attention_efficiency=sheet.attention_share or ATTENTION_SHARE,
        bandwidth_efficiency=BANDWIDTH_SHARE,
        overlap=OVERLAP,
        provenance=Provenance(
            source="data-sheet",
            where=f"{sheet.sources['peaks']}; {RESERVED_SHARE:.0%} of the memory kept for libraries and gaps: assumed",
        ),
    )
    return kind, Link(latency_s=5e-6, bandwidth_bytes_per_s=LINK_SHARE * sheet.link.gb_per_s * GB)


def sheet_peaks(sheet: DataSheet) -> dict[str, float]:
    """Return the peaks of a device in FLOP/s. A device without units for a narrow float computes it as float32."""
    peaks = {name: value * TERA for name, value in sheet.peak_tflops.items()}
    peaks = dict.fromkeys(("tf32", "float16", "bfloat16"), peaks["float32"]) | peaks
    return {name: peaks[name] for name in PEAKS if name in peaks}
