"""Memory that stays allocated for the whole run, by parts: parameters, gradients, optimizer state, workspace.

The number types follow from the precision (`pipefit/precision.py`): with AdamW a parameter takes 2 + 4 + 12 bytes in
`bfloat16`, and 2 + 2 + 12 in `bfloat16-gradients`. The state of an optimizer follows from its file in `optimizers/`.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipefit.optimizers import OptimizerKind
from pipefit.precision import NUMBER_TYPES, Precision

_TYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

COMPUTE_BYTES: Mapping[Precision, int] = {name: _TYPE_BYTES[types.compute] for name, types in NUMBER_TYPES.items()}
"""Bytes of a parameter, and of an activation."""

GRADIENT_BYTES: Mapping[Precision, int] = {name: _TYPE_BYTES[types.gradient] for name, types in NUMBER_TYPES.items()}
"""Bytes of one entry of the gradient buffer."""

STATE_BYTES: Mapping[Precision, int] = {name: _TYPE_BYTES[types.state] for name, types in NUMBER_TYPES.items()}
"""Bytes of one element of the optimizer's state."""

WORKSPACE_BYTES = 64 * 2**20
"""Assumed workspace of libraries (matrix product workspaces, communication buffers)."""


def state_bytes(optimizer: OptimizerKind, precision: Precision) -> int:
    """Return the bytes of optimizer state per parameter element that ZeRO-1 shards, master weights included."""
    return optimizer.element_state_bytes(STATE_BYTES[precision], has_master(precision))


def has_master(precision: Precision) -> bool:
    """Return True if the optimizer updates a wider copy of the parameters."""
    return STATE_BYTES[precision] > COMPUTE_BYTES[precision]


def shared_state_bytes(
    optimizer: OptimizerKind, shape: tuple[int, ...], precision: Precision, trainable: bool = True
) -> float:
    """Return the bytes of optimizer state that every device with a part of this parameter keeps."""
    return float(optimizer.shared_state_bytes(shape, STATE_BYTES[precision])) if trainable else 0.0


def static_parts(
    elements: float,
    frozen: float,
    state_share: float,
    precision: Precision,
    optimizer: OptimizerKind,
    shared_bytes: float = 0.0,
) -> Mapping[str, float]:
    """Return the bytes by part on a device that stores `elements` trainable and `frozen` other parameter elements.

    `state_share` is the part of the optimizer state on this device: 1, or its share of the replicas under ZeRO-1.
    `shared_bytes` are the bytes of state that are not sharded.
    """
    return {
        "parameters": (elements + frozen) * COMPUTE_BYTES[precision],
        "gradients": elements * GRADIENT_BYTES[precision],
        "optimizer": elements * state_share * state_bytes(optimizer, precision) + shared_bytes,
        "workspace": float(WORKSPACE_BYTES),
    }


def optimizer_traffic_bytes(
    elements: float, state_share: float, precision: Precision, optimizer: OptimizerKind
) -> float:
    """Return the bytes read and written by the norm and the update.

    The norm reads the gradients. The update reads them again, reads and writes the state, and writes the parameters.
    """
    owned_elements, read_bytes = elements * state_share, GRADIENT_BYTES[precision] * optimizer.gradient_reads
    return (
        elements * GRADIENT_BYTES[precision]
        + owned_elements * (read_bytes + 2 * state_bytes(optimizer, precision))
        + owned_elements * COMPUTE_BYTES[precision]
    )
