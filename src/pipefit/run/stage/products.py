"""The number type of matrix products: TF32, which PyTorch keeps for a whole process, and FP8 if the device has it."""

from __future__ import annotations

import torch

from pipefit.errors import RunError
from pipefit.run.autograd.float8 import has_scaled_product


def use_product_type(name: str, device: torch.device) -> None:
    """Let products and convolutions of float32 tensors run in TF32 if `name` is `tf32`, and in full float32 otherwise.

    Devices without TF32 units compute in float32 in both cases. Raises RunError for `fp8` on a device without FP8
    products.
    """
    tf32 = name == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    if name == "fp8" and not has_scaled_product(device):
        named = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        raise RunError(
            "This device cannot multiply matrices in FP8.",
            where="job.precision",
            seen=f"fp8 on {named}",
            allowed="devices of NVIDIA's Ada, Hopper and Blackwell generations, and AMD's MI300 series and later",
            next_step="plan again with --precision bfloat16",
        )
