"""Describe and measure one device: name, memory, the rate of large matrix products, memory bandwidth, and the cost of
issuing one operator.

These make the device kind, so that the roofline of unmeasured layers is based on measurements too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from pipefit.cluster.spec import local_cluster
from pipefit.lab import pace
from pipefit.precision import TENSOR_TYPE
from pipefit.profile.environment import cpu_model, machine_fingerprint
from pipefit.profile.facts import CPU, DTYPES, DeviceRates, ProfileMember
from pipefit.run.autograd.float8 import float8_types, has_scaled_product, multiply_factors, quantize_factor
from pipefit.run.session.process_use import peak_resident_bytes
from pipefit.run.stage.products import use_product_type

_SIZE = {"cpu": 768, "cuda": 8192}
"""Rows and columns of the matrices whose product is timed."""


def describe_rank(rank: int, local_rank: int, local_size: int, device: torch.device) -> ProfileMember:
    """Describe this rank. `PIPEFIT_HOST` and `PIPEFIT_DEVICE_KIND` override the host's name and the kind of device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        torch.zeros(1, device=device)
        kind, used = torch.cuda.get_device_name(device), total - free
        total = int(total)
    else:
        kind, total = f"{CPU}{cpu_model()}", local_cluster(local_size).kinds["cpu"].memory_bytes
        used = peak_resident_bytes()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    emulated = pace.emulated_device()
    if emulated is not None:
        total, used, cores = emulated.memory_bytes, 0, local_size
    return ProfileMember(
        rank=rank,
        host=os.environ.get("PIPEFIT_HOST") or _host_name(),
        local_rank=local_rank,
        local_size=local_size,
        cores=cores,
        kind=os.environ.get("PIPEFIT_DEVICE_KIND") or kind,
        total_bytes=total,
        process_bytes=int(used),
        environment=machine_fingerprint(),
    )


def measure_rates(device: torch.device, repeats: int = 5) -> DeviceRates:
    """Time matrix products, a copy and small operators: the best of a few repetitions each."""
    emulated = pace.emulated_device()
    if emulated is not None:
        flops_per_s, bandwidth, operator_s = emulated.operator_rates()
        return DeviceRates(
            flops_per_s=dict.fromkeys(DTYPES, flops_per_s),
            memory_bandwidth_bytes_per_s=bandwidth,
            operator_s=operator_s,
        )
    size = _SIZE[device.type]
    flops: dict[str, float] = {}
    for name in DTYPES:
        use_product_type(name, device)
        dtype = getattr(torch, TENSOR_TYPE[name])
        a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        flops[name] = 2 * size**3 / _best_time(lambda a=a, b=b: a @ b, device, repeats)  # type: ignore[misc]
    if device.type == "cuda" and has_scaled_product(device):
        values = torch.ones(size, size, dtype=torch.bfloat16, device=device)
        factor, scale = quantize_factor(values, float8_types(device).value)
        flops["fp8"] = 2 * size**3 / _best_time(lambda: multiply_factors(factor, factor, scale, scale), device, repeats)
    use_product_type("float32", device)
    source = torch.zeros(64 * 2**20 // (1 if device.type == "cuda" else 4), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() * 4 / _best_time(lambda: target.copy_(source), device, repeats)
    small = torch.zeros(16, device=device)

    def run_small_operators() -> None:
        for _ in range(200):
            small.add_(1.0)

    return DeviceRates(
        flops_per_s=flops,
        memory_bandwidth_bytes_per_s=bandwidth,
        operator_s=_best_time(run_small_operators, device, repeats) / 200,
    )


def _best_time(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _host_name() -> str:
    import socket

    node = os.environ.get("GROUP_RANK", "")
    several = os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")
    return f"{socket.gethostname()}-{node}" if node and several else socket.gethostname()
