"""The number type of matrix products of float32 tensors, which PyTorch keeps for a whole process."""

from __future__ import annotations

import torch


def use_product_type(name: str) -> None:
    """Let products and convolutions of float32 tensors run in TF32 if `name` is `tf32`, and in full float32 otherwise.

    Devices without TF32 units compute in float32 in both cases.
    """
    tf32 = name == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
