"""Examples of operators in short. `op_cases.py` has them all; some are in `delta_cases.py`, `image_cases.py` and
`packed_cases.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipefit.testing.operator_example import OperatorExample


def make_example(
    kind: str,
    inputs: Mapping[str, Any],
    reference: Callable[..., Any],
    attributes: Mapping[str, Any] | None = None,
    parameters: frozenset[str] = frozenset(),
    **options: Any,
) -> OperatorExample:
    """Return an `OperatorExample`; inputs of a root or of a divisor are positive."""
    return OperatorExample(
        kind=kind,
        inputs=inputs,
        reference=reference,
        attributes=attributes or {},
        parameters=parameters,
        positive=kind in ("rsqrt", "div"),
        **options,
    )
