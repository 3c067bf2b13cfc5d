"""Memory that stays allocated for the whole run, by parts: parameters, gradients, optimizer state, workspace.

Mixed precision follows Megatron and torchtitan: bfloat16 parameters, float32 gradients, and float32 master weights
with AdamW's two moments (2 + 4 + 12 bytes a parameter). Without mixed precision all parts have one type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Precision = Literal["float64", "float32", "bfloat16"]

COMPUTE_BYTES: Mapping[Precision, int] = {"float64": 8, "float32": 4, "bfloat16": 2}
"""Bytes of a parameter, and of an activation."""

GRADIENT_BYTES: Mapping[Precision, int] = {"float64": 8, "float32": 4, "bfloat16": 4}
"""Bytes of one entry of the gradient buffer into which all microbatches are accumulated."""

STATE_BYTES: Mapping[Precision, int] = {"float64": 16, "float32": 8, "bfloat16": 12}
"""Bytes of AdamW's state per parameter: two moments, and the float32 master weight under bfloat16."""

WORKSPACE_BYTES = 64 * 2**20
"""Assumed workspace of libraries (matrix product workspaces, communication buffers)."""


def static_parts(elements: float, frozen: float, state_share: float, precision: Precision) -> Mapping[str, float]:
    """Return the bytes by part on a device that stores `elements` trainable and `frozen` other parameter elements.

    `state_share` is the part of the optimizer state on this device: 1, or its share of the replicas under ZeRO-1.
    """
    return {
        "parameters": (elements + frozen) * COMPUTE_BYTES[precision],
        "gradients": elements * GRADIENT_BYTES[precision],
        "optimizer": elements * state_share * STATE_BYTES[precision],
        "workspace": float(WORKSPACE_BYTES),
    }


def optimizer_traffic_bytes(elements: float, state_share: float, precision: Precision) -> float:
    """Return the bytes read and written by the norm and AdamW.

    The gradients are read twice, the state is read and written, and the parameters are written.
    """
    owned_elements = elements * state_share
    return (
        elements * GRADIENT_BYTES[precision]
        + owned_elements * (GRADIENT_BYTES[precision] + 2 * STATE_BYTES[precision])
        + owned_elements * COMPUTE_BYTES[precision]
    )
