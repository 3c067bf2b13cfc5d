"""Descriptions of ranks and their devices: plain data, without torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16")
"""Number types of measured matrix products. `tf32` takes float32 tensors."""

LAYER_DTYPES = (*DTYPES, "fp8")
"""Number types of measured layers. Products in FP8 are measured where the device has them."""

CPU = "cpu "
"""Prefix of the kind of a device that is a share of a host's cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileMember:
    """One rank's description of itself."""

    rank: int
    host: str
    local_rank: int
    local_size: int
    cores: int
    "Cores that this process may run on."
    kind: str
    "Name of its kind of device."
    total_bytes: int
    process_bytes: int
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """The measured rates of a device."""

    flops_per_s: Mapping[str, float]
    "Of large matrix products, by dtype."
    memory_bandwidth_bytes_per_s: float
    "Bytes read and written by a copy."
    operator_s: float
    "Seconds to issue one small operator."


def middle_rates(each: Sequence[DeviceRates]) -> DeviceRates:
    """Return the median of several devices of one kind, for the number types that all of them measured."""
    common = [name for name in each[0].flops_per_s if all(name in rates.flops_per_s for rates in each)]
    return DeviceRates(
        flops_per_s={name: statistics.median(r.flops_per_s[name] for r in each) for name in common},
        memory_bandwidth_bytes_per_s=statistics.median(r.memory_bandwidth_bytes_per_s for r in each),
        operator_s=statistics.median(r.operator_s for r in each),
    )
