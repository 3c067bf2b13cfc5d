"""Bytes of every precision: what a parameter takes with AdamW, and what an update of it moves."""

from __future__ import annotations

import pytest

from pipefit.cost.static_memory import (
    COMPUTE_BYTES,
    GRADIENT_BYTES,
    has_master,
    optimizer_traffic_bytes,
    state_bytes,
    static_parts,
)
from pipefit.optimizers import find_optimizer
from pipefit.precision import COMPUTE_TYPE, Precision

BYTES: dict[Precision, tuple[int, int, int]] = {
    "float64": (8, 8, 16), "float32": (4, 4, 8), "bfloat16": (2, 4, 12), "bfloat16-gradients": (2, 2, 12),
}  # fmt: skip
"""Precision -> bytes of a parameter, of its gradient and of AdamW's state, master weights included."""


@pytest.mark.parametrize("precision", COMPUTE_TYPE)
def test_bytes_of_a_parameter(precision: Precision) -> None:
    optimizer = find_optimizer("adamw")
    compute, gradient, state = BYTES[precision]
    assert (COMPUTE_BYTES[precision], GRADIENT_BYTES[precision]) == (compute, gradient)
    assert state_bytes(optimizer, precision) == state
    assert has_master(precision) == (compute == 2)
    parts = static_parts(1000.0, 0.0, 1.0, precision, optimizer)
    assert [parts[name] / 1000 for name in ("parameters", "gradients", "optimizer")] == [compute, gradient, state]


@pytest.mark.parametrize("precision", COMPUTE_TYPE)
def test_bytes_of_an_update(precision: Precision) -> None:
    """The norm and the update read the gradient; the state is read and written, the parameter written."""
    compute, gradient, state = BYTES[precision]
    moved = optimizer_traffic_bytes(1000.0, 1.0, precision, find_optimizer("adamw"))
    assert moved == 1000 * (2 * gradient + 2 * state + compute)
